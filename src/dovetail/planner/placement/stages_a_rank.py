"""Decides which schedules of actor and critic fit on trainer ranks of GPUs, and how many stages of each a rank may hold
(V-shaped schedules)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dovetail.planner.candidate import Schedule, Share
from dovetail.planner.costs.gpu import Estimate, GPUCosts
from dovetail.planner.placement.placed import Chosen, Placed, in_ppo
from dovetail.planner.placement.planned_job import PlannedJob

# The numbers of stages that are tried: a V, and two of them.
SEVERAL = (2, 4)


def fitting(chosen: Chosen) -> Literal["Auto", "TimeSharing", "Serial"]:
    """The schedules that fit where a placement on GPUs was chosen and the manifest leaves the schedule open. Those that
    run both models at once need the gradients and the gathered weights of both. So a placement may fit only if the
    models take turns, or only if no critic's stage runs against the actor's."""
    ways: tuple[tuple[Schedule, Literal["Auto", "TimeSharing"]], ...] = (
        ("Fused", "Auto"),
        ("TimeSharing", "TimeSharing"),
    )
    for schedule, allowed in ways:
        if chosen.costs.estimate(replace(chosen.candidate, schedule=schedule)).fits:
            return allowed
    return "Serial"


def most_chunks(job: PlannedJob, placed: Placed, schedule: str) -> int:
    """The most stages of each model that PPO's schedules may put on a rank. With `schedule` Auto it is what the job
    permits. Otherwise it is what the manifest pins, or 1.

    Auto puts several stages on a rank only if that works and changes no bit. The models must have the same pipeline of
    several stages, layers that divide evenly, and no dropout, which is drawn by stage. On GPUs the ranks' memory must
    be enough. With activation checkpointing or ZeRO-3 backward passes cannot be split, and no schedule with more than
    two stages has whole ones. A model that trains alone has at most two stages on a rank."""
    spec, known = job.spec, job.shapes
    if schedule != "Auto":
        return spec.plan.chunks if schedule == "VShaped" else 1
    trained = [model for model in ("actor", "critic") if model in placed.layouts]
    layouts = [placed.layouts[model] for model in trained]
    adapters = [getattr(spec.models, model).lora for model in trained]
    dropout = any(each is not None and each.dropout for each in adapters)
    if any(each != layouts[0] for each in layouts) or layouts[0].pp == 1 or dropout:
        return 1
    counts = [known[m].layers if known is not None else job.layers.get(m) for m in trained]
    several = SEVERAL[:1] if len(trained) == 1 or in_ppo(placed.recompute | placed.by_layer) else SEVERAL
    stages = [c for c in several if all(n is not None and n % (layouts[0].pp * c) == 0 for n in counts)]
    if not job.trains_on_gpus:
        return max(stages, default=1)
    return max((c for c in stages if placed.chosen is not None and held(placed.chosen, c).fits), default=1)


def held(chosen: Chosen, chunks: int) -> Estimate:
    """The estimate of a placement on GPUs if each rank holds so many stages."""
    return _costs(chosen, chunks).estimate(replace(chosen.candidate, schedule="VShaped"))


def server_memory(chosen: Chosen, chunks: int) -> dict[Share, float]:
    """The fraction of a GPU's memory that the servers of each generation share may take. It holds for every number of
    stages on a rank up to `chunks`, because the schedules choose that number."""
    found = dict(chosen.costs.memory.server_memory(chosen.candidate))
    for count in (c for c in SEVERAL if c <= chunks):
        several = _costs(chosen, count).memory.server_memory(replace(chosen.candidate, schedule="VShaped"))
        found = {share: min(part, several[share]) for share, part in found.items()}
    return found


def _costs(chosen: Chosen, chunks: int) -> GPUCosts:
    costs = chosen.costs
    return GPUCosts(replace(costs.work, chunks=chunks), costs.inventory, costs.max_samples)
