"""The run's SQLite file, with one writer, transactions, a schema version, and errors that say what to do."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dovetail.protocol.files.durable import sync

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE samples (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    state TEXT NOT NULL,
    prompt BLOB NOT NULL,            -- int32 tokens
    seed INTEGER NOT NULL,
    fields TEXT NOT NULL,            -- JSON: the prompt record's other fields
    attempt INTEGER NOT NULL DEFAULT 0,
    instance TEXT,
    incarnation TEXT,
    first_version INTEGER,           -- weights that made the first kept token
    weight_version INTEGER,          -- weights of the latest assignment
    kept INTEGER NOT NULL DEFAULT 0, -- response tokens stored, in chunks or response
    response BLOB,                   -- int32 tokens, once generated
    logprobs BLOB,                   -- float32
    finish_reason TEXT,
    ref_logprobs BLOB,               -- float32
    value_estimates BLOB,            -- float32
    reward REAL,
    critic_version INTEGER,
    PRIMARY KEY (iteration, prompt_index, sample_index)
);
-- Tokens of an unfinished response, appended as they stream in. The key makes a second token at a position impossible.
CREATE TABLE chunks (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    start INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    PRIMARY KEY (iteration, prompt_index, sample_index, start)
);
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# Tables that were added since version 1. Stores that lack them get them, empty.
ADDED = """
CREATE TABLE IF NOT EXISTS rewards (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    function TEXT NOT NULL,          -- the reward function's name
    reward REAL NOT NULL,
    PRIMARY KEY (iteration, prompt_index, sample_index, function)
);
-- What a reward function said of the steps of a response.
CREATE TABLE IF NOT EXISTS steps (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    function TEXT NOT NULL,
    steps TEXT NOT NULL,             -- JSON: [[characters up to its end, reward], ...]
    PRIMARY KEY (iteration, prompt_index, sample_index, function)
);
-- What a server said of the experts of a sample's tokens, from prompt and response, token `start` on.
CREATE TABLE IF NOT EXISTS experts (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    start INTEGER NOT NULL,
    npy BLOB NOT NULL,               -- a file of numpy's: (tokens, layers, experts of a token)
    PRIMARY KEY (iteration, prompt_index, sample_index, attempt)
);
-- The calls of tools in an episode. A row is written before the call, and its observation before anything uses it.
CREATE TABLE IF NOT EXISTS tool_calls (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,        -- of the episode: another attempt has another environment
    turn INTEGER NOT NULL,           -- of the model in the episode, from 0
    call INTEGER NOT NULL,           -- of the turn, in the model's order, from 0
    request TEXT NOT NULL,           -- JSON: [name, arguments]
    observation TEXT,                -- what the tool answered, once it is known
    PRIMARY KEY (iteration, prompt_index, sample_index, attempt, turn, call)
);
-- What became of each iteration's samples.
CREATE TABLE IF NOT EXISTS outcomes (
    iteration INTEGER NOT NULL,
    outcome TEXT NOT NULL,           -- `outcomes.Fate`
    samples BLOB NOT NULL            -- compressed rows, `outcomes.ROW`
);
-- The episodes that have ended, one for each sample of a job with sessions.
CREATE TABLE IF NOT EXISTS episodes (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    asked BLOB NOT NULL,             -- int32: the prompt that the sample was begun with
    ending TEXT NOT NULL,            -- why it ended, in a word or two
    why TEXT NOT NULL,               -- what was wrong, in a sentence
    reward REAL,                     -- the environment's
    messages TEXT NOT NULL,          -- JSON
    turns INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    learnt BLOB NOT NULL,            -- uint8, one for each token of the response (`protocol.wire.LEARNT`)
    discarded INTEGER NOT NULL,      -- 1: it is not trained
    PRIMARY KEY (iteration, prompt_index, sample_index)
);
-- What the turns of an episode that is trained were asked with, to play it again.
CREATE TABLE IF NOT EXISTS turn_requests (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    requests BLOB NOT NULL,          -- compressed JSON (`sessions.episode.StoredRequest`)
    PRIMARY KEY (iteration, prompt_index, sample_index)
);
-- What the model wrote in attempts at an episode that are not trained.
CREATE TABLE IF NOT EXISTS lost_tokens (
    iteration INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (iteration, prompt_index, sample_index)
)
"""


class StoreError(Exception):
    """The store cannot be used as asked. The message is one sentence for the user."""


class Database:
    """`run_dir/store.sqlite`, opened by one coordinator at a time.

    It uses WAL with synchronous=NORMAL, so a commit writes to the log without fsync. A killed process loses nothing,
    because the operating system has the pages. A power failure can lose the newest transactions, each as a whole. The
    run then goes on from the state before them and computes the same bits again.

    The thread that opened it changes it. Any thread may read."""

    def __init__(self, path: Path) -> None:
        """Create or open the store. Raises StoreError if it is in use by another process, of another version or
        unreadable, or if the disk is full."""
        self.path = path
        self._depth = 0
        self._owner = threading.get_ident()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = self._lock()
        try:
            # This is autocommit mode, because transactions are explicit. It waits 5 s for a reader's checkpoint lock.
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            with self._explained():
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=NORMAL")
                self._create_or_check()
            sync(path.parent)
        except sqlite3.Error as error:
            os.close(self._lock_file)
            raise StoreError(f"the store {path} cannot be opened: {error}") from error
        except StoreError:
            self._connection.close()
            os.close(self._lock_file)
            raise

    def _lock(self) -> int:
        # This is a POSIX lock on a file of its own. The kernel releases it however the process ends, and forks do not
        # inherit it.
        path = self.path.with_suffix(".lock")
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"the run directory cannot be written: {path}: {error.strerror}") from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError | PermissionError):
                raise StoreError(
                    f"another coordinator is using {self.path.parent}; stop it or choose another run directory"
                ) from error
            raise StoreError(f"{path} cannot be locked: {error.strerror}") from error
        return file

    def _create_or_check(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self.transaction() as connection:
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"the store {self.path} has schema version {version}, this release reads version {SCHEMA_VERSION}; "
                "resume with the release that began the run, or begin a new run"
            )
        for statement in ADDED.split(";"):
            self._connection.execute(statement)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction. Nested calls join the outer one. sqlite errors become StoreError."""
        if self._depth:
            yield self._connection
            return
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Run the block's queries. A thread that did not open the store uses a connection of its own, and sees what was
        committed. sqlite errors become StoreError."""
        with self._explained():
            if threading.get_ident() == self._owner:
                yield self._connection
                return
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=5.0)) as connection:
                connection.execute("PRAGMA query_only=1")
                yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(self._explain(error)) from error

    def _explain(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorname", "") or ""
        if code.startswith("SQLITE_FULL"):
            return f"the disk that holds {self.path} is full; free some space, then resume the run"
        if code.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
            return f"the store {self.path} cannot be written ({error}); make its folder writable, then resume the run"
        if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return f"the store {self.path} is damaged ({error}); begin a new run from the last exported models"
        if code.startswith("SQLITE_BUSY"):
            return f"the store {self.path} is locked by another program; close it, then resume the run"
        return f"the store {self.path} failed: {error}"

    def sync(self) -> None:
        """Write everything that was committed so far to the disk."""
        with self._explained():
            # A commit with synchronous=FULL ends with an fsync of the log, which holds the earlier commits, too.
            self._connection.execute("PRAGMA synchronous=FULL")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("INSERT OR REPLACE INTO kv VALUES ('store/synced', '1')")
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._connection.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Close the store. Everything that was committed stays, and the log is merged into the main file. A second call
        does nothing."""
        if self._lock_file < 0:
            return
        self._connection.close()
        os.close(self._lock_file)
        self._lock_file = -1


class ReadOnlyDatabase(Database):
    """The store of a run that may be at work. It changes and locks nothing."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError if there is no such store."""
        self.path = path
        if not path.is_file():
            raise StoreError(f"{path.parent} is no run directory: it has no {path.name}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with (
            self._explained(),
            closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection,
        ):
            yield connection

    def close(self) -> None: ...
