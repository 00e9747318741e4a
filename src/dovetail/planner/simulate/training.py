"""Simulates the training of one iteration event by event: every pass of every rank, with the samples' own lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dovetail.fusion.lengths import Ints, Lengths
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
from dovetail.planner.candidate import Candidate, Share
from dovetail.planner.costs.generation import Floats
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.costs.steps import StepTimes

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
