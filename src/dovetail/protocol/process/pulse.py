"""Shows the starter of a process that the process still works. The process touches a file of its own, its *pulse*. The
thread that does the work touches the file, or another thread does so after it has checked on that thread. The starter
watches the file. `dovetail.launch.liveness` and docs/architecture.md say when a process counts as silent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PULSE = "DOVETAIL_PULSE"
BEAT_SECONDS = 1.0
# Bytes a second. A thread that only polls or serves metrics needs less.
AT_WORK = 1e6


class Pulse:
    """The file at `path`. Without a path nobody watches, and nothing happens. It may be used from any thread."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Pulse:
        """The pulse that DOVETAIL_PULSE names."""
        return Pulse(Path(environ[PULSE]) if environ.get(PULSE) else None)

    def beat(self) -> None:
        """Touch the file. It is no error if the file is gone, because then its watcher is gone too."""
        if self._path is not None:
            try:
                os.utime(self._path)
            except OSError:
                self._path = None

    async def forever(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Run this as a task. It beats from the event loop, every second at which `alive` is true."""
        while True:
            if alive():
                self.beat()
            await asyncio.sleep(BEAT_SECONDS)


class Progress:
    """Tells whether a process gets on with its work. `made` counts a unit of it, such as a micro-batch. Bytes that the
    process reads and writes count too. CPU seconds do not count, because a loop that waits for what never comes uses
    some. It may be used from any thread. `clock` gives seconds, `transferred` bytes."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, transferred: Callable[[], int] | None = None
    ) -> None:
        self._clock, self._transferred = clock, transferred or _transferred
        self._units, self._waits = 0, 0
        self._before: tuple[float, int, int] | None = None

    def made(self) -> None:
        """Count a unit of work."""
        self._units += 1

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Run a block that has a deadline of its own. Nobody need end the process because of it."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._units += 1

    def moved(self) -> bool:
        """Whether work was done since this last returned True. The first call returns True. Call it from one thread."""
        before, now = self._before, (self._clock(), self._units, self._transferred())
        still = before is not None and now[1] == before[1] and now[2] - before[2] <= AT_WORK * (now[0] - before[0])
        if still:
            return False
        self._before = now
        return True

    @property
    def excused(self) -> bool:
        """Whether a block runs that has a deadline of its own."""
        return self._waits > 0


def _transferred() -> int:
    """The bytes that this process has read and written so far. 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))


# This process's own.
PROGRESS = Progress()
