"""Measures how long a run has run, over all its resumes. It keeps the time in the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.launch.local.rundir import write_text

WRITE_SECONDS = 5.0


class Stopwatch:
    """Measures from its creation on, and adds the time of earlier resumes. Call `look` again and again. If the launcher
    is killed, at most `WRITE_SECONDS` are lost."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._before, self._begun = _read(path), clock()
        self._written = self._begun

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._begun

    def look(self) -> None:
        """Write the time every few seconds. A full disk does not end the run."""
        if self._clock() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        self._written = self._clock()
        try:
            write_text(self._path, json.dumps({"seconds": round(self.seconds, 3)}) + "\n")
        except OSError:
            return


def _read(path: Path) -> float:
    try:
        return max(0.0, float(json.loads(path.read_text())["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
