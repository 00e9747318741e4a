"""Simulates an iteration of a candidate event by event: generation and inference
(`dovetail.planner.simulated_rollout`), and then every pass of every trainer rank, with the samples' own lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.fusion.lengths import Lengths
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
from dovetail.planner.candidate import Candidate, Share
from dovetail.planner.seconds import GPUCosts, StepTimes
from dovetail.planner.simulated_rollout import Bar, play_rollout

Floats = npt.NDArray[np.float64]
FAMILY = {"Serial": "serial", "TimeSharing": "stitched", "Fused": "fused", "VShaped": "fused-v"}
UNSPLIT = FAMILY | {"VShaped": "fused-v-whole"}
# One round of the search. Its answer is within a few percent of the bound.
EFFORT = SearchEffort(seconds=0.0, workers=1, memory=False, exact=False)


def play_training(
    candidate: Candidate, costs: GPUCosts, tokens: Sequence[int], begun: float = 0.0
) -> tuple[float, list[Bar]]:
    """Simulates training, which begins at second `begun`. Returns its seconds, and what the GPUs do.

    `tokens`: the tokens of each sample's prompt and response. Mini-batches take the samples in order. Models
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
                ended, new = _step(group, family, np.array(tokens[k * mini : (k + 1) * mini]) / mean, begin)
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
    """Deals samples to data-parallel ranks, or to groups of them that share tokens. Returns for each the lengths of its
    micro-batches, where 1 is the length of a mean micro-batch. `relative`: the samples' lengths over the mean."""
    ranks: list[list[float]] = [[] for _ in range(share.batch_shares)]
    room = -(-len(relative) // share.batch_shares)
    sums = [0.0] * share.batch_shares
    for length in np.sort(relative)[::-1]:
        r = min((r for r in range(share.batch_shares) if len(ranks[r]) < room), key=lambda r: (sums[r], r))
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
    copies = share.batch_shares // (positions // share.pp)
    dealt = [deal(relative, model.share, model.step) for model in models]
    names = tuple(model.name for model in models)
    end, bars, width = now, list[Bar](), share.cp * share.tp
    for copy in range(copies):
        lengths = [np.array(ranks[copy::copies]) for ranks in dealt]
        schedule = _schedule(names, tuple(model.step for model in models), lengths, family)
        end = max(end, now + schedule.makespan)
        for p in schedule.passes():
            name, group = f"{p.model} {p.kind}{p.micro_batch}", p.rank * copies + copy
            bars += _bars(share, range(group * width, (group + 1) * width), name, now + p.start, now + p.end)
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
) -> npt.NDArray[np.int64]:
    """The order of passes that the search finds for micro-batches of equal length."""
    return find(_problem(names, steps, [np.ones(shape) for shape in shapes]), family_of(family), EFFORT).orders


def _bars(share: Share, gpus: range, name: str, start: float, end: float) -> list[Bar]:
    """The same span on some GPUs of a share, which are counted from its first."""
    return [Bar(share.pool, share.first + gpu, "trainer", name, start, end) for gpu in gpus]


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


def simulate(candidate: Candidate, costs: GPUCosts, prompts: Sequence[int], lengths: Sequence[int]) -> Simulated:
    """Simulates one iteration. `prompts`, `lengths`: the tokens of each sample's prompt and response.

    Raises KeyError for a pool that the inventory lacks."""
    swapped, moved = costs.swapped_in(candidate), costs.transfer(candidate)
    rolled = play_rollout(candidate, costs, prompts, lengths)
    begun = swapped + rolled.scored
    tokens = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
    training, trained = play_training(candidate, costs, tokens, begun)
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
