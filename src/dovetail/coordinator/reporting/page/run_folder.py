"""Reads a run's folder, during the run or after it. It changes and locks nothing in the folder."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from dovetail.coordinator.reporting.sample_files import Row, evaluation_files, files, read_rows, regular, rows_from
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.wire import Arrays, unpack

# The number of events that are kept for the page, beside the moves of samples.
EVENTS = 200
# These events are too many and of too little interest for a list.
_UNLISTED = frozenset({"sample.moved", "sample.retried", "sample.shown", "iteration.finished", "requests.aborted"})
_MOVES = frozenset({"sample.moved", "sample.retried"})
# This many iterations may be drawn before the first file of samples is written.
AHEAD = 16
# The page shows the first of these files that exists.
SCHEDULES = ("schedule.json", "schedule-dpo.json", "schedule-sft.json", "schedule-reward.json")
_TRACE = re.compile(r"iteration-(\d{1,9})\.json")
_BATCH = re.compile(r"(\d{1,9})\.safetensors")
Document = dict[str, Any]


class RunFolder:
    """A run's folder. Only the new part of a growing file is read. It may be used from several threads.

    A missing or damaged file counts as empty, because a run that has just begun lacks most of its files. `given` has
    documents that are already known, by the name of their file. In a pod, job.json and plan.json are elsewhere."""

    def __init__(self, path: Path, given: Mapping[str, Document] | None = None) -> None:
        self.path = path
        self._given = dict(given or {})
        self._lock = threading.Lock()
        self._read: dict[str, int] = {}
        self._rows: list[Document] = []
        self._events: deque[Document] = deque(maxlen=EVENTS)
        self._moves: dict[int, list[Document]] = {}
        # Size and time of schedule.json when it was last looked at, and whether there was a schedule in it.
        self._scheduled: tuple[tuple[int, int] | None, bool] = (None, False)

    # ------------------------------------------------------------ documents

    def job(self) -> Document:
        return self._json("job.json")

    def parsed_job(self) -> RLHFJob | None:
        """job.json as a manifest. None if it is of another release, or missing."""
        try:
            return RLHFJob.model_validate(self.job())
        except (ValidationError, RecursionError):
            return None

    def plan(self) -> Document:
        return self._json("plan.json")

    def summary(self) -> Document:
        return self._json("summary.json")

    def elapsed(self) -> Any:
        """The seconds for which the launcher has run the job on one machine, over all resumes. None if nobody knows."""
        return self._json("elapsed.json").get("seconds")

    def schedule(self) -> Document:
        """The schedule of PPO, or else that of another stage. {} for a run with only one possible schedule."""
        found = self._json(self._schedule_name())
        return found if "after" in found and "before" in found else {}

    def _schedule_name(self) -> str:
        return next((name for name in SCHEDULES if (self.path / name).exists()), SCHEDULES[0])

    def has_schedule(self) -> bool:
        """Whether there is a `schedule`. With many ranks its file is large, so it is read again only if it has
        changed."""
        try:
            found = (self.path / self._schedule_name()).stat()
        except OSError:
            return False
        mark = (found.st_size, found.st_mtime_ns)
        if self._scheduled[0] != mark:
            self._scheduled = mark, bool(self.schedule())
        return self._scheduled[1]

    def trace(self, iteration: int) -> Document:
        return self._json(f"traces/iteration-{iteration:04d}.json")

    def samples(self, iteration: int) -> list[Row]:
        return self._sample_rows(files(self.path).get(iteration))

    def evaluation(self, version: int) -> list[Row]:
        return self._sample_rows(evaluation_files(self.path).get(version))

    def samples_from(self, iteration: int, offset: int) -> Iterator[Row]:
        """The rows of an iteration's samples from number `offset` on. Raises OSError if they are not kept, and
        ValueError if a row is damaged."""
        return self._rows_from(files(self.path).get(iteration), offset)

    def evaluation_from(self, version: int, offset: int) -> Iterator[Row]:
        """The same as `samples_from`, for an evaluation's answers."""
        return self._rows_from(evaluation_files(self.path).get(version), offset)

    def batch(self, iteration: int) -> Arrays:
        """The iteration's tokens, log-probabilities and values. {} if the run does not keep them any more."""
        try:
            with open(self.path / "experience" / f"{iteration:06d}.safetensors", "rb", opener=regular) as file:
                return unpack(file.read())
        except (OSError, SafetensorError):
            return {}

    # ------------------------------------------------------------ what there is

    def sample_iterations(self) -> list[int]:
        return sorted(files(self.path))

    def evaluations(self) -> list[int]:
        return sorted(evaluation_files(self.path))

    def trace_iterations(self) -> list[int]:
        return self._numbers("traces", _TRACE)

    def batch_iterations(self) -> list[int]:
        return self._numbers("experience", _BATCH)

    def models(self) -> list[str]:
        """The models that the run has exported."""
        found = (self.path / "models").glob("*/dovetail.json")
        return sorted(path.parent.name for path in found)

    # ------------------------------------------------------------ files that grow

    def rows(self) -> list[Document]:
        """The rows of history.jsonl. A step that was repeated has a row for each time."""
        with self._lock:
            for row in self._new_lines("history.jsonl"):
                metrics = row.get("metrics")
                if isinstance(metrics, dict) and isinstance(row.get("step"), int) and "stage" in row:
                    # The names of metrics are the same in thousands of rows.
                    self._rows.append(row | {"metrics": {sys.intern(name): metrics[name] for name in metrics}})
            return list(self._rows)

    def events(self) -> list[Document]:
        """The newest events about the run as a whole, in order."""
        with self._lock:
            self._read_events()
            return list(self._events)

    def moves(self, iteration: int) -> list[Document]:
        """The moves and failures of the iteration's samples, in order."""
        with self._lock:
            self._read_events()
            return list(self._moves.get(iteration, []))

    def sizes(self) -> Document:
        """A value that changes when a step of the run has ended. It is cheap to compute, even for many runs at once."""
        return {name: self._size(name) for name in ("history.jsonl", "summary.json")}

    def stamp(self) -> Document:
        """A value that changes while the run makes progress."""
        sizes = self.sizes() | {name: self._size(name) for name in ("events.jsonl", self._schedule_name())}
        newest = {"samples": max(files(self.path), default=0), "traces": max(self.trace_iterations(), default=0)}
        return sizes | newest | {"evaluations": len(self.evaluations())}

    def _read_events(self) -> None:
        kept = files(self.path)
        # Nobody asks for the moves of samples that are not kept any more.
        oldest = min(kept) if kept else max(self._moves, default=0) - AHEAD
        for gone in [iteration for iteration in self._moves if iteration < oldest]:
            del self._moves[gone]
        for event in self._new_lines("events.jsonl"):
            name, sample = event.get("event"), event.get("sample")
            iteration = sample[0] if isinstance(sample, list) and len(sample) == 3 else None
            if name in _MOVES and isinstance(iteration, int) and iteration >= oldest:
                self._moves.setdefault(iteration, []).append(event)
            # Servers fall behind and catch up with each publication of weights.
            if name not in _UNLISTED and "stale" not in (event.get("health"), event.get("before")):
                self._events.append(event)

    def _new_lines(self, name: str) -> Iterator[Document]:
        """The JSON objects on whole lines since the last call. A file that became shorter is read anew."""
        start = self._read.get(name, 0)
        if self._size(name) < start:
            self._read[name] = start = 0
            for known in (self._rows,) if name == "history.jsonl" else (self._events, self._moves):
                known.clear()
        with contextlib.suppress(OSError), open(self.path / name, "rb", opener=regular) as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is still being written
                start += len(line)
                self._read[name] = start
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):  # cut off by a crash, or not ours
                    continue
                if isinstance(document, dict):
                    yield document

    # ------------------------------------------------------------ inner parts

    def _size(self, name: str) -> int:
        try:
            return (self.path / name).stat().st_size
        except OSError:
            return 0

    def _json(self, name: str) -> Document:
        if name in self._given:
            return self._given[name]
        try:
            with open(self.path / name, encoding="utf-8", opener=regular) as file:
                document = json.load(file)
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def _numbers(self, folder: str, pattern: re.Pattern[str]) -> list[int]:
        try:
            names = [path.name for path in (self.path / folder).iterdir()]
        except OSError:
            return []
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))

    @staticmethod
    def _rows_from(path: Path | None, offset: int) -> Iterator[Row]:
        if path is None:
            raise FileNotFoundError
        yield from rows_from(path, offset)

    @staticmethod
    def _sample_rows(path: Path | None) -> list[Row]:
        try:
            return [] if path is None else read_rows(path)
        except (OSError, ValueError):
            return []
