"""Finds the best placement on an inventory, whatever groups a manifest has, and the groups that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from dovetail.manifest.checks.batching import batch_rules
from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.planner.candidate import Candidate, Placement, Share, Task
from dovetail.planner.costs.gpu import Estimate, GPUCosts
from dovetail.planner.inventory import Inventory
from dovetail.planner.placement.layouts import pinned_shares
from dovetail.planner.placement.manifest import pinned
from dovetail.planner.placement.placed import Chosen, Infeasible, prediction, worth
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.search.limits import Limits
from dovetail.planner.placement.search.search import Effort, Found, Result, Search, alternatives, search_fewest_stages
from dovetail.planner.placement.search.structures import ALONE

# The least number of whole iterations that the search may estimate. It is enough for 64 GPUs; more GPUs get more.
LEAST_EFFORT = 1500
EFFORT_PER_GPU = 12


class Unknown(ValueError):
    """The planner knows too little about the job. The message is one sentence."""


class PodCosts(GPUCosts):
    """The costs of placements as `fragment` writes them. If trainers share GPUs with servers, each pod has one server.
    Messages between pods go over the network, as in the plan of such a manifest."""

    def estimate(self, candidate: Candidate) -> Estimate:
        """See `GPUCosts.estimate`. The candidate is estimated in its own pods."""
        mine = self.of(candidate)
        return super().estimate(candidate) if mine is self else mine.estimate(candidate)

    def of(self, candidate: Candidate) -> GPUCosts:
        """The costs of this candidate's pods."""
        for server in candidate.generation:
            if any(server.overlaps(share) for share in candidate.trained):
                return self._in_pods(server.pool, server.pp * server.tp)
        return self

    @cache  # noqa: B019  as long-lived as its few keys
    def _in_pods(self, name: str, size: int) -> GPUCosts:
        pool = self.inventory[name]
        if size >= pool.per_node:
            return self
        life = pool.life and pool.life * pool.per_node / size  # when a node ends, all its pods end
        pods = replace(pool, nodes=pool.gpus // size, per_node=size, life=life)
        pools = tuple(pods if each is pool else each for each in self.inventory.pools)
        return GPUCosts(self.work, Inventory(pools), self.max_samples)


def effort(inventory: Inventory, expired: Callable[[], bool] = lambda: False) -> Effort:
    """The effort of a search on an inventory of this size."""
    return Effort(max(LEAST_EFFORT, EFFORT_PER_GPU * inventory.gpus), expired)


def recommend(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    inventory: Inventory,
    expired: Callable[[], bool] = lambda: False,
) -> Chosen:
    """The best placement on an inventory, whatever groups the manifest has. `expired`: whether the search must end now.
    Raises Infeasible, ConfigError or Unknown."""
    if Stage.PPO not in spec.stages:
        raise Unknown("spec.stages has no ppo, whose iteration is what is placed on an inventory; add it")
    job = PlannedJob(spec, configs)
    if job.shapes is None:
        raise Unknown("the configuration of one of the models is not known; give its folder as source.path")
    limits, tried = _limits(spec), effort(inventory, expired)
    costs = PodCosts(job.work, inventory, spec.generation.max_concurrent)
    found = _search(limits, costs, tried)
    if spec.plan.zero3 == "Auto":
        found = _gaining(found, _search(replace(limits, fsdp=(3,)), costs, tried))
    if isinstance(found, str):
        raise Infeasible(found)
    return found


def _gaining(plain: Chosen | str, gathering: Chosen | str) -> Chosen | str:
    """The placement with ZeRO-3 if it gains enough or nothing else fits. Otherwise the one without."""
    if isinstance(gathering, str):
        return plain
    if isinstance(plain, str):
        return gathering
    best, other = (each.prediction.iteration_seconds for each in (gathering, plain))
    return gathering if gathering.candidate.gathers and worth(best, other, plain.costs.work.steps) else plain


def cheapest(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    inventory: Inventory,
    expired: Callable[[], bool] = lambda: False,
) -> Chosen:
    """Like `recommend`, but for the lowest price of a sample. The placement may use fewer nodes.

    It descends from all nodes, and from each pool alone. While the price falls, one pool gets a node less, half its
    nodes, or none. Raises Unknown also if a price is missing."""
    if missing := next((pool.name for pool in inventory.pools if pool.price is None), None):
        raise Unknown(
            f"pool {missing} of the inventory has no pricePerGPUHour, which a search for the lowest price needs"
        )
    known: dict[tuple[int, ...], Chosen | Infeasible] = {}

    def price(nodes: tuple[int, ...]) -> float:
        if nodes not in known:
            kept = tuple(replace(p, nodes=n) for p, n in zip(inventory.pools, nodes, strict=True) if n)
            try:
                known[nodes] = recommend(spec, configs, Inventory(kept), expired)
            except Infeasible as error:
                known[nodes] = error
        there = known[nodes]
        return math.inf if isinstance(there, Infeasible) else 1 / (there.prediction.samples_per_dollar or 1e-300)

    everything = tuple(pool.nodes for pool in inventory.pools)
    alone = [tuple(n if i == j else 0 for j, n in enumerate(everything)) for i in range(len(everything))]
    best = everything
    for start in dict.fromkeys((everything, *alone)):
        current = start
        while not expired():
            fewer = [
                tuple(less if i == j else n for j, n in enumerate(current))
                for i, count in enumerate(current)
                for less in sorted({count - 1, count // 2, 0} - {count, -1})
                if sum(current) - count + less
            ]
            nearest = min(fewer, key=price, default=current)
            if price(nearest) >= price(current):
                break
            current = nearest
        best = min(best, current, key=price)
    price(best)  # it is not known yet if the time was up at once
    result = known[best]
    if isinstance(result, Infeasible):
        raise result
    return result


def _limits(spec: RLHFJobSpec) -> Limits:
    batches: dict[Task, tuple[int, ...]] = {"actor_training": (), "critic_training": ()}
    for rule in batch_rules(spec):
        if rule.stage is not Stage.PPO:  # the reward model has the critic's layout, if there is a critic
            task: Task = "critic_training" if rule.model == "reward" and has_critic(spec) else "actor_training"
            batches[task] += (rule.batch // rule.micro,)
    return replace(pinned(spec, Limits()), layouts=pinned_shares(spec), batches=batches)


def _search(limits: Limits, costs: PodCosts, effort: Effort) -> Chosen | str:
    most = max(pool.per_node for pool in costs.inventory.pools)
    result, _ = search_fewest_stages(limits, most, lambda tried: Search(tried, costs, effort).run())
    if result.best is None:
        return _missing(result)
    result = _plainest(result, costs)
    assert result.best is not None
    mine = costs.of(result.best.candidate)
    return Chosen(result.best.candidate, mine, prediction(result, mine))


def _plainest(result: Result, costs: GPUCosts) -> Result:
    """The result with the simplest placement in place of the best one. The cost model cannot tell some placements from
    the best one. Among these, the simplest divides the GPUs least."""
    best = result.best
    assert best is not None
    near = [best]
    for other in result.rejected:
        if other.seconds is not None and not worth(best.seconds, other.seconds, costs.work.steps):
            near.append(Found(other.candidate, costs.estimate(other.candidate)))
    plainest = min(near, key=lambda found: (len({*found.candidate.note.split("; ")} - {"", ALONE}), found.seconds))
    if plainest is best:
        return result
    return replace(result, best=plainest, rejected=alternatives(result, plainest))


def _missing(result: Result) -> str:
    """Why nothing fits. The reason is that of the placement that is nearest to fitting."""
    reasons = [r.problem for r in result.rejected if r.problem]
    nearest = min(reasons, key=len) if reasons else "no layout divides the batches and layers evenly"
    return f"{nearest}; add GPUs, take some with more memory, or shorten sequences or batches"


def fragment(chosen: Chosen) -> dict[str, Any]:
    """The fields of a manifest's spec that describe this placement: groups, pins of the plan, and batch sizes."""
    candidate, actor = chosen.candidate, chosen.candidate.actor_training[0]
    critic = candidate.critic_training[0] if candidate.critic_training else None

    def group(name: str, pool: str, roles: list[str], gpus: int, per_pod: int) -> dict[str, Any]:
        gpu = {"product": chosen.costs.inventory[pool].gpu.product, "perPod": per_pod}
        return {"name": name, "roles": roles, "gpu": gpu, "replicas": gpus // per_pod}

    def serving(share: Share, *roles: str) -> dict[str, Any]:
        return group(share.pool, share.pool, [*roles, "rollout"], share.gpus, share.pp * share.tp)

    shared = {s for s in candidate.generation if s.overlaps(actor)}
    if shared:
        groups = [serving(next(iter(shared)), "trainer")]
    else:
        count = actor.gpus if critic is None or critic.range == actor.range else actor.gpus + critic.gpus
        per_node = chosen.costs.inventory[actor.pool].per_node
        groups = [group("trainers", actor.pool, ["trainer"], count, min(count, per_node))]
    groups += [serving(s) for s in candidate.generation if s not in shared]
    trained = {"actor": actor, **({"critic": critic} if critic else {})}
    layouts = {model: {"pp": share.pp, "tp": share.tp, "dp": share.dp} for model, share in trained.items()}
    optimizers = {f"{model}Optimizer": {"offload": True} for model, share in trained.items() if share.offload}
    # A manifest's layouts are on all trainer ranks. The planner finds layouts on parts of them again.
    own = {"intraStageFusion": "Dedicated"} if candidate.schedule == "Dedicated" else {"parallelism": layouts}
    return {
        "groups": groups,
        "ppo": {"microBatchSize": actor.micro_batch, **optimizers},
        "plan": {
            "placement": "Interleaving" if candidate.placement is Placement.INTERLEAVING else "Auto",
            **own,
            **({"zero3": "Always"} if candidate.gathers else {}),
        },
    }
