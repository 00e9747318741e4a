"""The token ids of a list's records. They are made once, when the job prepares, and kept in the run's folder as
memory-mapped arrays. So a batch is made of positions, and a restarted coordinator does not tokenise again.

Run as a program, this module is one of the processes that tokenise a large list. It reads pickled lists of records from
its standard input, and answers with pickled arrays."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.collection import Place, StageData
from dovetail.coordinator.data.records import Demonstration, Judged, Labelled
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.tokenize import Encoded, Encoder
from dovetail.protocol.files.durable import read_object, sync, write_json

Ints = NDArray[np.int64]
Parts = dict[str, NDArray[Any]]

VERSION = 1  # of the file
CHUNK = 256  # records that are tokenised together
# A list with more characters than this is tokenised by processes. One process takes about five seconds for it.
MANY_CHARACTERS = 20_000_000
# Each has an interpreter and a tokenizer of its own, and a coordinator has little memory.
MOST_PROCESSES = 4
CHUNK_SECONDS = 600.0  # after which a process that does not answer is killed
TOLD_SECONDS = 2.0
# The columns of the file after the token ids, each int64. `lengths` and `prompt_lengths` have an entry for each
# sequence, and so has `ranges`, the number of its (start, end) in `given`. `good` has one for each record.
COLUMNS = ("lengths", "prompt_lengths", "ranges", "given", "good")


@dataclass(frozen=True)
class Tokenizing:
    """An encoder, and the folder from which other processes load its tokenizer. `trusted` says that they may run the
    folder's code."""

    encoder: Encoder
    folder: Path
    trusted: bool


def encode(encoder: Encoder, records: Sequence[Demonstration | Judged]) -> Parts:
    """The token ids and the columns of some records."""
    rows = [row for record in records for row in encoder.sequences(record)]
    return {
        "tokens": np.array([token for row in rows for token in row.tokens], np.int32),
        "lengths": np.array([len(row.tokens) for row in rows], np.int64),
        "prompt_lengths": np.array([row.prompt_length for row in rows], np.int64),
        "ranges": np.array([len(row.given) for row in rows], np.int64),
        "given": np.array([place for row in rows for span in row.given for place in span], np.int64),
        "good": np.array([isinstance(each, Labelled) and each.good for each in records], np.int64),
    }


class TokenTable:
    """The sequences of the records at `places`. A record has one sequence, or two if it is a pair: the chosen one and
    the rejected one. It is read from the file as it is used, so it takes no memory of its own."""

    def __init__(self, path: Path, places: Sequence[Ints], counts: Mapping[str, int]) -> None:
        """`places` has the positions of the records in each source, ascending. `counts` has the number of token ids,
        and of entries of each column."""
        starts = np.cumsum([0, *(len(each) for each in places)])
        self._places, self._starts = places, starts
        self._tokens = np.memmap(path, np.int32, "r", shape=(counts["tokens"],)) if counts["tokens"] else _EMPTY
        columns = np.memmap(path, np.int64, "r", offset=_padded(4 * counts["tokens"])) if counts["lengths"] else _EMPTY
        bounds = np.cumsum([0, *(counts[name] for name in COLUMNS)])
        self._of = {name: columns[a:b] for name, a, b in zip(COLUMNS, bounds, bounds[1:], strict=False)}
        self._ends = np.concatenate([[0], np.cumsum(self._of["lengths"])])
        self._range_ends = np.concatenate([[0], np.cumsum(self._of["ranges"])])
        self._each = len(self._of["lengths"]) // max(1, int(starts[-1]))

    def _row(self, place: Place) -> int:
        source, record = place
        held = self._places[source]
        found = int(np.searchsorted(held, record))
        if found == len(held) or held[found] != record:
            raise KeyError(f"record {record} of source {source} belongs to no step of this job")
        return int(self._starts[source]) + found

    def __getitem__(self, place: Place) -> tuple[Encoded, ...]:
        """The sequences of a record. Raises KeyError if no step uses it."""
        first = self._row(place) * self._each
        return tuple(self._sequence(row) for row in range(first, first + self._each))

    def _sequence(self, row: int) -> Encoded:
        given = self._of["given"][2 * self._range_ends[row] : 2 * self._range_ends[row + 1]].reshape(-1, 2)
        return Encoded(
            self._tokens[self._ends[row] : self._ends[row + 1]],
            int(self._of["prompt_lengths"][row]),
            tuple((int(start), int(end)) for start, end in given),
        )

    def good(self, place: Place) -> bool:
        """The label of a record. It is False for a record without one."""
        return bool(self._of["good"][self._row(place)])


_EMPTY: NDArray[Any] = np.zeros(0, np.int64)


def _padded(size: int) -> int:
    return size + -size % 8


def token_table(
    path: Path, key: str, data: StageData[Any], places: Sequence[Ints], by: Tokenizing, note: Callable[[str], None]
) -> TokenTable:
    """The table in the file `path`. It is made if it is missing, damaged, or has another `key`, which stands for all
    that the token ids depend on. `note` gets sentences about the progress. Raises DataError for a malformed record, and
    OSError."""
    described = path.with_suffix(".json")
    stamp = hashlib.sha256(json.dumps([VERSION, key]).encode())
    for each in places:
        stamp.update(each.tobytes() + b"/")
    found = read_object(described)
    if found.get("key") != stamp.hexdigest() or found.get("sha256") != _digest(path):
        described.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        counts, digest = _write(path, data, places, by, note)
        found = {"key": stamp.hexdigest(), "sha256": digest, "counts": counts}
        write_json(described, found)
    return TokenTable(path, places, found["counts"])


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _write(
    path: Path, data: StageData[Any], places: Sequence[Ints], by: Tokenizing, note: Callable[[str], None]
) -> tuple[dict[str, int], str]:
    """Write the file. Returns the number of entries by name, and the file's SHA-256."""
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
    total, done, tokens, told = sum(len(each) for each in places), 0, 0, time.monotonic()
    digest, temporary = hashlib.sha256(), path.with_name(path.name + ".tmp")

    def put(array: NDArray[Any] | bytes) -> None:
        written = array if isinstance(array, bytes) else array.tobytes()
        digest.update(written)
        file.write(written)

    try:
        with temporary.open("wb") as file:
            for part in _encoded(data, places, by):
                put(part["tokens"])
                tokens += len(part["tokens"])
                for name in COLUMNS:
                    columns[name].append(part[name])
                done += len(part["good"])
                if time.monotonic() > told + TOLD_SECONDS:
                    told = time.monotonic()
                    note(f"tokenising: {done:,} of {total:,} records")
            put(bytes(_padded(4 * tokens) - 4 * tokens))
            for name in COLUMNS:
                put(np.concatenate([np.zeros(0, np.int64), *columns[name]]))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)  # on a full disk other files need the space
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    counts = {name: sum(map(len, parts)) for name, parts in columns.items()}
    return {"tokens": tokens, **counts}, digest.hexdigest()


def _encoded(data: StageData[Any], places: Sequence[Ints], by: Tokenizing) -> Iterator[Parts]:
    """The parts of the table in order, each of at most CHUNK records."""
    chunks = [
        (source, held[start : start + CHUNK])
        for source, held in enumerate(places)
        for start in range(0, len(held), CHUNK)
    ]

    def read(chunk: tuple[int, Ints]) -> list[Any]:
        return [data.parts[chunk[0]].records[int(i)] for i in chunk[1]]

    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(chunks))
    if processes > 1 and sum(map(_characters, read(chunks[0]))) * len(chunks) > MANY_CHARACTERS:
        yield from _by_processes(processes, chunks, read, by)
    else:
        for chunk in chunks:
            yield encode(by.encoder, read(chunk))


def _characters(record: Any) -> int:
    if isinstance(record, Demonstration):
        return len(record.text)
    replies = (record.response,) if isinstance(record, Labelled) else (record.chosen, record.rejected)
    return sum(len(record.prompt) + len(reply) for reply in replies)


def _by_processes(
    count: int,
    chunks: Sequence[tuple[int, Ints]],
    read: Callable[[tuple[int, Ints]], list[Any]],
    by: Tokenizing,
) -> Iterator[Parts]:
    """The parts in order, made by `count` processes. A thread for each process reads the records and waits for it. A
    few parts for each process are held in memory."""
    with ExitStack() as stack:
        idle: deque[subprocess.Popen[bytes]] = deque()
        for _ in range(count):
            process = _process(by)
            stack.callback(_end, process)
            idle.append(process)

        def make(chunk: tuple[int, Ints]) -> Parts:
            records, process = read(chunk), idle.popleft()
            try:
                return _asked(process, records)
            except (OSError, EOFError, pickle.UnpicklingError):
                return encode(by.encoder, records)  # the process was killed, or this raises the error that ended it
            finally:
                idle.append(process)

        pool = stack.enter_context(ThreadPoolExecutor(count))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting: deque[Future[Parts]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(make, chunk))
            if len(waiting) > 4 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _process(by: Tokenizing) -> subprocess.Popen[bytes]:
    limits = [str(by.encoder.max_prompt_tokens), str(by.encoder.max_tokens)]
    command = [sys.executable, "-P", "-m", __name__, str(by.folder), str(int(by.trusted)), *limits]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # a process that died has not read all
            pipe.close()
    process.wait()


def _asked(process: subprocess.Popen[bytes], records: list[Any]) -> Parts:
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(CHUNK_SECONDS, process.kill)
    late.start()
    try:
        pickle.dump(records, process.stdin)
        process.stdin.flush()
        made: Parts = pickle.load(process.stdout)
        return made
    finally:
        late.cancel()


def main(given: IO[bytes], answers: IO[bytes]) -> None:
    """Tokenise the records of each list that comes, until the input ends."""
    folder, trusted, prompt, most = sys.argv[1:]
    found = tokenizers.load(folder, "spec.models.tokenizer", trust_remote_code=trusted == "1")
    encoder = Encoder(found, int(prompt), int(most))
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(encode(encoder, pickle.load(given)), answers)
            answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what a tokenizer's code prints is no answer
        main(sys.stdin.buffer, replies)
