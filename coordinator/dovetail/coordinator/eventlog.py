"""Structured logs: one JSON line per event, on stderr and in the run's events.jsonl."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """`log("iteration.finished", iteration=3, reward=0.4)`; names are noun.verb, values JSON scalars."""

    def __init__(
        self,
        path: Path | None,
        process: str,
        clock: Callable[[], float] = time.time,
        stream: TextIO | None = None,
    ):
        self._process = process
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self._file = path.open("a", buffering=1, encoding="utf-8") if path is not None else None

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps(
            {"time": round(self._clock(), 3), "process": self._process, "event": event, **fields}, default=str
        )
        print(line, file=self._stream, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
