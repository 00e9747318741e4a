"""Reads from a manifest what the planner may choose, and checks its GPU products and pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from dovetail.manifest.accelerators import sleeps
from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.critic import shares_body
from dovetail.manifest.resolve import old_is_current
from dovetail.manifest.sizes import trained_models
from dovetail.manifest.types import RLHFJobSpec, Role
from dovetail.planner.candidate import Placement, Schedule
from dovetail.planner.hardware.gpus import GPU, UnknownProduct, gpu
from dovetail.planner.placement.layouts import (
    TRAINING_TASKS,
    degrees_of,
    most_stages,
    pinned_shares,
    trainable_layouts,
)
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.search.limits import MIGRATIONS, Limits, every_layout
from dovetail.planner.placement.search.structures import part_sizes

_SCHEDULES: dict[str, tuple[Schedule, ...]] = {
    "Auto": ("Serial", "TimeSharing", "Fused"),
    "Fused": ("Fused",),
    "TimeSharing": ("TimeSharing",),
    "VShaped": ("VShaped",),
    "Dedicated": ("Serial",),
    "Serial": ("Serial",),
}
RECOMPUTE: dict[str, tuple[bool, ...]] = {"Auto": (False, True), "Always": (True,), "Never": (False,)}
ZERO: dict[str, tuple[Literal[2, 3], ...]] = {"Always": (3,), "Never": (2,)}


def _micro_batch(spec: RLHFJobSpec) -> int | None:
    """The value of `Limits.micro_batch`, which a share's `micro_batch` must have. None: any value."""
    if spec.ppo.micro_batch_tokens is None:
        return spec.ppo.micro_batch_size
    return None if spec.ppo.micro_batch_tokens == "Auto" else 1


def product_errors(spec: RLHFJobSpec, measured: Mapping[str, GPU] | None = None) -> list[str]:
    """One sentence for each group whose GPU product is not known."""
    found = []
    for index, group in enumerate(spec.groups):
        if not group.on_cpu:
            try:
                gpu(str(group.gpu.product), measured)
            except UnknownProduct as error:
                found.append(f"spec.groups[{index}].gpu.product: {error}")
    return found


def product_warnings(spec: RLHFJobSpec, measured: Mapping[str, GPU] | None = None) -> list[str]:
    """One sentence for each group whose GPU is in no table. `product_errors` must have found nothing before."""
    found = []
    for index, group in enumerate(spec.groups):
        if not group.on_cpu and (known := gpu(str(group.gpu.product), measured)).estimated:
            found.append(
                f"spec.groups[{index}].gpu.product {known.product} is in no table of GPUs: its figures are "
                f"{known.source}, with {known.memory / 2**30:.0f} GiB. An administrator may give them in the chart's "
                "jobs.gpuProducts."
            )
    return found


def pin_errors(spec: RLHFJobSpec) -> list[str]:
    """One sentence for each pin that the groups' roles contradict."""
    pin = spec.plan.placement
    both = [g.name for g in spec.groups if g.colocated]
    generates = any(Role.ROLLOUT in g.roles for g in spec.groups)
    if generates and pin == "Flattening" and not both:
        return [
            f"spec.plan.placement is {pin}, but no group both trains and generates; give one roles [trainer, rollout]"
        ]
    if pin == "Separation" and both:
        return [
            f"spec.plan.placement is Separation, but group {both[0]} both trains and generates; give it one role, or "
            "set the placement to Auto"
        ]
    return []


def groups_limits(job: PlannedJob) -> Limits:
    """The choices that the manifest's groups and pins leave open."""
    spec, trainers = job.spec, job.trainers
    both = [g for g in spec.groups if g.colocated]
    rollouts = [g.name for g in spec.groups if Role.ROLLOUT in g.roles and Role.TRAINER not in g.roles]
    servers = {g.name: g.gpu.per_pod for g in spec.groups}
    if both:
        rollouts.append(trainers.name)
        servers[trainers.name] = both[0].gpu.per_pod
    optimizers = {"actor": spec.ppo.actor_optimizer, "critic": spec.ppo.critic_optimizer}
    trained = [model for model in trained_models(spec) if model in TRAINING_TASKS]
    return replace(
        pinned(spec, Limits()),
        trainers=(trainers.name,),
        rollouts=tuple(rollouts),
        whole=True,
        micro_batch=_micro_batch(spec),
        servers=servers,
        asleep=tuple(trainers.name if g in both else g.name for g in spec.groups if sleeps(g)),
        offload={TRAINING_TASKS[m]: (optimizers[m].offload,) for m in trained},
        layouts={TRAINING_TASKS[m]: tuple(trainable_layouts(job, m)) for m in trained},
    )


def with_parts(job: PlannedJob, limits: Limits) -> Limits:
    """Adds layouts on a part of the trainer ranks to `limits`, if actor and critic may have ranks of their own. These
    are all layouts that share PPO's mini-batch evenly, or the divisions of pinned layouts
    (`dovetail.protocol.plan.divisions`)."""
    if True not in limits.dedicated or "critic_training" not in limits.layouts:
        return limits
    spec, pins = job.spec, pinned_shares(job.spec)
    micro_batches = spec.ppo.mini_batch_size // spec.ppo.micro_batch_size
    found = dict(limits.layouts)
    for model, task in TRAINING_TASKS.items():
        degrees, stages = degrees_of(job, model), most_stages(job, job.shape(model).layers)
        every = (e for part in part_sizes(job.trainers) for e in every_layout(part, degrees, stages))
        found[task] += pins[task] if pins else tuple(e for e in every if micro_batches % e.dp == 0)
    return replace(limits, layouts=found)


def pinned(spec: RLHFJobSpec, limits: Limits) -> Limits:
    """The part of `limits` that spec.plan allows."""
    placement, fusion, together = spec.plan.placement, spec.plan.inter_stage_fusion, spec.plan.intra_stage_fusion
    if spec.ppo.micro_batch_tokens is not None:
        together = "Serial"  # other schedules need the same number of micro-batches in each step
    # Pinned layouts use all ranks. So do the layouts of a placement that is pinned to Flattening.
    divided = pinned_layouts(spec) is None and placement != "Flattening"
    dedicated = (together == "Dedicated",) if together != "Auto" else (False, True) if divided else (False,)
    return replace(
        limits,
        placements=tuple(Placement) if placement == "Auto" else (Placement(placement),),
        schedules=_SCHEDULES[together],
        dedicated=dedicated,
        migrations=MIGRATIONS if fusion == "Auto" else (None if fusion == "Off" else float(fusion),),
        # With a shared body, the values come from the forward pass that a fold would save.
        folded=(spec.ppo.old_log_probs == "Rollout" or old_is_current(spec)) and not shares_body(spec),
        recompute=RECOMPUTE[spec.plan.recompute],
        fsdp=ZERO.get(spec.plan.zero3, limits.fsdp),
    )
