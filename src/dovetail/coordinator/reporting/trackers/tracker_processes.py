"""Starts a process for each tracker of a job. A failure of such a process never affects the run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.trackers import tracker_worker
from dovetail.coordinator.reporting.trackers.tracker_clients import CLIENTS
from dovetail.manifest.types import RLHFJobSpec, Tracker
from dovetail.protocol.process.endings import tail
from dovetail.protocol.process.env import TOKEN

# The time that trackers may take to send the rest when a run has ended.
FINISH_SECONDS = 30.0
# A failed process is started again after this time. The time doubles after each failure, up to a maximum.
AGAIN_SECONDS, LONGEST_SECONDS = 30.0, 600.0


def missing(trackers: Sequence[Tracker]) -> Iterator[tuple[Tracker, str]]:
    """The trackers whose package is not installed here, each with one sentence about it."""
    for index, tracker in enumerate(trackers):
        if not _is_installed(CLIENTS[tracker.kind][0]):
            yield (
                tracker,
                f"spec.trackers[{index}] is {tracker.kind}, whose client is not installed here: the run goes on "
                f"without it; pip install 'dovetail-rlhf[{tracker.kind}]'",
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class TrackerProcesses:
    """The tracker processes of a job. `run` is the run's id. The folder `logs` has the log of each process,
    `tracker-<kind>.log`."""

    def __init__(self, spec: RLHFJobSpec, run_dir: Path, run: str, log: Callable[..., None]) -> None:
        self._trackers = spec.trackers
        self._dir, self._run, self._log = run_dir, run, log
        self._manifest = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the trackers whose clients are installed, and log the others."""
        absent = {tracker.kind: told for tracker, told in missing(self._trackers)}
        for kind, told in absent.items():
            self._log("tracker.missing", kind=kind, message=told)
        wanted = [tracker for tracker in self._trackers if tracker.kind not in absent]
        self._tasks = [asyncio.create_task(self._keep(tracker)) for tracker in wanted]

    async def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Call it when the run has ended. It waits until everything is sent, for at most `seconds`."""
        self._over.set()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if late:
            self._log("tracker.late", seconds=seconds, message="a tracker did not take the rest of the run in time")
        self._tasks = []

    async def _keep(self, tracker: Tracker) -> None:
        """Run the tracker's process until the run has ended. A failed process is started again."""
        pause, told = AGAIN_SECONDS, ""
        while True:
            try:
                reason = await self._follow(tracker)
            except OSError as error:  # for example no memory for a process, or a full disk
                reason = str(error)
            if reason is None:
                return
            if reason != told:
                told = reason
                self._log("tracker.failed", kind=tracker.kind, reason=reason, again_in=pause)
            if self._over.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._over.wait()
            pause = min(2 * pause, LONGEST_SECONDS)

    async def _follow(self, tracker: Tracker) -> str | None:
        """Start the process and wait for it. Returns None if it has sent everything, otherwise its last line."""
        path = self._dir / "logs" / f"tracker-{tracker.kind}.log"
        path.parent.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != TOKEN}
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                tracker_worker.__name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert process.stdin is not None
        over = asyncio.create_task(self._over.wait())
        ended = asyncio.create_task(process.wait())
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(self._order(tracker)).encode() + b"\n")
                await process.stdin.drain()
            await asyncio.wait({over, ended}, return_when=asyncio.FIRST_COMPLETED)
            process.stdin.close()
            code = await ended
        finally:
            for task in (over, ended):
                task.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                await process.wait()
        return None if code == 0 else [f"it ended with code {code}", *tail(path)][-1].strip()

    def _order(self, tracker: Tracker) -> dict[str, Any]:
        return {
            "kind": tracker.kind,
            "project": tracker.project,
            "name": tracker.name or self._dir.name,
            "url": tracker.url,
            "run": self._run,
            "run_dir": str(self._dir),
            "manifest": self._manifest,
        }
