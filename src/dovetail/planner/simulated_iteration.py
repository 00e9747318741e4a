"""Simulates an iteration of a candidate event by event: generation and inference with the simulator of inter-stage
fusion, and then every pass of every trainer rank, with the samples' own lengths."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dovetail.fusion.decode import Decode
from dovetail.fusion.lengths import Ints, Lengths
from dovetail.fusion.migration import plan_migration
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.pipelines import (
    ModelPipelines,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    evaluate,
    family_instance,
    family_of,
    find,
    fixed_orders,
    simulate_1f1b,
)
from dovetail.planner.candidate import INFERENCE, Candidate, Share
from dovetail.planner.lags import DrawnIterations, Parts
from dovetail.planner.seconds import Floats, GPUCosts, Servers, StepTimes, pass_seconds, shared_prompt

FAMILY = {"Serial": "serial", "TimeSharing": "stitched", "Fused": "fused", "VShaped": "fused-v"}
UNSPLIT = FAMILY | {"VShaped": "fused-v-whole"}
# One round of the search. Its answer is within a few percent of the bound.
EFFORT = SearchEffort(seconds=0.0, workers=1, memory=False, exact=False)


class Bar(NamedTuple):
    """A span of work of one GPU of a pool. Times are seconds since the iteration began."""

    pool: str
    gpu: int
    lane: str
    name: str
    start: float
    end: float


def play_training(candidate: Candidate, costs: GPUCosts, tokens: Ints, begun: float = 0.0) -> tuple[float, list[Bar]]:
    """Simulates training, which begins at second `begun`. Returns its seconds, and what the GPUs do.

    `tokens`, (batch,): the tokens of each sample's prompt and response. Mini-batches take the samples in order."""
    work = costs.work
    plain = replace(work, response=_flat(work.response), prompt=_flat(work.prompt))
    actor, critic = GPUCosts(plain, costs.inventory).steps(candidate)
    if actor is None:
        return 0.0, []
    mini = min(work.mini_batch, work.batch)
    mean = float(plain.prompt.mean + plain.response.mean)
    now, bars = begun, []
    shared = critic is not None and _shared(candidate, actor, critic)
    for _ in range(work.epochs):
        for k in range(max(1, work.batch // work.mini_batch)):
            relative = tokens[k * mini : (k + 1) * mini] / mean
            if critic is not None and shared:
                taken, new = _both(candidate, actor, critic, relative, now)
            else:
                taken, new = _separate(candidate, actor, critic, relative, now)
            now += taken
            bars += new
    return now - begun, bars


def _flat(lengths: Lengths) -> Lengths:
    return Lengths.fixed(max(1, round(lengths.mean)))


def deal(relative: Floats, share: Share, step: StepTimes) -> list[Floats]:
    """Deals samples to data-parallel ranks. Returns for each rank the lengths of its micro-batches, where 1 is the
    length of a mean micro-batch. `relative`: the samples' lengths over the mean length."""
    ranks: list[list[float]] = [[] for _ in range(share.dp)]
    room = -(-len(relative) // share.dp)
    sums = [0.0] * share.dp
    for length in np.sort(relative)[::-1]:
        r = min((r for r in range(share.dp) if len(ranks[r]) < room), key=lambda r: (sums[r], r))
        ranks[r].append(float(length))
        sums[r] += float(length)
    count = max(1, math.ceil(max(map(len, ranks)) / step.samples - 1e-9))
    return [np.array([sum(rank[m::count]) / step.samples for m in range(count)]) for rank in ranks]


def _shared(candidate: Candidate, actor: StepTimes, critic: StepTimes) -> bool:
    """Whether one schedule can hold both models. They need the same GPUs and tp, and one pp must divide the other."""
    a, k = candidate.actor_training[0], candidate.critic_training[0]
    if not a.same_ranks(k) or max(a.pp, k.pp) == 1:
        return False
    positions = math.lcm(a.pp, k.pp)
    if positions not in (a.pp, k.pp) or a.dp % (positions // a.pp) or k.dp % (positions // k.pp):
        return False
    return actor.micro_batches * positions // a.pp == critic.micro_batches * positions // k.pp


def _both(
    candidate: Candidate, actor: StepTimes, critic: StepTimes, relative: Floats, now: float
) -> tuple[float, list[Bar]]:
    shares = candidate.actor_training[0], candidate.critic_training[0]
    positions = max(share.pp for share in shares)
    copies = shares[0].dp // (positions // shares[0].pp)
    dealt = [deal(relative, share, step) for share, step in zip(shares, (actor, critic), strict=True)]
    family = (UNSPLIT if candidate.unsplit else FAMILY)[candidate.schedule]
    longest, bars = 0.0, []
    for copy in range(copies):
        lengths = []
        for share, ranks in zip(shares, dealt, strict=True):
            pipelines = positions // share.pp
            lengths.append(np.array([ranks[k * copies + copy] for k in range(pipelines)]))
        schedule = _schedule(actor, critic, lengths[0], lengths[1], family)
        longest = max(longest, schedule.makespan)
        share = shares[0]
        for p in schedule.passes():
            name = f"{p.model} {p.kind}{p.micro_batch}"
            bars += _bars(share, p.rank * copies + copy, name, now + p.start, now + p.end)
    fixed = actor.fixed + critic.fixed
    bars += _steps(shares[0], "optimizer", now + longest, now + longest + fixed)
    return longest + fixed, bars


def _problem(actor: StepTimes, critic: StepTimes, lengths: Sequence[Floats]) -> ScheduleProblem:
    models = []
    for name, step, relative in zip(("actor", "critic"), (actor, critic), lengths, strict=True):
        each = np.maximum(relative, 1e-3)[:, None, :]
        pipelines, count = relative.shape
        shape = (pipelines, step.stages, count)
        models.append(
            ModelPipelines(
                name,
                step.stages,
                count,
                np.broadcast_to(step.forward * each, shape),
                np.broadcast_to(step.backward * each, shape),
                pipelines=pipelines,
            )
        )
    return ScheduleProblem((models[0], models[1]), max(actor.hop, critic.hop))


def _schedule(actor: StepTimes, critic: StepTimes, a: Floats, k: Floats, name: str) -> Schedule:
    problem, family = _problem(actor, critic, (a, k)), family_of(name)
    instance = family_instance(problem, family)
    if family.fixed:
        return evaluate(instance, fixed_orders(instance, family), family.name)
    orders = _orders(actor, critic, (a.shape[0], a.shape[1]), (k.shape[0], k.shape[1]), family.name)
    return evaluate(instance, orders, family.name)


@lru_cache(maxsize=64)
def _orders(actor: StepTimes, critic: StepTimes, a: tuple[int, int], k: tuple[int, int], family: str) -> Ints:
    """The order of passes that the search finds for micro-batches of equal length."""
    problem = _problem(actor, critic, (np.ones(a), np.ones(k)))
    found = find(problem, family_of(family), EFFORT)
    return found.orders


def _separate(
    candidate: Candidate, actor: StepTimes, critic: StepTimes | None, relative: Floats, now: float
) -> tuple[float, list[Bar]]:
    """Simulates each model by 1F1B. If the models share GPUs, they run one after the other."""
    mine, bars = candidate.actor_training[0], []
    first, new = _alone("actor", mine, actor, relative, now)
    bars += new
    if critic is None:
        return first, bars
    other = candidate.critic_training[0]
    start = now + first if mine.overlaps(other) else now
    second, new = _alone("critic", other, critic, relative, start)
    return max(first, start - now + second), bars + new


def _alone(model: str, share: Share, step: StepTimes, relative: Floats, now: float) -> tuple[float, list[Bar]]:
    longest, bars = 0.0, []
    for rank, lengths in enumerate(deal(relative, share, step)):
        times = np.multiply.outer([step.forward, step.backward], np.tile(lengths, (step.stages, 1)))
        ends = simulate_1f1b(times[0], times[1], step.hop)
        longest = max(longest, float(ends.max()))
        for (kind, stage, m), ended in np.ndenumerate(ends):
            end = now + float(ended)
            start, name = end - float(times[kind, stage, m]), f"{model} {'FB'[kind]}{m}"
            bars += _bars(share, stage * share.dp + rank, name, start, end)
    bars += _steps(share, f"{model} step", now + longest, now + longest + step.fixed)
    return longest + step.fixed, bars


def _steps(share: Share, name: str, start: float, end: float) -> list[Bar]:
    return [Bar(share.pool, gpu, "trainer", name, start, end) for gpu in share.range]


def _bars(share: Share, group: int, name: str, start: float, end: float) -> list[Bar]:
    """The same span on each GPU of one tensor-parallel group. `group`: its number in the share."""
    first = share.first + group * share.tp
    return [Bar(share.pool, gpu, "trainer", name, start, end) for gpu in range(first, first + share.tp)]


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


# The number of iterations that are drawn.
DRAWS = 4


def _played(candidate: Candidate, costs: GPUCosts, seed: int) -> Iterator[tuple[Ints, Ints, Rolled]]:
    """Prompt and response lengths of iterations, (batch,) each, and their generation and scoring, event by event."""
    work, rng = costs.work, np.random.default_rng(seed)
    for _ in range(DRAWS):
        prompts = work.prompt.draw(work.batch, rng)
        responses = work.response.draw(work.batch, rng)
        yield prompts, responses, play_rollout(candidate, costs, prompts, responses)


def drawn_on_gpus(candidate: Candidate, costs: GPUCosts, seed: int) -> DrawnIterations:
    """Iterations whose generation and scoring are scaled so that their means are those of the estimate. The time of
    training is in proportion to its tokens. With a lag the trainers recompute the old log-probabilities."""
    inference = costs.estimate(candidate).phases["inference"]
    candidate = replace(candidate, folded=True)
    mean = costs.estimate(candidate).phases
    played = list(_played(candidate, costs, seed))
    tokens = _relative([float(prompts.sum() + responses.sum()) for prompts, responses, _ in played])
    generated = _relative([rolled.generated for _, _, rolled in played])
    scored = _relative([rolled.scored - rolled.generated for _, _, rolled in played])
    own = max(costs.inference("actor_training", share) for share in candidate.actor_training)
    hidden = 0.0
    if candidate.migration is not None:
        hidden = costs.estimate(replace(candidate, migration=None)).phases["inference"] - mean["inference"]
    synchronous, lagged = [], []
    for at, (_, _, rolled) in enumerate(played):
        made = {
            "transfer": mean["transfer"],
            "swap": mean["swap"],
            "generation": mean["generation"] * generated[at],
            "inference": mean["inference"] * scored[at],
        }
        training = mean["training"] * tokens[at]
        rest = (made["generation"] + made["inference"]) * (1 - rolled.busy(candidate.generation))
        alone = {**made, "inference": inference * scored[at]}
        synchronous.append(Parts(alone, {"training": training}, rest + alone["inference"] - made["inference"]))
        tail = made["generation"] * (1 - rolled.half / rolled.generated) if rolled.generated else 0.0
        # Scoring on free servers in the tail takes their time too.
        kept = min(1.0, rolled.kept + max(0.0, hidden) / tail) if tail else 0.0
        lagged.append(Parts(made, {"training": training + own}, rest, tail=tail, kept=kept))
    return DrawnIterations(synchronous, lagged)


def _relative(values: Sequence[float]) -> list[float]:
    """The values as multiples of their mean."""
    mean = sum(values) / len(values)
    return [value / mean if mean else 1.0 for value in values]
