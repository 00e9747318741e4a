"""Reads a manifest for the planner: the work of an iteration, the GPUs of its groups, and the choices that it leaves
open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from dovetail.manifest.accelerators import sleeps
from dovetail.manifest.checks.batching import longest_sample, pinned_layouts
from dovetail.manifest.critic import has_critic, shares_body
from dovetail.manifest.sizes import pod_count, trained_models
from dovetail.manifest.types import Group, RLHFJobSpec, Role, Stage
from dovetail.planner.candidate import Placement, Schedule
from dovetail.planner.costs.memory import GIB
from dovetail.planner.hardware import GPU, UnknownProduct, gpu
from dovetail.planner.inventory import NETWORK_GBPS, Inventory, Pool
from dovetail.planner.placement.layouts import (
    TRAINING_TASKS,
    most_stages,
    pinned_shares,
    tensor_degrees,
    trainable_layouts,
)
from dovetail.planner.placement.search.limits import MIGRATIONS, Limits, every_layout
from dovetail.planner.placement.search.structures import part_sizes
from dovetail.planner.shape import ModelShape
from dovetail.planner.workload import Lengths, Workload

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


def workload(spec: RLHFJobSpec, shapes: Mapping[str, ModelShape]) -> Workload:
    """The work of one PPO iteration. Lengths are not measured yet, so prompts are half as long as they may be, and
    responses have a long tail."""
    longest = spec.data.max_prompt_tokens
    function = bool(spec.models.reward.calls)
    critic = spec.models.critic.lora or spec.models.reward.lora
    return Workload(
        actor=shapes["actor"],
        reference=shapes["reference"],
        reward=None if function else shapes["reward"],
        critic=shapes["critic"] if has_critic(spec) else None,
        batch=spec.ppo.global_batch_size,
        mini_batch=spec.ppo.mini_batch_size,
        epochs=spec.ppo.epochs,
        prompt=Lengths(max(1.0, longest / 2), 0.0, longest),
        response=Lengths.long_tailed(spec.generation.max_tokens),
        actor_lora=spec.models.actor.lora,
        critic_lora=critic,
        ema=spec.ppo.ema is not None,
        kept_versions=spec.ppo.kept_versions,
        value_head=shares_body(spec),
        per_prompt=spec.ppo.samples_per_prompt,
        micro_batch_tokens=_unit(spec),
        chunks=spec.plan.chunks,
        activation_limit=None if spec.plan.activation_memory is None else spec.plan.activation_memory * GIB,
    )


def _unit(spec: RLHFJobSpec) -> int | None:
    """The tokens that a share's `micro_batch` counts. These are all tokens that the manifest allows. If the planner may
    choose, they are those of the longest sample. None: `micro_batch` counts samples."""
    if spec.ppo.micro_batch_tokens == "Auto":
        return longest_sample(spec, Stage.PPO)
    return spec.ppo.micro_batch_tokens


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
    both = [g.name for g in spec.groups if {Role.TRAINER, Role.ROLLOUT} <= set(g.roles)]
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


def groups_inventory(spec: RLHFJobSpec, measured: Mapping[str, GPU] | None = None) -> Inventory | None:
    """An inventory with a pool for each group, with the pods that the group starts with. The trainer groups are one
    pool with the slowest of their GPUs, because their ranks work in step. It is the first pool. None if a group has no
    GPUs. Raises UnknownProduct."""
    if any(group.on_cpu for group in spec.groups):
        return None
    trainers = [g for g in spec.groups if Role.TRAINER in g.roles]
    pools = [_pool(g, measured) for g in spec.groups if Role.TRAINER not in g.roles]
    mine = [_pool(g, measured) for g in trainers]
    slowest = min((p.gpu for p in mine), key=lambda g: (g.training.flops[g.training.dtype], g.memory))
    least = replace(slowest, memory=min(p.gpu.memory for p in mine))
    per_node = min(p.per_node for p in mine)
    count = sum(p.gpus for p in mine)
    joined = Pool("+".join(g.name for g in trainers), least, count // per_node, per_node, mine[0].network)
    return Inventory((joined, *pools))


def _pool(group: Group, measured: Mapping[str, GPU] | None) -> Pool:
    product = gpu(str(group.gpu.product), measured)
    return Pool(group.name, product, pod_count(group), group.gpu.per_pod, NETWORK_GBPS * 1e9 / 8)


def groups_limits(spec: RLHFJobSpec, inventory: Inventory, shapes: Mapping[str, ModelShape]) -> Limits:
    """The choices that the manifest's groups and pins leave open. `inventory`: as `groups_inventory` gives it."""
    trainers = inventory.pools[0]
    both = [g for g in spec.groups if {Role.TRAINER, Role.ROLLOUT} <= set(g.roles)]
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
        layouts={TRAINING_TASKS[m]: tuple(trainable_layouts(spec, m, trainers, shapes[m])) for m in trained},
    )


def with_parts(spec: RLHFJobSpec, limits: Limits, inventory: Inventory, shapes: Mapping[str, ModelShape]) -> Limits:
    """Adds layouts on a part of the trainer ranks to `limits`, if actor and critic may have ranks of their own. These
    are all layouts that share PPO's mini-batch evenly, or the divisions of pinned layouts
    (`dovetail.planner.placement.layouts.divisions`)."""
    if True not in limits.apart or "critic_training" not in limits.layouts:
        return limits
    trainers, pins = inventory.pools[0], pinned_shares(spec)
    micro_batches = spec.ppo.mini_batch_size // spec.ppo.micro_batch_size
    found = dict(limits.layouts)
    for model, task in TRAINING_TASKS.items():
        degrees = tensor_degrees(spec, model, trainers, shapes[model])
        stages = most_stages(spec, shapes[model].layers)
        every = (e for part in part_sizes(trainers) for e in every_layout(part, degrees, stages))
        found[task] += pins[task] if pins else tuple(e for e in every if micro_batches % e.dp == 0)
    return replace(limits, layouts=found)


def pinned(spec: RLHFJobSpec, limits: Limits) -> Limits:
    """The part of `limits` that spec.plan allows."""
    placement, fusion, together = spec.plan.placement, spec.plan.inter_stage_fusion, spec.plan.intra_stage_fusion
    if spec.ppo.micro_batch_tokens is not None:
        together = "Serial"  # other schedules need the same number of micro-batches in each step
    # Pinned layouts use all ranks. So do the layouts of a placement that is pinned to Flattening.
    divided = pinned_layouts(spec) is None and placement != "Flattening"
    apart = (together == "Dedicated",) if together != "Auto" else (False, True) if divided else (False,)
    return replace(
        limits,
        placements=tuple(Placement) if placement == "Auto" else (Placement(placement),),
        schedules=_SCHEDULES[together],
        apart=apart,
        migrations=MIGRATIONS if fusion == "Auto" else (None if fusion == "Off" else float(fusion),),
        # With a shared body, the values come from the forward pass that a fold would save.
        folded=spec.ppo.old_log_probs == "Rollout" and not shares_body(spec),
        shared_body=shares_body(spec),
        recompute=RECOMPUTE[spec.plan.recompute],
        fsdp=ZERO.get(spec.plan.zero3, limits.fsdp),
    )
