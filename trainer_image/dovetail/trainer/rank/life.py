"""The life of a trainer rank. It joins, forms groups, executes commands, and joins again when a peer is lost."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from dovetail.gpus.gpu_failure import GPUFailed, context_is_lost
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.models.transfer import listening_at
from dovetail.protocol.messages import Command, CommandResult, JoinReply, JoinRequest, NextRequest, Stop
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.inheritance import LOOPBACK_HOSTS
from dovetail.protocol.process.pulse import PROGRESS, PULSE
from dovetail.trainer.command_errors import Superseded
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups, PeerLost
from dovetail.trainer.rank.coordinator_client import (
    CoordinatorClient,
    CoordinatorUnreachable,
    RankProcess,
    StaleGeneration,
)
from dovetail.trainer.rank.heartbeat import HeartbeatThread
from dovetail.trainer.rank.metrics import TrainerMetrics
from dovetail.trainer.rank.sending import Exchange, SendingThread
from dovetail.trainer.weights.kept_weights import KeptWeights

COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
# A rank may stay in a generation for this many seconds after its end (see HeartbeatThread). The grace is short while
# groups form, because a rank then holds nothing that a new process would have to load again.
SERVING_GRACE_SECONDS = 20.0
FORMING_GRACE_SECONDS = 4.0
REJOIN_PAUSE_SECONDS = 0.5
# While the coordinator is away, rank 0 tells this to the other ranks at this interval, plus the time of the poll.
SILENCE_SECONDS = 10.0
# This must exceed a long poll, because between commands the other ranks wait in a broadcast. It is a last resort: a
# dead peer breaks its connections at once, and the coordinator notices a frozen one after peerTimeoutSeconds.
LEAST_TIMEOUT_SECONDS = 90.0


@dataclass
class Rank:
    """One trainer rank of a job. `nccl_version` is None without GPUs."""

    env: ProcessEnv
    spec: RLHFJobSpec
    layouts: dict[str, Parallelism]
    client: CoordinatorClient
    heartbeat: HeartbeatThread
    metrics: TrainerMetrics
    log: Callable[..., None]
    incarnation: str
    nccl_version: str | None = None
    sleep: Callable[[float], None] = time.sleep
    _failed: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Run until `stop`. Raises CoordinatorUnreachable, Refused or GPUFailed."""
        while True:
            # The ranks of one machine meet in a file of this user's, because everybody on the machine can connect to a
            # port. A socket listens until the groups are formed. If a free port were only looked up, another process
            # could take it.
            folder, door = None, None
            if self.env.host not in LOOPBACK_HOSTS:
                door = listening_at(self.env.host)
            elif self.env.rank == 0:
                # The launcher removes the folder of the pulses, even if this process is killed.
                pulse = os.environ.get(PULSE)
                folder = tempfile.mkdtemp(prefix="dovetail-meeting-", dir=Path(pulse).parent if pulse else None)
            try:
                reply = self._join(door, f"{folder}/store" if folder else "")
                generation = reply.generation
                assert generation is not None
                self.log("rank.joined", generation=generation, world_size=reply.world_size)
                if self._live(reply, generation, door):
                    return
            except (PeerLost, StaleGeneration, Superseded) as reason:
                self.log("generation.left", generation=generation, reason=str(reason))
                # NCCL's error may also mean that the GPU failed. The groups are closed, so nothing waits for a peer.
                if context_is_lost():
                    raise GPUFailed(f"the GPU failed: {reason}") from reason
            finally:
                if door is not None:
                    door.close()
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                self.heartbeat.leave()
                self.metrics.generation.set(0)
            self.metrics.rejoins.inc()
            # The peers need a moment to notice that this rank left. Without a pause two ranks can chase each other.
            self.sleep(REJOIN_PAUSE_SECONDS)

    def _join(self, door: socket.socket | None, meeting: str) -> JoinReply:
        while True:
            request = JoinRequest(
                name=self.env.name,
                rank=self.env.rank,
                world_size=self.env.world_size,
                incarnation=self.incarnation,
                host=self.env.host,
                port=0 if door is None else int(door.getsockname()[1]),
                meeting=meeting,
                nccl_version=self.nccl_version,
            )
            with PROGRESS.bounded():
                reply = self.client.join(request)
            if reply.generation is not None:
                return reply

    def _live(self, reply: JoinReply, generation: int, door: socket.socket | None) -> bool:
        """Serve in one generation. Returns True after `stop`. Raises PeerLost, StaleGeneration, Superseded."""
        self.heartbeat.enter(generation, FORMING_GRACE_SECONDS)
        groups = Groups.form(
            reply.master_host,
            reply.master_port,
            self.env.rank,
            self.env.world_size,
            self.layouts,
            max(LEAST_TIMEOUT_SECONDS, float(self.spec.failure_policy.peer_timeout_seconds)),
            listening=door,
            meeting=reply.meeting,
            token=self.env.token,
        )
        # A CPU's wait ends by itself, when the connection breaks or at its deadline.
        self.heartbeat.enter(generation, SERVING_GRACE_SECONDS, groups if groups.device.type == "cuda" else None)
        self.metrics.generation.set(generation)
        self.log("groups.formed", generation=generation)
        if groups.staged:
            self.log("groups.staged", reason="trainer ranks share a GPU, so their messages go through host memory")
        kept = KeptWeights()
        process = RankProcess(self.env.name, self.client, self.log, self.env.host)
        runner = CommandRunner(process, self.spec, groups, self._failed, self.heartbeat.cancelled, kept)
        sending: SendingThread | None = None
        try:
            with groups.naming_the_lost():
                if self.spec.ppo.lag and Stage.PPO in self.spec.stages:
                    sending = self._send_beside(process, kept, groups, reply.master_host, generation)
                return self._serve(generation, groups, runner)
        finally:
            if sending is not None:
                sending.stop()
            # Closing frees the peers that wait for this rank. Models go before the next generation loads its own.
            groups.close()
            runner.close()
            del runner
            gc.collect()

    def _send_beside(
        self, process: RankProcess, kept: KeptWeights, groups: Groups, host: str, generation: int
    ) -> SendingThread:
        """Start the thread that sends kept versions while this one trains. Raises PeerLost."""

        def over() -> bool:
            return not self.heartbeat.within(generation)

        exchange = Exchange.form(groups, host, groups.timeout, over)
        thread = SendingThread(process, kept, exchange, generation, self.heartbeat.cancelled, over)
        thread.start()
        return thread

    def _serve(self, generation: int, groups: Groups, runner: CommandRunner) -> bool:
        asking = _Asking(self.client, generation, runner)
        while True:
            waited = time.monotonic()
            command = asking.next() if self.env.rank == 0 else None
            # An empty command is sent on too. It shows within every collective's deadline that rank 0 is alive.
            document = groups.broadcast_json(None if command is None else command.model_dump(mode="json"))
            PROGRESS.made()
            self.metrics.idle_seconds.inc(time.monotonic() - waited)
            if self.heartbeat.superseded:
                raise Superseded("the coordinator has moved on to a newer generation")
            if document is None:
                continue
            received = COMMAND.validate_python(document)
            if isinstance(received, Stop):
                self.log("rank.stopped", id=received.id)
                if self.env.rank == 0:
                    asking.farewell(received)
                return True
            asking.done(self._execute(received, runner))

    def _execute(self, command: Command, runner: CommandRunner) -> CommandResult:
        started = time.monotonic()
        self.log("command.started", id=command.id, kind=command.kind)
        result = runner.execute(command)
        seconds = time.monotonic() - started
        stage = runner.stage.value if runner.stage is not None else None
        self.metrics.observe(command.kind, result, seconds, stage, runner.step)
        self.log(
            "command.finished",
            id=command.id,
            ok=result.ok,
            error=result.error,
            seconds=round(seconds, 3),
            metrics={name: round(value, 6) for name, value in result.metrics.items()},
        )
        return result


class _Asking:
    """Rank 0's requests to /v1/trainer/next. A result is sent until an answer shows that it arrived."""

    def __init__(
        self,
        client: CoordinatorClient,
        generation: int,
        runner: CommandRunner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._generation, self._runner, self._clock = client, generation, runner, clock
        self._last: CommandResult | None = None
        self._handed_in = True
        self._heard = clock()

    def done(self, result: CommandResult) -> None:
        """Record that the command was executed. Its result is sent with the next request."""
        self._last, self._handed_in = result, False

    def next(self) -> Command | None:
        """The next command, or None if the poll ended without one, or if the coordinator did not answer for a short
        time.

        Raises StaleGeneration, Refused, and CoordinatorUnreachable after the client's whole patience."""
        result = None if self._handed_in else self._last
        request = NextRequest(
            generation=self._generation,
            result=result,
            stage=self._runner.stage,
            step=self._runner.step,
            versions=self._runner.kept.versions,
        )
        try:
            command = self._client.next(request, min(self._client.patience, SILENCE_SECONDS)).command
        except CoordinatorUnreachable:
            if self._clock() - self._heard > self._client.patience:
                raise
            return None
        self._heard, self._handed_in = self._clock(), True
        if command is not None and self._last is not None and command.id == self._last.id:
            # The command is done already. The coordinator was restarted before it stored the result.
            self._handed_in = False
            return None
        return command

    def farewell(self, stop: Stop) -> None:
        """Tell the coordinator, if it still runs, that the ranks stop."""
        result = CommandResult(id=stop.id, ok=True, error=None)
        self._client.last_word(
            NextRequest(generation=self._generation, result=result, stage=self._runner.stage, step=self._runner.step)
        )
