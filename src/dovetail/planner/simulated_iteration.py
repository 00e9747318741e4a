"""Simulates an iteration of a candidate event by event: generation and inference with the simulator of inter-stage
fusion, and then every pass of every trainer rank, with the samples' own lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dovetail.fusion.decode import Decode
from dovetail.fusion.lengths import Ints, Lengths
from dovetail.fusion.scorer_queues import SimulatedScorer, Together, score
from dovetail.fusion.stage import gather
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
)
from dovetail.planner.candidate import INFERENCE, Candidate, Share, Task
from dovetail.planner.lags import DrawnIterations, Parts
from dovetail.planner.seconds import Floats, GPUCosts, StepTimes, pass_seconds, shared_prompt

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

    `tokens`, (batch,): the tokens of each sample's prompt and response. Mini-batches take the samples in order. Models
    that share no schedule train by 1F1B, one after the other if they share GPUs."""
    work = costs.work
    plain = replace(work, response=_flat(work.response), prompt=_flat(work.prompt))
    steps = GPUCosts(plain, costs.inventory).steps(candidate)
    shares = (candidate.actor_training[:1], candidate.critic_training[:1])
    models = [
        _Trained(name, share[0], step)
        for name, share, step in zip(("actor", "critic"), shares, steps, strict=True)
        if step is not None
    ]
    groups, family = [[model] for model in models], FAMILY["Serial"]
    if len(models) == 2 and _shared(*models):
        groups, family = [models], (UNSPLIT if candidate.unsplit else FAMILY)[candidate.schedule]
    mini = min(work.mini_batch, work.batch)
    mean = float(plain.prompt.mean + plain.response.mean)
    now, bars = begun, list[Bar]()
    for _ in range(work.epochs):
        for k in range(max(1, work.batch // work.mini_batch)):
            end = now
            for group in groups:
                begin = end if group[0].share.overlaps(models[0].share) else now
                ended, new = _step(group, family, tokens[k * mini : (k + 1) * mini] / mean, begin)
                end, bars = max(end, ended), bars + new
            now = end
    return now - begun, bars


class _Trained(NamedTuple):
    """A model that trains, and the times of its optimizer step."""

    name: str
    share: Share
    step: StepTimes


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


def _shared(actor: _Trained, critic: _Trained) -> bool:
    """Whether one schedule can hold both models. They need the same GPUs and tp, and one pp must divide the other."""
    a, k = actor.share, critic.share
    positions = math.lcm(a.pp, k.pp)
    if not a.same_ranks(k) or positions == 1:
        return False
    if positions not in (a.pp, k.pp) or a.dp % (positions // a.pp) or k.dp % (positions // k.pp):
        return False
    return actor.step.micro_batches * positions // a.pp == critic.step.micro_batches * positions // k.pp


def _step(models: Sequence[_Trained], family: str, relative: Floats, now: float) -> tuple[float, list[Bar]]:
    """Simulates an optimizer step of models that share a schedule. It begins at second `now`. Returns when it ends."""
    share, positions = models[0].share, max(model.share.pp for model in models)
    copies = share.dp // (positions // share.pp)
    dealt = [deal(relative, model.share, model.step) for model in models]
    names = tuple(model.name for model in models)
    end, bars = now, list[Bar]()
    for copy in range(copies):
        lengths = [np.array(ranks[copy::copies]) for ranks in dealt]
        schedule = _schedule(names, tuple(model.step for model in models), lengths, family)
        end = max(end, now + schedule.makespan)
        for p in schedule.passes():
            name, group = f"{p.model} {p.kind}{p.micro_batch}", p.rank * copies + copy
            bars += _bars(share, range(group * share.tp, (group + 1) * share.tp), name, now + p.start, now + p.end)
    stepped = end + sum(model.step.fixed for model in models)
    stepping = "optimizer" if len(names) > 1 else f"{names[0]} step"
    return stepped, bars + _bars(share, range(share.gpus), stepping, end, stepped)


def _problem(names: Sequence[str], steps: Sequence[StepTimes], lengths: Sequence[Floats]) -> ScheduleProblem:
    models = []
    for name, step, relative in zip(names, steps, lengths, strict=True):
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
    return ScheduleProblem(tuple(models), max(step.hop for step in steps))


def _schedule(names: tuple[str, ...], steps: tuple[StepTimes, ...], lengths: Sequence[Floats], name: str) -> Schedule:
    family = family_of(name)
    instance = family_instance(_problem(names, steps, lengths), family)
    if family.fixed:
        return evaluate(instance, fixed_orders(instance, family), family.name)
    return evaluate(instance, _orders(names, steps, tuple(each.shape for each in lengths), family.name), family.name)


@lru_cache(maxsize=64)
def _orders(
    names: tuple[str, ...], steps: tuple[StepTimes, ...], shapes: tuple[tuple[int, ...], ...], family: str
) -> Ints:
    """The order of passes that the search finds for micro-batches of equal length."""
    return find(_problem(names, steps, [np.ones(shape) for shape in shapes]), family_of(family), EFFORT).orders


def _bars(share: Share, gpus: range, name: str, start: float, end: float) -> list[Bar]:
    """The same span on some GPUs of a share, which are counted from its first."""
    return [Bar(share.pool, share.first + gpu, "trainer", name, start, end) for gpu in gpus]


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
    longest, migration = costs.work.longest, candidate.migration
    fused = migration is not None
    servers = [
        (share, d, costs.servers("generation", share, max(rooms[share], longest)).profile)
        for share in candidate.generation
        for d in range(share.dp)
    ]
    decode = Decode(lengths.tolist(), prompts.tolist(), [profile for *_, profile in servers])
    moved = gather(decode, None if migration is None else int(migration * len(lengths)), longest)
    ends, idle, generated = decode.end, decode.idle_at, max(decode.end)
    bars, free = list[Bar](), dict[tuple[str, int], float]()
    for (share, d, _), end in zip(servers, idle, strict=True):
        for gpu in _gpus(share, d):
            bars.append(Bar(share.pool, gpu, "vLLM", "generation", 0.0, end))
            free[share.pool, gpu] = end if fused else generated
    scorers, names = list[SimulatedScorer[tuple[str, int]]](), list[str]()
    for task, share in _scoring(candidate):
        for d in range(share.dp):
            trains = task == "actor_training"  # the actor's own pass waits for all samples
            gpus = [(share.pool, gpu) for gpu in _gpus(share, d)] if trains else _places(candidate, share, d)
            seconds, begin = _pass_of(costs, task, share, prompts), generated if trains or not fused else 0.0
            scorers.append(SimulatedScorer(task, gpus, seconds, begin, rows=share.micro_batch))
            names.append("actor" if trains else task)
            free |= {gpu: free.get(gpu, 0.0) for gpu in gpus}
    coming = sorted((end, int(prompts[i] + lengths[i]), i) for i, end in enumerate(ends))
    passes = score(scorers, coming, free)
    for each in passes:
        bars += [Bar(*gpu, "scorer", names[each.scorer], each.start, each.end) for gpu in scorers[each.scorer].devices]
    # Without fusion no sample moves, so the servers count, not the samples.
    half = sorted(ends)[len(ends) // 2] if migration else sorted(idle)[len(idle) // 2]
    left = sum(max(0.0, end - half) for end in ends) / len(ends)
    kept = left / (generated - half) if generated > half else 0.0
    scored = max([generated, *(each.scored for each in passes)])
    return Rolled(generated, scored, len(moved.moves) if moved else 0, bars, half, kept)


def _scoring(candidate: Candidate) -> list[tuple[Task, Share]]:
    """The tasks that score, with their shares. The actor's trainers do if the old log-probabilities are not folded."""
    tasks: tuple[Task, ...] = INFERENCE if candidate.folded else (*INFERENCE, "actor_training")
    return [(task, share) for task in tasks for share in candidate.shares(task)]


def _pass_of(costs: GPUCosts, task: Task, share: Share, prompts: Ints) -> Callable[[Together], tuple[float, float]]:
    """The seconds of a pass in the slowest stage, and in all stages."""
    model, pool = costs.work.needed(task), costs.inventory[share.pool]
    # A trainer computes a prompt for each of its samples.
    saved = 1 - shared_prompt(costs.work, share.pp) if task in INFERENCE else 0.0

    def seconds(batch: Together) -> tuple[float, float]:
        context = sum(tokens for tokens, _ in batch) / share.micro_batch
        tokens = context - saved * sum(int(prompts[i]) for _, i in batch) / share.micro_batch
        stage, gather, hop = pass_seconds(*model, share, pool, tokens, context / 2)
        busy = max(stage, gather)
        return busy, busy + (share.pp - 1) * (busy + hop)

    return seconds


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
