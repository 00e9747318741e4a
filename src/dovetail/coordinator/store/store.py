"""The coordinator's store, `run_dir/store.sqlite`. It has everything that a restarted coordinator must know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.store.database import Database, StoreError
from dovetail.coordinator.store.episodes import EpisodeTable
from dovetail.coordinator.store.outcomes import (
    BatchOutcome,
    Fate,
    FatePart,
    Outcomes,
    batch_parts,
    counts_key,
    sample_rows,
)
from dovetail.coordinator.store.samples import NewSample, Sample, SampleTable
from dovetail.coordinator.store.tool_calls import ToolCalls
from dovetail.protocol.wire import BRANCH, Array

# A long change of the store changes this many rows between two turns of the event loop.
AT_ONCE = 256


class KeyValues:
    """The store's records: JSON values by key, `<namespace>/<name>`. Each method is one transaction and raises
    StoreError."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, key: str) -> Any:
        """The value put last, or None."""
        with self._db.reading() as db:
            row = db.execute("SELECT value FROM kv WHERE key=?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: object) -> None:
        """Store a JSON value. None deletes the key. Raises TypeError for a value that JSON cannot hold."""
        text = json.dumps(value)
        with self._db.transaction() as db:
            if value is None:
                db.execute("DELETE FROM kv WHERE key=?", (key,))
            else:
                db.execute(
                    "INSERT INTO kv VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value=excluded.value", (key, text)
                )

    def put_all(self, values: Mapping[str, object]) -> None:
        """Store several keys in one transaction."""
        with self._db.transaction():
            for key, value in values.items():
                self.put(key, value)

    def items(self, namespace: str) -> dict[str, Any]:
        """All keys below `namespace/`."""
        prefix = namespace.rstrip("/") + "/"
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT key, value FROM kv WHERE substr(key, 1, ?)=? ORDER BY key", (len(prefix), prefix)
            ).fetchall()
        return {key: json.loads(value) for key, value in rows}

    def sync(self) -> None:
        """When it returns, everything that was put survives a power failure. Call it before you delete data that an
        older state of the store would still need."""
        self._db.sync()

    def close(self) -> None:
        """Close the store. A second call does nothing."""
        self._db.close()


def open_records(run_dir: Path) -> KeyValues:
    """The records of a run that is not running. Its samples stay as they are. The caller closes it. Raises
    StoreError."""
    return KeyValues(Database(run_dir / "store.sqlite"))


class Store(KeyValues):
    """The store of a running job. When it is opened after a crash, samples that were being generated become pending
    again, with their tokens. `take_interrupted` then says which requests may still run on servers.

    `samples` has the iterations' samples, `episodes` what is told of their episodes, `tool_calls` the calls of tools in
    these, and `outcomes` what became of all samples so far. Every method is one transaction. All raise StoreError with
    one sentence if the disk is full, read-only or damaged. One thread changes the store. Others may read it
    meanwhile."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(Database(run_dir / "store.sqlite"))
        self.samples, self.tool_calls = SampleTable(self._db), ToolCalls(self._db)
        self.episodes = EpisodeTable(self._db, self.samples)
        self.outcomes = Outcomes(self._db)
        try:
            self._interrupted = self.samples.recover()
        except StoreError:
            self._db.close()
            raise

    def replace_prompts(
        self, iteration: int, gone: Iterable[int], samples: Sequence[NewSample], values: dict[str, object]
    ) -> None:
        """`SampleTable.replace_prompts` and `put_all` in one transaction. Records the outcome of the prompts that are
        gone."""
        with self._db.transaction():
            lost = set(gone)
            found = [sample for sample in self.samples.samples(iteration) if sample.key.prompt in lost]
            self.outcomes.put(FatePart(iteration, Fate.EQUAL_REWARDS, sample_rows(found)))
            self.samples.replace_prompts(iteration, lost, samples)
            self.put_all(values)

    def outcome_of(self, iteration: int, arrays: Mapping[str, Array]) -> BatchOutcome:
        """What becomes of the samples of an iteration's batch. Any thread may call it."""
        episodes = self.episodes.asked(iteration)
        parts = batch_parts(iteration, arrays, episodes)
        if not episodes:
            return BatchOutcome(parts, {})
        branches = sum(len(part.rows) for part in parts if part.outcome is Fate.TRAINED)
        branches += int((arrays["learnt"] == BRANCH).sum())
        tokens = {"kept_tokens": sum(e.kept for e in episodes), "lost_tokens": sum(e.lost for e in episodes)}
        return BatchOutcome(parts, {"branches": branches} | tokens | self.tool_calls.counts(iteration))

    def put_trained(self, iteration: int, outcome: BatchOutcome, values: Mapping[str, object]) -> None:
        """Record what an iteration trains, and `put_all`, in one transaction."""
        with self._db.transaction():
            for part in outcome.parts:
                self.outcomes.put(part)
            self.put_all({counts_key(iteration): outcome.counts or None, **values})

    def forget(self, iteration: int, keys: Iterable[str]) -> None:
        """`SampleTable.forget`, and delete these keys, in one transaction. What the iteration trained does not
        count. `drawings` counts how often it was forgotten."""
        with self._db.transaction():
            self.put(_drawings(iteration), self.drawings(iteration) + 1)
            self.samples.forget(iteration)
            self.outcomes.discard(iteration)
            for key in keys:
                self.put(key, None)

    def drawings(self, iteration: int) -> int:
        """How often the iteration's samples were drawn and forgotten."""
        return int(self.get(_drawings(iteration)) or 0)

    def take_interrupted(self) -> list[Sample]:
        """The samples that were on a server when the coordinator died, as they were then. A second call returns
        none."""
        interrupted, self._interrupted = self._interrupted, []
        return interrupted


def _drawings(iteration: int) -> str:
    return f"ppo/{iteration}/drawings"


async def in_slices(change: Callable[[int], bool]) -> None:
    """Call `change(rows)` until it returns True. It may change `rows` rows. The event loop goes on between two calls.
    If the process is killed meanwhile, some slices are done. So a restarted coordinator must do all of it again, with
    the same result."""
    done = change(AT_ONCE)
    while not done:
        await asyncio.sleep(0)
        done = change(AT_ONCE)
