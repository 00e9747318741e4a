"""Says what another number of GPU nodes means for a job. It computes how many pods of each group have room, and what
the status says about it.

A running job keeps its plan. The number of its trainers is fixed, and its surplus rollouts come and go in any case.
Only its status changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.gpus.gpu_products import Pools
from dovetail.kube import names
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.types import ParallelismByModel, RLHFJobSpec, Role, Stage
from dovetail.operator.reconcile.children import Object
from dovetail.operator.render.context import RenderContext
from dovetail.protocol.plan import Plan

LONGEST_NEWS = 1000
Counts = Mapping[str, int]
"""Pods by group."""


@dataclass(frozen=True)
class Need:
    """A group with GPUs. The job starts with `least` pods and takes up to `most` when there is room. The manifest's
    plan counts on `planned` pods."""

    group: str
    product: str
    per_pod: int
    least: int
    most: int
    planned: int
    trains: bool


@dataclass(frozen=True)
class Outlook:
    """The room for a job. `room` says how many pods of each GPU group fit on the nodes. It is None if the nodes were
    not seen. `plan` is a plan with as many rollouts. It is None if the job's own plan has as many. `pending` says that
    this plan is being made, and `problem` why there is none. `refused` says that the operator may not list nodes."""

    room: Counts | None = None
    plan: Plan | None = None
    pending: bool = False
    problem: str | None = None
    refused: bool = False


def needs(context: RenderContext) -> list[Need]:
    """The needs of all groups with GPUs. GPUs that the administrator describes and GPUs that come through claims are
    not counted, because their resources may have other names."""
    return [
        Need(
            group.name,
            str(group.gpu.product),
            group.gpu.per_pod,
            context.guaranteed(group),
            context.guaranteed(group) if Role.TRAINER in group.roles else context.wanted(group),
            pod_count(group),
            Role.TRAINER in group.roles,
        )
        for group in context.job.spec.groups
        if not group.on_cpu
        and group.gpu.claim_template is None
        and str(group.gpu.product) not in context.settings.gpu_products
    ]


def room(wanted: Sequence[Need], pools: Pools) -> dict[str, int]:
    """The number of pods of each group that would fit on the nodes, at most `most`, if nobody else used the nodes. The
    pods that the job starts with are placed first, large ones before small ones. Then each group in turn gets one more.
    Each pod goes to the fullest node that has room for it."""
    free: dict[str, Counter[int]] = {}
    for (product, gpus), nodes in pools.items():
        free.setdefault(product, Counter())[gpus] += nodes
    found = {need.group: 0 for need in wanted}
    for need in sorted(wanted, key=lambda n: (-n.per_pod, not n.trains)):
        while found[need.group] < need.least and _take(free, need):
            found[need.group] += 1
    more = [need for need in wanted if need.least <= found[need.group] < need.most]
    while more:
        for need in more:
            found[need.group] += _take(free, need)
        more = [n for n in more if found[n.group] < n.most and _node(free, n) is not None]
    return found


def _node(free: Mapping[str, Counter[int]], need: Need) -> int | None:
    """The number of free GPUs of the fullest node that has enough. None if no node has enough."""
    there: Mapping[int, int] = free.get(need.product, {})
    return min((gpus for gpus, nodes in there.items() if nodes and gpus >= need.per_pod), default=None)


def _take(free: Mapping[str, Counter[int]], need: Need) -> bool:
    gpus = _node(free, need)
    if gpus is None:
        return False
    free[need.product][gpus] -= 1
    free[need.product][gpus - need.per_pod] += 1
    return True


def counted(need: Need, there: Counts | None) -> int:
    """The number of pods on which a plan may count. It is the number that fits, but never fewer than the job starts
    with or more than it wants."""
    return need.planned if there is None else max(need.least, min(need.most, there.get(need.group, need.planned)))


def resized(spec: RLHFJobSpec, plan: Plan, wanted: Sequence[Need], there: Counts) -> RLHFJobSpec | None:
    """The spec of the PPO stage to plan again, with as many rollouts as fit. It pins what the processes started with.
    These are layouts, placement, ZeRO-3 and, if all models have the same, activation checkpointing. None if the plan
    already has as many rollouts."""
    sizes = {need.group: counted(need, there) for need in wanted}
    actor = plan.parallelism.get("actor")
    if Stage.PPO not in spec.stages or actor is None or all(sizes[need.group] == need.planned for need in wanted):
        return None
    layouts = ParallelismByModel(actor=actor, critic=plan.parallelism.get("critic"))
    # Layouts on all ranks are pinned. Those on ranks of their own are found again.
    pins: dict[str, object] = {"intra_stage_fusion": "Dedicated"} if plan.dedicated else {"parallelism": layouts}
    if plan.prediction is not None:
        pins["placement"] = plan.prediction.placement
    again = {row.recompute for row in plan.batching if row.stage is Stage.PPO}
    if len(again) == 1:
        pins["recompute"] = "Always" if True in again else "Never"
    # Even with Always, a model without data-parallel ranks that could share its weights does not use ZeRO-3.
    pins["zero3"] = "Always" if plan.gathered_by_layer(Stage.PPO) else "Never"
    groups = [g.model_copy(update={"replicas": sizes.get(g.name, g.replicas)}) for g in spec.groups]
    pinned = spec.plan.model_copy(update=pins)
    # The other models' layouts would have to share the pins, too.
    spec = with_lag(spec, plan.lag)
    return spec.model_copy(update={"groups": groups, "plan": pinned, "stages": [Stage.PPO]})


def honoured(plan: Plan, other: Plan) -> Plan:
    """`plan` with the rollouts of `other`, which `resized` asked for. The predictions of `other` are taken only if the
    running processes work as it assumes."""
    kept = all(plan.layout(Stage.PPO, m) == other.layout(Stage.PPO, m) for m in other.parallelism)
    kept &= _servers(other) == _servers(plan)
    kept &= other.recomputed(Stage.PPO) == plan.recomputed(Stage.PPO)
    kept &= other.gathered_by_layer(Stage.PPO) == plan.gathered_by_layer(Stage.PPO)
    predicted = {"prediction": other.prediction, "memory": other.memory} if kept else {"prediction": None, "memory": []}
    return plan.model_copy(update={"rollouts": other.rollouts, **predicted})


def _servers(plan: Plan) -> dict[tuple[str, str], int]:
    """The GPUs of each group's servers and of the models that its scorers split."""
    found = {(rollout.group, "generation"): rollout.pp for rollout in plan.rollouts}
    return found | {(r.group, model): count for r in plan.rollouts for model, count in r.split.items()}


def remembered(config_map: Object | None) -> Counts | None:
    """The room when the job was planned. None if it was not known."""
    text = ((config_map or {}).get("metadata", {}).get("annotations") or {}).get(names.ROOM)
    try:
        found = json.loads(text or "null")
        return {str(group): int(pods) for group, pods in found.items()}
    except (ValueError, TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class News:
    """News about the room. `sentence` says what differs from the plan and what is missing. It may be empty. `changed`
    says whether something differs since the plan was made, and `short` whether a group has too little room."""

    sentence: str = ""
    changed: bool = False
    short: bool = False


def news(wanted: Sequence[Need], before: Counts | None, now: Counts | None) -> News:
    """The news about the room. `before` is the room when the job was planned, if known. `now` is the room now, or None
    while nodes were not seen."""
    if now is None:
        return News()
    said, changed, any_short = [], False, False
    for need in wanted:
        short = now[need.group] < need.least
        changed |= short and (before is None or before.get(need.group, need.least) >= need.least)
        was, fits = counted(need, before), counted(need, now)
        changed |= was != fits
        any_short |= short
        if short:
            said.append(_lack(need, wanted, now))
        elif was != fits:
            why = "more" if fits > was else "less"
            said.append(f"rollouts of group {need.group} {was} -> {fits}: nodes with {need.product} have {why} room")
    return News("; ".join(said)[:LONGEST_NEWS], changed, any_short)


def _lack(need: Need, wanted: Sequence[Need], now: Counts) -> str:
    """A sentence that says what is missing, and what is still possible."""
    pods = f"{need.least} pod{'s' if need.least > 1 else ''}"
    if now[need.group] > 0:
        return f"group {need.group}: nodes with {need.product} have room for {now[need.group]} of its {pods}"
    others = [n.group for n in wanted if not n.trains and n is not need and now[n.group] > 0]
    if need.trains:
        then = "a pod that is lost waits for such a node, and then training goes on from its last checkpoint"
    elif others:
        then = (
            f"a pod that is lost waits for such a node, and meanwhile only these groups generate: {', '.join(others)}"
        )
    else:
        then = "a pod that is lost waits for such a node, and generation waits with it"
    return f"group {need.group}: no ready node with {need.product} has room for its pods; {then}"
