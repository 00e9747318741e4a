"""Simulates an iteration of a candidate event by event: generation and inference with the simulator of inter-stage
fusion, and then training."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.fusion.decode import Decode
from dovetail.fusion.lengths import Ints
from dovetail.fusion.migration import plan_migration
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.planner.candidate import INFERENCE, Candidate, Share
from dovetail.planner.costs.generation import Servers
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.costs.passes import pass_seconds, shared_prompt
from dovetail.planner.simulate.training import Bar, play_training


@dataclass(frozen=True)
class Rolled:
    """`generated`, `scored`: when all samples are generated, and when all are scored. `migrated`: the number of samples
    that moved when the tail gathered. `bars`: what each GPU does. `half`: when half of the servers are no longer
    needed, if the others take what is left. `kept`: the mean fraction of the samples that is left after that. Times are
    seconds since the stage began."""

    generated: float
    scored: float
    migrated: int
    bars: list[Bar]
    half: float
    kept: float

    def busy(self, shares: Sequence[Share]) -> float:
        """The fraction of the stage in which the GPUs of these shares generate or score, as the mean over the GPUs."""
        gpus = {(share.pool, gpu) for share in shares for gpu in share.range}
        worked = sum(bar.end - bar.start for bar in self.bars if (bar.pool, bar.gpu) in gpus)
        return min(1.0, worked / len(gpus) / self.scored) if self.scored else 1.0


def play_rollout(candidate: Candidate, costs: GPUCosts, prompts: Ints, lengths: Ints) -> Rolled:
    """Simulates generation and inference of one iteration. `prompts`, `lengths`, (batch,): the tokens of each sample's
    prompt and response."""
    _, rooms = costs.memory.of(candidate)
    longest = costs.work.longest
    groups = [(share, costs.servers(share, max(rooms[share], longest))) for share in candidate.generation]
    places = [(share, i) for share, _ in groups for i in range(share.dp)]
    ends, idle, begun, migrated = _decode(groups, longest, candidate.migration, prompts, lengths)
    generated = max(ends)
    bars = [
        Bar(share.pool, gpu, "vLLM", "generation", 0.0, end)
        for (share, i), end in zip(places, idle, strict=True)
        for gpu in _gpus(share, i)
    ]
    free: dict[tuple[str, int], float] = {}
    fused = candidate.migration is not None
    for bar in bars:
        free[bar.pool, bar.gpu] = max(bar.end, begun or 0.0) if fused and begun is not None else generated
    totals = [int(p) + int(n) for p, n in zip(prompts, lengths, strict=True)]
    ready, new = _score(candidate, costs, ends, totals, prompts.tolist(), free, 0.0 if fused else generated)
    scored = max(ready)
    # Without fusion no sample moves, so the servers count, not the samples.
    half = sorted(ends)[len(ends) // 2] if candidate.migration else sorted(idle)[len(idle) // 2]
    left = sum(max(0.0, end - half) for end in ends) / len(ends)
    kept = left / (generated - half) if generated > half else 0.0
    return Rolled(generated, max(scored, generated), migrated, bars + new, half, kept)


def _decode(
    groups: Sequence[tuple[Share, Servers]], longest: int, migration: float | None, prompts: Ints, lengths: Ints
) -> tuple[list[float], list[float], float | None, int]:
    profiles = [_profile(each) for _, each in groups for _ in range(each.count)]
    decode = Decode(lengths.tolist(), prompts.tolist(), profiles)
    begun, migrated = None, 0
    if migration is not None:
        decode.run(int(migration * len(lengths)))
        left = decode.unfinished()
        plan = plan_migration(left, dict(enumerate(profiles)), longest) if left else None
        begun = decode.now
        if plan is not None:
            decode.migrate(plan.moves)
            migrated = len(plan.moves)
    decode.run(0)
    return decode.end, decode.idle_at, begun, migrated


def _profile(each: Servers) -> StageProfile:
    steps = each.steps
    return StageProfile(
        decode=tuple((n, float(steps[n])) for n in range(1, len(steps))),
        prefill_seconds_per_token=each.prefill,
        inference_seconds_per_token=0.0,
        max_samples=len(steps) - 1,
        kv_tokens=each.room,
        kv_transfer_seconds_per_token=each.arrival,
    )


@dataclass
class _Copy:
    """One data-parallel copy of a task's model and its GPUs."""

    task: str
    share: Share
    gpus: list[tuple[str, int]]
    model: tuple[ModelShape, Head]


def _score(
    candidate: Candidate,
    costs: GPUCosts,
    ends: Sequence[float],
    totals: Sequence[int],
    prompts: Sequence[int],
    free: dict[tuple[str, int], float],
    earliest: float,
) -> tuple[list[float], list[Bar]]:
    """Simulates scoring. Each copy of a model whose GPUs are free takes the next micro-batch of its task, in the order
    in which the samples were finished. Returns when each sample was scored, and what the GPUs do."""
    work, order = costs.work, sorted(range(len(ends)), key=ends.__getitem__)
    copies = [
        _Copy(task, share, _places(candidate, share, d), work.needed(task))
        for task in INFERENCE
        for share in candidate.shares(task)
        for d in range(share.dp)
    ]
    if not candidate.folded:
        copies += [
            _Copy("actor", share, [(share.pool, gpu) for gpu in _gpus(share, d)], (work.actor, "lm"))
            for share in candidate.actor_training
            for d in range(share.dp)
        ]
    waiting = {task: deque(order) for task in {copy.task for copy in copies}}
    ready = [0.0] * len(ends)
    bars: list[Bar] = []
    generated = max(ends)

    def start(copy: _Copy) -> float:
        queue = waiting[copy.task]
        if not queue:
            return float("inf")
        rows = queue[min(len(queue), copy.share.micro_batch) - 1]
        # Trainers run the actor's own pass. They begin when all samples are generated.
        begin = generated if copy.task == "actor" else earliest
        return max(begin, ends[rows], *(free.get(gpu, 0.0) for gpu in copy.gpus))

    heap = [(start(copy), i) for i, copy in enumerate(copies)]
    heapq.heapify(heap)
    while heap:
        when, i = heapq.heappop(heap)
        copy = copies[i]
        now = start(copy)
        if now == float("inf"):
            continue
        if now > when:
            heapq.heappush(heap, (now, i))
            continue
        queue = waiting[copy.task]
        rows = [queue.popleft() for _ in range(min(len(queue), copy.share.micro_batch))]
        # A trainer computes a prompt for each of its samples.
        saved = 0.0 if copy.task == "actor" else 1 - shared_prompt(work, copy.share.pp)
        tokens = sum(totals[r] - saved * prompts[r] for r in rows) / copy.share.micro_batch
        context = sum(totals[r] for r in rows) / copy.share.micro_batch / 2
        pool = costs.inventory[copy.share.pool]
        stage, gather, hop = pass_seconds(*copy.model, copy.share, pool, tokens, context)
        busy = max(stage, gather)
        done = now + busy + (copy.share.pp - 1) * (busy + hop)
        for gpu in copy.gpus:
            free[gpu] = now + busy
            bars.append(Bar(*gpu, "scorer", copy.task, now, now + busy))
        for row in rows:
            ready[row] = max(ready[row], done)
        heapq.heappush(heap, (now + busy, i))
    return ready, bars


def _places(candidate: Candidate, share: Share, copy: int) -> list[tuple[str, int]]:
    """The GPUs of one copy of an inference share, as (pool, index)."""
    server = next((s for s in candidate.generation if candidate.beside and s.overlaps(share)), None)
    if server is None:
        return [(share.pool, gpu) for gpu in _gpus(share, copy)]
    number = (share.first - server.first) // (server.pp * server.tp) + copy
    return [(share.pool, gpu) for gpu in _gpus(server, number)[: share.pp * share.tp]]


def _gpus(share: Share, copy: int) -> list[int]:
    """The GPUs of data-parallel copy `copy`. The rank of stage p, copy d and tensor-parallel rank t is
    (p * dp + d) * tp + t."""
    return [
        share.first + (stage * share.dp + copy) * share.tp + t for stage in range(share.pp) for t in range(share.tp)
    ]


@dataclass(frozen=True)
class Simulated:
    """A simulated iteration. `phases`: seconds by name, as in `Estimate.phases`. `bars`: what each GPU does.
    `migrated`: the number of samples that moved when the tail gathered."""

    phases: Mapping[str, float]
    bars: tuple[Bar, ...]
    migrated: int

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def simulate(candidate: Candidate, costs: GPUCosts, prompts: Ints, lengths: Ints) -> Simulated:
    """Simulates one iteration. `prompts`, `lengths`, (batch,): the tokens of each sample's prompt and response.

    Raises KeyError for a pool that the inventory lacks."""
    swapped, moved = costs.swapped_in(candidate), costs.transfer(candidate)
    rolled = play_rollout(candidate, costs, prompts, lengths)
    begun = swapped + rolled.scored
    training, trained = play_training(candidate, costs, prompts + lengths, begun)
    phases = {
        "generation": rolled.generated,
        "inference": rolled.scored - rolled.generated,
        "training": training,
        "transfer": moved,
        "swap": swapped,
    }
    end = begun + training
    bars = [b._replace(start=b.start + swapped, end=b.end + swapped) for b in rolled.bars]
    bars += trained
    if moved:
        holders = (*candidate.actor_training, *candidate.generation)
        gpus = sorted({(share.pool, gpu) for share in holders for gpu in share.range})
        bars += [Bar(pool, gpu, "weights", "weights", end, end + moved) for pool, gpu in gpus]
    for share in candidate.generation:
        bars += [Bar(share.pool, gpu, "swap", "swap in", 0.0, swapped) for gpu in share.range if swapped]
    return Simulated(phases, tuple(bars), rolled.migrated)
