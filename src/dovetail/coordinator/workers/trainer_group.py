"""The coordinator's view of the trainer ranks. It knows which ranks have joined, which generation is current, and which
command is running.

Ranks ask for commands (docs/architecture.md, "Trainers pull"). A *generation* is one lifetime of the ranks' process
groups. It ends as soon as a rank joins again, is silent, or reports that it lost a peer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.manifest.types import Stage
from dovetail.protocol.messages import (
    Command,
    CommandResult,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Load,
    NextReply,
    NextRequest,
    RankThread,
)
from dovetail.protocol.process.process_names import trainer_name

POLL_SECONDS = 20.0
# Ranks send a heartbeat every 2 s. A rank that has sent none for this many seconds may be frozen.
QUIET_SECONDS = 10.0


class TrainerLost(Exception):
    """The generation ended while a command ran. The last checkpoint must be loaded, and the steps since then must run
    again."""


class TrainerError(Exception):
    """The trainers refused a command, or it failed. The message is theirs."""


class StaleGeneration(Exception):
    """A rank asked for work in a generation that has ended."""


class CheckpointDamaged(TrainerError):
    """A checkpoint is missing or differs from what was saved."""


@dataclass(frozen=True)
class TrainerPosition:
    """The state that the ranks hold, as a stage and its last step that was applied. If `stage` is None, they hold no
    models."""

    stage: Stage | None
    step: int


@dataclass
class _Running:
    command: Command
    sent: bool
    result: asyncio.Future[CommandResult]
    limit: asyncio.Timeout | None = None


@dataclass
class TrainerGroup:
    """The trainer ranks of a job. `generation` is the last generation, and `formed` says whether it is still running. A
    rank counts as lost after `peer_timeout` seconds without a heartbeat. `clock` returns monotonic seconds.
    `record_result` stores a result. It is called before the rank gets its acknowledgement."""

    world_size: int
    generation: int
    formed: bool
    peer_timeout: float
    clock: Callable[[], float]
    record_generation: Callable[[int], None]
    record_result: Callable[[CommandResult], None]
    log: Callable[..., None]
    _pending: dict[int, JoinRequest] = field(default_factory=dict)
    _replies: dict[str, JoinReply] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _at: dict[int, tuple[str, str]] = field(default_factory=dict)
    _running: dict[RankThread, _Running] = field(default_factory=dict)
    _versions: frozenset[int] = frozenset()
    _position: TrainerPosition | None = None
    _last_result: CommandResult | None = None
    _cancelled: str | None = None
    _why: str = ""  # the reason why the last generation ended
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    # ------------------------------------------------------------ called by the HTTP server

    async def join(self, request: JoinRequest) -> JoinReply:
        """Add a rank to the next generation, by a long poll. The reply's generation is None if ranks are still missing.
        Raises ValueError for a rank that cannot form process groups with the others."""
        if request.world_size != self.world_size:
            raise ValueError(
                f"rank {request.rank} was started for {request.world_size} ranks, the plan has {self.world_size}"
            )
        for rank, other in self._pending.items():
            if rank != request.rank and other.nccl_version != request.nccl_version:
                raise ValueError(
                    f"{request.name} has NCCL {request.nccl_version}, and {other.name} has "
                    f"{other.nccl_version}; give all trainer ranks the same image, and GPUs to all or to none"
                )
        if request.rank in range(self.world_size) and request.incarnation not in self._replies:
            if self.formed:
                self.end_generation(f"{request.name} joined again")
            self._pending[request.rank] = request
            self._form_if_complete()
        deadline = self.clock() + POLL_SECONDS
        while request.incarnation not in self._replies:
            remaining = deadline - self.clock()
            if remaining <= 0 or self._closed:
                return JoinReply()
            await self._wait_change(remaining)
        # Each join is answered once. A rank that joins again after this has left the generation.
        return self._replies.pop(request.incarnation)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Tell a rank the current generation and the command that is running. It then leaves the collectives of an
        older generation, and gives up a publish that a dead coordinator began."""
        self._seen[beat.rank], self._at[beat.rank] = self.clock(), (beat.at, beat.waits)
        ids = {thread: there.command.id for thread, there in self._running.items()}
        return HeartbeatReply(
            generation=self.generation,
            reason=self._why,
            cancelled=self._cancelled,
            running=ids.get("main", ""),
            sending=ids.get("weights", ""),
        )

    async def next(self, request: NextRequest) -> NextReply:
        """Give rank 0 its next command, by a long poll. Rank 0 asks in its main thread, or in the thread that sends
        kept weights. Raises StaleGeneration."""
        if request.generation != self.generation or not self.formed:
            raise StaleGeneration(f"generation {request.generation} is over; the current one is {self.generation}")
        thread = request.thread
        if thread == "main":
            self._position = TrainerPosition(request.stage, request.step)
            self._versions = frozenset(request.versions)
        elif self._position is None:
            # This coordinator restarted while the main threads train.
            self._versions |= frozenset(request.versions)
        if request.result is not None:
            self._take_result(request.result, thread)
        if (running := self._running.get(thread)) is not None:
            # If rank 0 asks again, it has not received the command. The reply that carried it was lost.
            running.sent = False
        self._notify()
        deadline = self.clock() + POLL_SECONDS
        while True:
            if request.generation != self.generation or not self.formed:
                raise StaleGeneration(f"generation {request.generation} is over")
            running = self._running.get(thread)
            if running is not None and not running.sent:
                running.sent = True
                if isinstance(running.command, Load):
                    self._versions = frozenset()
                return NextReply(command=running.command)
            remaining = deadline - self.clock()
            if remaining <= 0 or self._closed:
                return NextReply()
            await self._wait_change(remaining)

    def close(self) -> None:
        """Answer the long polls now, so that the HTTP server need not wait for them when it closes."""
        self._closed = True
        self._notify()

    def end_generation(self, why: str) -> None:
        """End the generation. The remaining ranks learn it from their heartbeats and join again."""
        self.generation += 1
        self.formed = False
        self._why = why
        self.record_generation(self.generation)
        self._pending.clear()
        self._replies.clear()
        self._position = None
        self._versions = frozenset()
        self._last_result = None
        self.log("trainers.lost", reason=why, generation=self.generation)
        for running in self._running.values():
            if not running.result.done():
                running.result.set_exception(TrainerLost(why))
        self._running.clear()
        self._notify()

    def check_silence(self) -> None:
        """End the generation if a rank's heartbeats stopped for `peer_timeout` seconds. Call it about once a second."""
        if not self.formed:
            return
        now = self.clock()
        for rank in range(self.world_size):
            if now - self._seen.setdefault(rank, now) > self.peer_timeout:
                self._seen.clear()
                self.end_generation(f"{trainer_name(rank)} was silent for {self.peer_timeout:.0f} s")
                return

    # ------------------------------------------------------------ called by the driver

    async def wait_position(self, timeout: float) -> TrainerPosition:
        """Wait until a generation is formed and rank 0 has asked for work. Returns what the ranks hold. Raises
        TimeoutError after `timeout` seconds."""
        deadline = self.clock() + timeout
        while self._position is None or not self.formed:
            remaining = deadline - self.clock()
            if remaining <= 0:
                missing = sorted(set(range(self.world_size)) - set(self._pending))
                raise TimeoutError(
                    f"trainer ranks {missing} did not join within {timeout:.0f} s; see their logs"
                    if missing and not self.formed
                    else f"trainer rank 0 did not ask for work within {timeout:.0f} s; see its log"
                )
            await self._wait_change(remaining)
        return self._position

    @property
    def position(self) -> TrainerPosition | None:
        """The state that the ranks hold, as far as they have reported it. None while they are joining."""
        return self._position if self.formed else None

    @property
    def quiet(self) -> bool:
        """Whether a rank may be frozen, because it has sent no heartbeat for `QUIET_SECONDS`. It counts as lost only
        later."""
        oldest = min((self._seen[rank] for rank in range(self.world_size) if rank in self._seen), default=self.clock())
        return self.formed and self.clock() - oldest > QUIET_SECONDS

    def heard(self) -> dict[str, tuple[float, bool, tuple[str, str]]]:
        """By rank's name: when its last heartbeat came, whether it has joined or is joining, and `at` and `waits` of
        this `Heartbeat` if a command runs."""
        now = self.clock()
        return {
            trainer_name(rank): (
                self._seen.get(rank, now),
                self.formed or rank in self._pending,
                self._at.get(rank, ("", "")) if self._running else ("", ""),
            )
            for rank in range(self.world_size)
        }

    @property
    def versions(self) -> frozenset[int]:
        """The versions of the weights that the ranks keep. They can be sent while the ranks train."""
        return self._versions if self.formed else frozenset()

    async def wait_version(self, version: int) -> None:
        """Wait until the ranks keep the version."""
        while version not in self.versions:
            await self._wait_change(POLL_SECONDS)

    async def execute(self, command: Command, timeout: float, beside: bool = False) -> CommandResult:
        """Run one command on all ranks. `beside` says that the command publishes a kept version. The main threads may
        then run another command meanwhile. Raises TrainerLost if a rank dies or no result comes within `timeout`
        seconds, and TrainerError if the ranks refuse the command."""
        thread: RankThread = "weights" if beside else "main"
        if (before := self._running.get(thread)) is not None:
            raise RuntimeError(f"{before.command.id} is still running")
        if self._last_result is not None and self._last_result.id == command.id:
            return self._checked(self._last_result)
        generation = self.generation
        if not self.formed:
            raise TrainerLost("the trainers are joining")
        running = _Running(command, False, asyncio.get_running_loop().create_future())
        self._running[thread] = running
        self._notify()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(timeout) as running.limit:
                result = await running.result
        except TimeoutError:
            late = f"{command.id} took longer than {clock() - began:.0f} s"
            if generation == self.generation:
                self.end_generation(late)
            raise TrainerLost(late) from None
        finally:
            if self._running.get(thread) is running:
                del self._running[thread]
        return self._checked(result)

    def extend(self, command_id: str, timeout: float) -> None:
        """Let the running command take `timeout` seconds from now."""
        for running in self._running.values():
            if running.command.id == command_id and running.limit is not None:
                running.limit.reschedule(asyncio.get_running_loop().time() + timeout)

    def cancel(self, command_id: str) -> None:
        """Tell the ranks, with their next heartbeats, to give up a publish. Use it for a publish that waits for a
        failed receiver."""
        self._cancelled = command_id

    # ------------------------------------------------------------ inner parts

    @staticmethod
    def _checked(result: CommandResult) -> CommandResult:
        if not result.ok and result.damaged:
            raise CheckpointDamaged(result.error or f"{result.id}: the checkpoint is damaged")
        if not result.ok:
            raise TrainerError(result.error or f"{result.id} failed without a reason")
        return result

    def _take_result(self, result: CommandResult, thread: RankThread) -> None:
        self.record_result(result)
        if thread == "main":
            self._last_result = result
        running = self._running.get(thread)
        if running is not None and running.command.id == result.id and not running.result.done():
            running.result.set_result(result)
            del self._running[thread]

    def _form_if_complete(self) -> None:
        if len(self._pending) < self.world_size:
            self._notify()
            return
        first = self._pending[0]
        reply = JoinReply(
            generation=self.generation,
            world_size=self.world_size,
            master_host=first.host,
            master_port=first.port,
            meeting=first.meeting,
        )
        now = self.clock()
        for rank, pending in self._pending.items():
            self._replies[pending.incarnation] = reply
            self._seen[rank] = now
        self._pending.clear()
        self.formed = True
        self._position = None
        self._versions = frozenset()
        self.record_generation(self.generation)
        self.log("trainers.formed", generation=self.generation, world_size=self.world_size)
        self._notify()

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _wait_change(self, timeout: float) -> None:
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await event.wait()
