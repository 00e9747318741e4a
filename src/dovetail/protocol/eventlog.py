"""Writes structured logs, with one JSON line for each event, to stderr and, in the coordinator, to the run's
events.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """The event log of a process. Call it as `log("iteration.finished", iteration=3, reward=0.4)`. Names are noun.verb,
    and values are JSON scalars. Several threads may use it.

    If a line cannot be written (for example on a full disk), only that line is lost. Logging never raises."""

    def __init__(
        self,
        process: str,
        path: Path | None = None,
        stream: TextIO | None = None,
    ):
        self._process = process
        self._stream = stream if stream is not None else sys.stderr
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._cut = False

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps(
            {"time": round(time.time(), 3), "process": self._process, "event": event, **fields}, default=str
        )
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")  # one call, because other threads write too
            self._stream.flush()
        if self._file >= 0:
            self._write((line + "\n").encode())

    def _write(self, line: bytes) -> None:
        # This writes without a buffer. A line that did not fit on the disk would stay in a buffer and fail again with
        # each later line.
        line = b"\n" + line if self._cut else line
        try:
            self._cut = os.write(self._file, line) < len(line)
        except OSError:
            return

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
