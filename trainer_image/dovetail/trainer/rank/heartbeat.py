"""The heartbeat thread. It tells the coordinator that this rank is alive, and ends waits of a finished generation."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from dovetail.protocol.messages import Heartbeat
from dovetail.protocol.process.endings import SUPERSEDED
from dovetail.protocol.process.pulse import PROGRESS, Pulse
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.compat import oldest_wait
from dovetail.trainer.rank.coordinator_client import RankProcess

INTERVAL_SECONDS = 2.0
STILL_BEATS = 5  # without progress before it is told where the rank stands


class HeartbeatThread:
    """Sends a heartbeat to the coordinator every 2 s after `start`. The pulse beats only while the work goes on.

    If a peer dies, a rank that waits for it normally gets a broken connection at once and leaves by itself. A frozen
    peer, or one that never came, breaks no connection. So `superseded` becomes true as soon as the coordinator names a
    newer generation than this rank's. If the main thread does not call `leave` within the grace given to `enter`, the
    process exits with code 75 and is started again. A waiting Gloo collective cannot be interrupted.

    A wait of a GPU can be interrupted, and nothing else ends it. So when the generation is over, or a peer is overdue,
    this thread aborts the groups that were given to `enter`. This ends the wait on this rank. The grace begins then,
    too."""

    def __init__(
        self,
        process: RankProcess,
        rank: int,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._client, self._name, self._rank, self._incarnation = process.client, process.name, rank, incarnation
        self._log, self._clock, self._exit = process.log, clock, exit_process
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._grace = 0.0
        self._groups: Groups | None = None
        self._superseded_at: float | None = None
        self._cancelled: str | None = None
        # The commands for which the coordinator waits, and the time of the request for them.
        self._live: tuple[tuple[str, ...], float] | None = None
        # The command in the last call of `cancelled`, and the time of the first call for it.
        self._watched: tuple[str, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def enter(self, generation: int, grace: float, groups: Groups | None = None) -> None:
        """Record that this rank now belongs to `generation`. When that is over, the rank has `grace` seconds to leave,
        and `groups` are aborted."""
        with self._lock:
            self._generation, self._grace, self._superseded_at = generation, grace, None
            self._groups = groups

    def leave(self) -> None:
        """Record that this rank now belongs to no generation."""
        with self._lock:
            self._generation, self._superseded_at, self._groups = None, None, None

    @property
    def superseded(self) -> bool:
        """Whether this rank's generation is over."""
        with self._lock:
            return self._superseded_at is not None

    def within(self, generation: int) -> bool:
        """Whether this rank is in `generation`, and does not know yet that it is over."""
        with self._lock:
            return self._generation == generation and self._superseded_at is None

    def cancelled(self, command_id: str) -> bool:
        """Whether the coordinator cancelled the command, does not know it (another coordinator gave it), or the whole
        generation is over. Call it repeatedly while the command runs."""
        with self._lock:
            if self._watched is None or self._watched[0] != command_id:
                self._watched = command_id, self._clock()
            # The request may be older than the command. Then its answer does not know the command yet.
            known = self._live is None or self._live[1] < self._watched[1] or command_id in self._live[0]
            return self._superseded_at is not None or self._cancelled == command_id or not known

    def beat(self, at: str = "", waits: str = "") -> None:
        """Send one heartbeat and act on its answer. `at` and `waits` are those of `Heartbeat`."""
        with self._lock:
            generation = self._generation
        asked = self._clock()
        reply = self._client.heartbeat(
            Heartbeat(
                name=self._name,
                rank=self._rank,
                incarnation=self._incarnation,
                generation=generation,
                at=at,
                waits=waits,
            )
        )
        now = self._clock()
        with self._lock:
            if reply is not None:
                self._cancelled = reply.cancelled
                self._live = None if reply.running is None else ((reply.running, reply.sending), asked)
            if generation is None or self._generation != generation:
                return
            groups, lost = self._groups, None
            if reply is not None and reply.generation is not None and reply.generation > generation:
                lost = reply.reason or "the coordinator has moved on to a newer generation"
            elif groups is not None:
                lost = groups.overdue()
            if lost is not None:
                self._groups = None
                if self._superseded_at is None:
                    self._superseded_at = now
            stuck = self._superseded_at is not None and now - self._superseded_at >= self._grace
        if groups is not None and lost is not None:
            self._log("groups.aborted", generation=generation, reason=lost)
            # Aborting may block as well. It has its own thread, so that the grace still ends.
            threading.Thread(target=groups.abort, args=(lost,), name="abort", daemon=True).start()
        if stuck:
            self._log("rank.stuck", generation=generation, message="the generation is over; this process starts anew")
            self._exit(SUPERSEDED)

    def _run(self) -> None:
        pulse, still, stands = Pulse.read(), 0, ("", "")
        while not self._stop.is_set():
            still = 0 if PROGRESS.moved() else still + 1
            if not still or PROGRESS.excused:
                pulse.beat()
            place = _place(threading.main_thread()) if still >= STILL_BEATS else ""
            if place != stands[0]:
                stands = place, oldest_wait() if place else ""
            self.beat(*stands)
            self._stop.wait(INTERVAL_SECONDS)


def _place(thread: threading.Thread) -> str:
    """The innermost line of Dovetail's own code that the thread is in, such as `dovetail.trainer.main:92 in serve`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("dovetail."):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals['__name__']}:{frame.f_lineno} in {frame.f_code.co_name}"
