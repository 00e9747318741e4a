"""Shows the starter of a process that the process still works. The process touches a file of its own, its *pulse*. The
thread that does the work touches the file, or another thread does so after it has checked on that thread. The starter
watches the file. `dovetail.supervision.liveness` and docs/architecture.md say when a process counts as silent."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PULSE = "DOVETAIL_PULSE"
BEAT_SECONDS = 1.0
# A share of a core. A thread that only polls or serves metrics needs less.
AT_WORK = 0.01


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


class ThreadProgress:
    """Tells whether thread `ident` does anything. A blocked thread uses no CPU time at all. But the thread may wait for
    helper threads. So it also counts as moving if other threads together use more than AT_WORK of a core. The thread
    that asks is left out. The clocks give seconds."""

    def __init__(
        self,
        ident: int,
        clock: Callable[[], float] = time.monotonic,
        process: Callable[[], float] = time.process_time,
        own: Callable[[], float] = time.thread_time,
        worker: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self._process, self._own = clock, process, own
        number = time.pthread_getcpuclockid(ident) if worker is None else 0
        self._worker = worker or (lambda: time.clock_gettime(number))
        self._before: tuple[float, float, float] | None = None

    @staticmethod
    def of_main_thread() -> ThreadProgress:
        """The progress of the program's main thread."""
        ident = threading.main_thread().ident
        assert ident is not None
        return ThreadProgress(ident)

    def moved(self) -> bool:
        """Whether the thread has done something since this last returned True. The first call returns True. Call it
        from one thread."""
        at, worker, others = now = self._now()
        before = self._before
        if before is None or worker > before[1] or others - before[2] > AT_WORK * (at - before[0]):
            self._before = now
            return True
        return False

    def _now(self) -> tuple[float, float, float]:
        return self._clock(), self._worker(), self._process() - self._own()
