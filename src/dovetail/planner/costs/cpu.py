"""Computes the seconds of an iteration on CPUs that all processes share, from measured costs.

Generation and inference are simulated as flows. Each server and scorer works at the speed that it has alone, divided by
the `slowdown` of all processes that are busy at that time. With n samples a decode step takes step + n token seconds.
Chunks are cut by the coordinator's rule. Training is computed in closed form."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.fusion.profile import chunk_target
from dovetail.planner.costs.steps import StepTimes, together
from dovetail.protocol.files.machine_profile import Machine

NEVER = float("inf")
_TINY = 1e-9
# The fraction of the time for filling a pipeline that a fused schedule does not hide.
FILLING = 0.5


@dataclass(frozen=True)
class IterationWork:
    """The work of one iteration. `prompts`, `responses`: tokens of each sample. `scores`: the models of each rollout's
    scorer. `models`: the trained models, each on `dp` data-parallel ranks with `pp` pipeline stages. `fusion`: the
    fractions of the samples left at which generation's tail may gather; the best one counts. With 0, scorers of idle
    rollouts work, but no sample migrates. With None, scoring waits until generation has ended. `values_first`: before
    the steps, a forward pass of the actor over all samples computes the values (a critic on the actor's body)."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    scores: tuple[tuple[str, ...], ...]
    models: tuple[str, ...]
    mini_batch: int
    micro_batch: int
    epochs: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "Serial"
    fusion: tuple[float | None, ...] = field(default=(None,))
    max_concurrent: int = 256
    values_first: bool = False

    @property
    def rollouts(self) -> int:
        return len(self.scores)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    @property
    def steps(self) -> int:
        """The optimizer steps of each model."""
        return self.epochs * (len(self.responses) // self.mini_batch)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one rank and model in an optimizer step."""
        return self.mini_batch // (self.dp * self.micro_batch)

    @property
    def passes(self) -> float:
        """The number of passes over all samples, forward and backward. A forward pass alone counts as a third."""
        return self.epochs + (1 / 3 if self.values_first else 0)

    @property
    def tokens(self) -> float:
        """The tokens of one rank in all passes of a model. Micro-batches are packed, and ranks get equal parts."""
        return self.passes * (sum(self.prompts) + sum(self.responses)) / self.dp

    @property
    def executed(self) -> float:
        """The micro-batches of one rank in all passes of a model."""
        return self.passes / self.epochs * self.steps * self.micro_batches


def slowdown(busy_cores: float, cores: int) -> float:
    """The factor by which everything takes longer if the processes want more cores than there are. It is at least 1."""
    return max(1.0, busy_cores / cores)


@dataclass
class _Server:
    """`steps`: the decode steps made so far. `ends`: a heap of (step after which it ends, sample). `prefill`: the
    seconds of prefills before the next step. `queue`: the samples that wait."""

    prefill: float
    queue: deque[int]
    ends: list[tuple[float, int]] = field(default_factory=list)
    steps: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.ends and not self.queue


class CpuStageTimes:
    """Simulates one stage of generation and inference. All values are seconds. `work`: the iteration. `generated`: when
    the last response ended. `end`: when all samples were scored. `working`: how long a rollout generated or scored, as
    the mean over the rollouts. `core_seconds`: how long the machine's cores were busy, summed over the cores.

    `fusion`: one of `IterationWork.fusion`."""

    def __init__(self, work: IterationWork, machine: Machine, fusion: float | None) -> None:
        self.work, self._machine, self._fusion = work, machine, fusion
        count = len(work.responses)
        self._left = count
        self._tail = int((fusion or 0.0) * count)
        self._gathered = work.rollouts < 2
        self._servers = [_Server(0.0, deque(range(i, count, work.rollouts))) for i in range(work.rollouts)]
        self._scoring = [NEVER] * work.rollouts  # the seconds that are left of each scorer's chunk
        self._waiting: dict[tuple[str, ...], list[int]] = {models: [] for models in set(work.scores) if models}
        self._now = machine.generation.begin
        self.generated = self._now
        self.working = self.core_seconds = 0.0
        for server in self._servers:
            self._fill(server)
        self._run()
        waited = machine.scoring.begin if self._fusion is None or self._now > self.generated else 0.0
        self.end = self._now + waited

    def _run(self) -> None:
        generation, scoring = self._machine.generation, self._machine.scoring
        while True:
            self._assign()
            servers = [s for s in self._servers if s.ends]
            scoring_now = [left for left in self._scoring if left < NEVER]
            if not servers and not scoring_now:
                return
            alone = [self._next(s) for s in servers] + scoring_now
            step = max(0.0, min(alone))
            busy = len(servers) * generation.cores + len(scoring_now) * scoring.cores
            taken = step * slowdown(busy, self._machine.cores)
            self._now += taken
            pairs = zip(self._servers, self._scoring, strict=True)
            self.working += taken * sum(bool(s.ends) or left < NEVER for s, left in pairs) / self.work.rollouts
            self.core_seconds += taken * min(busy, self._machine.cores)
            for server in servers:
                self._advance(server, step)
            self._scoring = [NEVER if left - step <= _TINY else left - step for left in self._scoring]

    def _fill(self, server: _Server) -> None:
        while server.queue and len(server.ends) < self.work.max_concurrent:
            sample = server.queue.popleft()
            heapq.heappush(server.ends, (server.steps + self.work.responses[sample], sample))
            server.prefill += self._machine.generation.sample

    def _next(self, server: _Server) -> float:
        """The seconds until a server's next event, if it had the machine for itself."""
        return server.prefill or (server.ends[0][0] - server.steps) * self._step(server)

    def _step(self, server: _Server) -> float:
        return self._machine.generation.step + len(server.ends) * self._machine.generation.token

    def _advance(self, server: _Server, seconds: float) -> None:
        if server.prefill:
            server.prefill = 0.0 if server.prefill - seconds <= _TINY else server.prefill - seconds
            return
        server.steps += seconds / max(self._step(server), _TINY)
        while server.ends and server.ends[0][0] <= server.steps + _TINY:
            self._finished(heapq.heappop(server.ends)[1])
        self._fill(server)

    def _finished(self, sample: int) -> None:
        tokens = self.work.prompts[sample] + self.work.responses[sample]
        for waiting in self._waiting.values():
            heapq.heappush(waiting, -tokens)
        self._left -= 1
        if not self._left:
            self.generated = self._now
        elif self._left <= self._tail and not self._gathered:
            self._gather()

    def _gather(self) -> None:
        """Move the remaining samples to the server that has most of them, if it has room for all. `plan_migration`
        does the same in that case."""
        if self._left > self.work.max_concurrent:
            return
        self._gathered = True
        most = max(self._servers, key=lambda s: len(s.ends) + len(s.queue))
        for server in self._servers:
            if server is not most:
                for end, sample in server.ends:
                    heapq.heappush(most.ends, (most.steps + end - server.steps, sample))
                    most.prefill += self._machine.generation.sample
                most.queue.extend(server.queue)
                server.ends, server.prefill = [], 0.0
                server.queue.clear()

    def _assign(self) -> None:
        """Give each free scorer that may work its next chunk."""
        for i, (models, server) in enumerate(zip(self.work.scores, self._servers, strict=True)):
            waiting = self._waiting.get(models)
            may = not self._left or (self._fusion is not None and server.idle)
            if self._scoring[i] == NEVER and waiting and may:
                rows = max(1, chunk_target(-sum(waiting), self.work.scores.count(models)) // -waiting[0])
                tokens = -sum(heapq.heappop(waiting) for _ in range(min(rows, len(waiting))))
                self._scoring[i] = chunk_seconds(self._machine, models, tokens)


def chunk_seconds(machine: Machine, models: Sequence[str], tokens: float) -> float:
    """The seconds that these models need to score a chunk of `tokens` tokens on an idle machine."""
    return machine.scoring.chunk + tokens * sum(machine.scoring.token[m] for m in models)


def best_stage(work: IterationWork, machine: Machine) -> CpuStageTimes:
    """Simulates the stage with each threshold of `work.fusion`, and returns the one that ends first."""
    return min((CpuStageTimes(work, machine, f) for f in work.fusion), key=lambda s: s.end)


def phases(stage: CpuStageTimes, machine: Machine) -> dict[str, float]:
    """The seconds of the phases of an iteration with this stage, one after the other, by the coordinator's names."""
    work = stage.work
    return {
        "generation": stage.generated,
        "inference": stage.end - stage.generated,
        "training": training_seconds(work, machine),
        "weights": machine.weights.fixed + machine.weights.each * work.rollouts,
        "other": machine.other.fixed + machine.other.each * len(work.responses),
    }


def training_seconds(work: IterationWork, machine: Machine) -> float:
    """The seconds of all optimizer steps. The last update is part of the phase `weights`."""
    costs = machine.training
    exchange = costs.exchange if work.dp > 1 else 0.0
    passes = _passes(work, machine) * slowdown(work.ranks * costs.cores, machine.cores)
    if work.dp > 1:
        passes *= 1 + costs.straggling
    return costs.begin + work.steps * (costs.step + exchange) + passes


def forward_seconds(work: IterationWork, machine: Machine) -> float:
    """The seconds of a forward pass of the actor over all samples. It recomputes the old log-probabilities."""
    cost = machine.training.models["actor"]
    alone = (work.executed * cost.fixed + work.tokens * cost.each) / work.passes / 3 / work.pp
    return alone * slowdown(work.ranks * machine.training.cores, machine.cores)


def _passes(work: IterationWork, machine: Machine) -> float:
    """The seconds of the passes of all optimizer steps on an idle machine. The models run one after the other (Serial),
    together on the same ranks (TimeSharing, Fused), or each on ranks of its own (Dedicated)."""
    steps = []
    for model in work.models:
        cost, count = machine.training.models[model], work.steps * work.micro_batches
        each = (work.executed * cost.fixed + work.tokens * cost.each) / (work.pp * count)
        steps.append(StepTimes(work.pp, work.micro_batches, each / 3, 2 * each / 3, 0.0, 0.0))
    messages = exposed_messages(work) * machine.training.message
    if len(steps) == 1:
        return work.steps * steps[0].alone + messages
    actor, critic = steps
    if work.schedule == "Dedicated":
        divided = (max(_on(work, actor, n), _on(work, critic, work.ranks - n)) for n in range(1, work.ranks))
        return work.steps * min(divided) + messages
    return work.steps * together(actor, critic, work.schedule, FILLING) + messages


def _on(work: IterationWork, step: StepTimes, ranks: int) -> float:
    """The seconds of a step if a model has only `ranks` of the ranks."""
    longer = work.ranks / ranks
    stages = max(1, min(work.pp, ranks // work.dp))
    return replace(step, stages=stages, forward=longer * step.forward, backward=longer * step.backward).alone


def exposed_messages(work: IterationWork) -> int:
    """The number of messages that nothing hides. In each step of each model they go through all stages and back."""
    return 2 * (work.pp - 1) * work.steps * len(work.models)
