"""Writes structured logs, one JSON line per event, to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO


class Events:
    """`log("step.finished", id="sft/3", seconds=1.2)` writes one event. Names are noun.verb. Several threads may use
    it."""

    def __init__(self, process: str, clock: Callable[[], float] = time.time, stream: TextIO | None = None) -> None:
        self._process, self._clock = process, clock
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        record = {"time": round(self._clock(), 3), "process": self._process, "event": event, **fields}
        # If the disk is full, only this line is lost.
        with self._lock, contextlib.suppress(OSError):
            print(json.dumps(record, default=str), file=self._stream, flush=True)
