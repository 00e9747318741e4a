"""Places a job on GPUs, by the models of time and memory: on the groups of its manifest, or on an inventory, with the
groups that it then needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from dovetail.gpus.inventory import Inventory
from dovetail.manifest.accelerators import sleeps
from dovetail.manifest.checks.batching import BatchRule, longest_sample
from dovetail.manifest.resolve import old_is_current
from dovetail.manifest.sizes import has_critic, shares_body, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner import lives
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Placement, Share, Task
from dovetail.planner.memory import Training, problem, worst
from dovetail.planner.planned_job import (
    Chosen,
    Infeasible,
    Placed,
    PlannedJob,
    allowed_layouts,
    most_stages,
    sequences,
    worth,
)
from dovetail.planner.search import (
    ALONE,
    MIGRATIONS,
    Effort,
    Found,
    Limits,
    Result,
    Search,
    alternatives,
    every_layout,
    part_sizes,
    search_fewest_stages,
    tensor_degrees,
)
from dovetail.planner.seconds import Estimate, GPUCosts
from dovetail.planner.simulated_rollout import drawn_on_gpus
from dovetail.protocol.plan import Layout, divisions
from dovetail.protocol.prediction import (
    Alternative,
    PredictedMemory,
    PredictedStage,
    PredictedTask,
    Prediction,
)

ALTERNATIVES = 12
TRAINING_TASKS: dict[str, Task] = {"actor": "actor_training", "critic": "critic_training"}
RECOMPUTE: dict[str, tuple[bool, ...]] = {"Auto": (False, True), "Always": (True,), "Never": (False,)}
ZERO: dict[str, tuple[Literal[2, 3], ...]] = {"Always": (3,), "Never": (2,)}
# The most whole iterations that the search may estimate. A manifest's groups leave few choices.
EFFORT = 600


@dataclass(frozen=True)
class Fitting:
    """A layout of a trained model that fits in each stage that trains it. `recompute`: the stages in which it fits only
    with activation checkpointing. `by_layer`: the stages in which it has ZeRO-3."""

    layout: Parallelism
    recompute: frozenset[Stage] = frozenset()
    by_layer: frozenset[Stage] = frozenset()


def place(job: PlannedJob) -> Placed | None:
    """The fastest placement that fits, by the cost model of GPUs. None if the job's GPUs or models are not known, or if
    its groups have CPUs. If ZeRO-3 is left open, PPO has it where that gains enough, or where nothing fits without it.
    Raises Infeasible, ConfigError or UnknownProduct."""
    if job.shapes is None or job.inventory is None:
        return None
    wanted = {"Always": True, "Never": False}.get(job.spec.plan.zero3, job.zero3)
    if wanted is not None:
        return _place(job, wanted)
    plain, refused = None, None
    try:
        plain = _place(job, False)
        if plain is None or plain.chosen is None:
            return plain
    except Infeasible as error:
        refused = error
    try:
        found = _place(job, True)
    except Infeasible:
        if refused is not None:
            raise refused from None
        return plain
    if found is None or found.chosen is None:
        return found
    if plain is not None and plain.chosen is not None:
        best, other = (each.prediction.iteration_seconds for each in (found.chosen, plain.chosen))
        if not worth(best, other, job.work.steps):
            return plain
    return taken(plain, "" if refused is None else str(refused), found)


# ------------------------------------------------------------ what a manifest allows


def groups_limits(job: PlannedJob, layouts: Mapping[str, Sequence[Fitting]], by_layer: bool) -> Limits:
    """The choices that the manifest's groups and pins leave open. `layouts`: those of each trained model on all trainer
    ranks. `by_layer`: actor and critic train under ZeRO-3.

    If actor and critic may have ranks of their own, there are also layouts on a part of the ranks. These are all that
    share PPO's mini-batch evenly, or the divisions of pinned layouts (`dovetail.protocol.plan.divisions`)."""
    spec, trainers = job.spec, job.trainers
    both = [g for g in spec.groups if g.colocated]
    rollouts = [g.name for g in spec.groups if Role.ROLLOUT in g.roles and Role.TRAINER not in g.roles]
    servers = {g.name: g.gpu.per_pod for g in spec.groups}
    if both:
        rollouts.append(trainers.name)
        servers[trainers.name] = both[0].gpu.per_pod
    optimizers = {"actor": spec.ppo.actor_optimizer, "critic": spec.ppo.critic_optimizer}
    trained = {task: model for model, task in TRAINING_TASKS.items() if model in layouts}
    limits = replace(
        pinned(job, Limits()),
        trainers=(trainers.name,),
        rollouts=tuple(rollouts),
        whole=True,
        micro_batch=_micro_batch(spec),
        servers=servers,
        asleep=tuple(trainers.name if g in both else g.name for g in spec.groups if sleeps(g)),
        offload={task: (optimizers[model].offload,) for task, model in trained.items()},
        fsdp=(3,) if by_layer else (2,),
    )
    found = {task: tuple(each.layout for each in layouts[model]) for task, model in trained.items()}
    if True in limits.dedicated and "critic_training" in found:
        pins = pinned_shares(job)
        micro_batches = spec.ppo.mini_batch_size // spec.ppo.micro_batch_size
        for task, model in trained.items():
            degrees, stages = degrees_of(job, model), most_stages(job, job.shape(model).layers)
            every = (e for part in part_sizes(trainers) for e in every_layout(part, degrees, stages))
            found[task] += pins[task] if pins else tuple(e for e in every if micro_batches % e.batch_shares == 0)
    return replace(limits, layouts=found)


def pinned(job: PlannedJob, limits: Limits) -> Limits:
    """The part of `limits` that spec.plan allows."""
    spec = job.spec
    placement, fusion, together = spec.plan.placement, spec.plan.inter_stage_fusion, spec.plan.intra_stage_fusion
    if spec.ppo.micro_batch_tokens is not None:
        together = "Serial"  # other schedules need the same number of micro-batches in each step
    # Pinned layouts use all ranks. So do the layouts of a placement that is pinned to Flattening.
    divided = job.pins is None and placement != "Flattening"
    dedicated = (together == "Dedicated",) if together != "Auto" else (False, True) if divided else (False,)
    return replace(
        limits,
        placements=tuple(Placement) if placement == "Auto" else (Placement(placement),),
        schedules=Limits.schedules if together == "Auto" else ("Serial",) if dedicated == (True,) else (together,),
        dedicated=dedicated,
        migrations=MIGRATIONS if fusion == "Auto" else (None if fusion == "Off" else float(fusion),),
        # With a shared body, the values come from the forward pass that a fold would save.
        folded=(spec.ppo.old_log_probs == "Rollout" or old_is_current(spec)) and not shares_body(spec),
        recompute=RECOMPUTE[spec.plan.recompute],
        fsdp=ZERO.get(spec.plan.zero3, limits.fsdp),
    )


def _micro_batch(spec: RLHFJobSpec) -> int | None:
    """The value of `Limits.micro_batch`, which a share's `micro_batch` must have. None: any value."""
    if spec.ppo.micro_batch_tokens is None:
        return spec.ppo.micro_batch_size
    return None if spec.ppo.micro_batch_tokens == "Auto" else 1


def pinned_shares(job: PlannedJob) -> dict[Task, tuple[Parallelism, ...]]:
    """The layouts that spec.plan.parallelism allows for actor and critic training. Empty if it allows all."""
    spec = job.spec
    if job.pins is None:
        return {}
    whole = {model: job.pins[model][1] for model in TRAINING_TASKS}
    if spec.plan.intra_stage_fusion != "Dedicated" or not has_critic(spec):
        return {task: (whole[model],) for model, task in TRAINING_TASKS.items()}
    parts = divisions(whole, spec.ppo.mini_batch_size // spec.ppo.micro_batch_size)
    return {task: tuple(_plain(part[model]) for part in parts) for model, task in TRAINING_TASKS.items()}


def _plain(share: Parallelism | Share) -> Parallelism:
    """The layout alone."""
    return Parallelism(pp=share.pp, tp=share.tp, dp=share.dp, cp=share.cp, ep=share.ep)


def degrees_of(job: PlannedJob, model: str) -> list[int]:
    """The tensor-parallel degrees of a trained model on the trainers' nodes."""
    return tensor_degrees(job.shape(model), job.trainers.per_node, getattr(job.spec.models, model).lora)


# ------------------------------------------------------------ ZeRO-3, if the manifest leaves it open


def taken(plain: Placed | None, why: str, found: Placed) -> Placed:
    """`found`, with the placement without ZeRO-3 among its alternatives. It is `plain` if `found` has no ZeRO-3. `why`:
    the reason if nothing fits without ZeRO-3."""
    assert found.chosen is not None
    without = None if plain is None or plain.chosen is None else plain.chosen.prediction
    if plain is not None and not found.by_layer:
        return plain
    other = Alternative(
        placement=(without or found.chosen.prediction).placement,
        note="without ZeRO-3",
        seconds=None if without is None else without.iteration_seconds,
        problem=why if without is None else None,
    )
    # The fastest comes first. Those that fail come last.
    others = [other, *found.chosen.prediction.alternatives]
    others.sort(key=lambda each: (each.seconds is None, each.seconds or 0.0))
    prediction = found.chosen.prediction.model_copy(update={"alternatives": others})
    return replace(found, prediction=prediction, chosen=replace(found.chosen, prediction=prediction))


# ------------------------------------------------------------ one placement


def _place(job: PlannedJob, by_layer: bool) -> Placed | None:
    """The fastest placement with or without ZeRO-3. `by_layer`: PPO's models train under ZeRO-3."""
    layouts = {model: supervised(job, model, by_layer) for model in job.trained}
    if not all(layouts.values()):
        return None
    layout_of = {model: fitting[0].layout for model, fitting in layouts.items()}
    if Stage.PPO not in job.spec.stages:
        return _with_stages(job, Placed(layout_of), layouts)
    found = _iteration(job, layouts, by_layer)
    trained = {"actor": found.candidate.actor_training, "critic": found.candidate.critic_training}
    shares = {model: mine[0] for model, mine in trained.items() if mine}
    dedicated: dict[str, Layout] = {}
    if found.candidate.schedule == "Dedicated":
        dedicated = {m: Layout(pp=s.pp, tp=s.tp, dp=s.dp, cp=s.cp, ep=s.ep, first=s.first) for m, s in shares.items()}
        # The critic's layout on all ranks is not used, but it must have the actor's tp.
        actor = layout_of["actor"]
        critics = [fitting.layout for fitting in layouts["critic"]]
        layout_of["critic"] = min(critics, key=lambda layout: (layout != actor, layout.tp != actor.tp))
    else:
        layout_of |= {m: _plain(share) for m, share in shares.items()}
    if "reward" in layout_of and layout_of.get("critic") in [fitting.layout for fitting in layouts["reward"]]:
        layout_of["reward"] = layout_of["critic"]
    placed = Placed(
        layout_of,
        found.prediction,
        recompute=frozenset((Stage.PPO, m) for m, share in shares.items() if share.recompute),
        by_layer=frozenset((Stage.PPO, m) for m, share in shares.items() if share.gathers),
        dedicated=dedicated,
        chosen=found,
        draw=lambda: drawn_on_gpus(found.candidate, found.costs, job.spec.seed),
    )
    return _with_stages(job, placed, layouts)


def _with_stages(job: PlannedJob, placed: Placed, layouts: Mapping[str, Sequence[Fitting]]) -> Placed:
    """Adds DPO and the stages before PPO: how their models save memory, and their times if all sequences have the
    longest possible length."""
    fits = [(m, fit) for m, fitting in layouts.items() for fit in fitting if fit.layout == placed.layouts[m]]
    recompute = placed.recompute | {(s, m) for m, fit in fits for s in fit.recompute if s is not Stage.PPO}
    by_layer = placed.by_layer | {(s, m) for m, fit in fits for s in fit.by_layer if s is not Stage.PPO}
    stages = []
    for rule in (rule for rule in job.rules if rule.stage is not Stage.PPO):
        way = (rule.stage, rule.model)
        share = job.share(rule, placed.layouts[rule.model], recompute=way in recompute, by_layer=way in by_layer)
        # The responses' log-probabilities under the reference are computed once, before the first step of DPO.
        seconds = _step_seconds(job, rule, share, reference=rule.stage is Stage.DPO)
        stages.append(
            PredictedStage(stage=rule.stage, steps=job.spec.supervised(rule.stage).steps, step_seconds=seconds)
        )
    return replace(placed, recompute=recompute, by_layer=by_layer, stages=tuple(stages))


def _iteration(job: PlannedJob, layouts: Mapping[str, Sequence[Fitting]], by_layer: bool) -> Chosen:
    costs, steps = job.costs, job.costs.work.steps
    limits = groups_limits(job, layouts, by_layer)
    most = max(limits.servers[pool] for pool in limits.rollouts or ())
    result, limits = search_fewest_stages(limits, most, partial(_searched, costs))
    if result.best is None:
        # The reason is that of the simplest placement.
        why = min(result.rejected, key=lambda r: len(r.candidate.note)).problem if result.rejected else None
        raise Infeasible(_reason(job, why, limits))
    if result.best.candidate.schedule == "Dedicated" and False in limits.dedicated:
        limits = replace(limits, dedicated=(False,))
        result = _worth(result, _searched(costs, limits), steps)
    plain = replace(
        limits,
        layouts={task: _least_split(layouts, job.trainers.gpus) for task, layouts in limits.layouts.items()},
        dedicated=limits.dedicated[:1],
        placements=tuple(p for p in limits.placements if p is not Placement.INTERLEAVING) or limits.placements,
        serving_pp=1,
    )
    result = _worth(result, _searched(costs, plain), steps)
    assert result.best is not None
    return Chosen(result.best.candidate, costs, prediction(result, costs))


def prediction(result: Result, costs: GPUCosts) -> Prediction:
    """The prediction of a result's best candidate, which must exist."""
    found = result.best
    assert found is not None
    candidate, estimate = found.candidate, found.estimate
    speed = costs.work.batch / estimate.seconds
    priced = lives.expected(estimate.phases, lives.uses(candidate, estimate.memory), costs.inventory)
    price = priced.per_thousand(costs.work.batch)
    return Prediction(
        placement=candidate.placement.value,
        note=candidate.note,
        schedule=candidate.schedule,
        migration=candidate.migration,
        iteration_seconds=estimate.seconds,
        synchronous_seconds=estimate.seconds,
        phases=dict(estimate.phases),
        samples_per_second=speed,
        samples_per_dollar=None if not price else 1000 / price,
        lost_share=priced.lost,
        hardware="measured" if costs.inventory.measured else "data sheets",
        tasks=[_task(task, share, costs) for task, share in candidate.placed],
        memory=[
            PredictedMemory(
                group=m.pool,
                first=m.range.start,
                gpus=len(m.range),
                parts=dict(m.device),
                host=dict(m.host),
                capacity=m.capacity,
            )
            for m in estimate.memory
        ],
        alternatives=[
            Alternative(
                placement=r.candidate.placement.value, note=r.candidate.note, seconds=r.seconds, problem=r.problem
            )
            for r in result.rejected[:ALTERNATIVES]
        ],
        examined=result.estimates,
    )


def _task(task: Task, share: Share, costs: GPUCosts) -> PredictedTask:
    names = ("first", "gpus", "pp", "tp", "dp", "micro_batch")
    return PredictedTask(
        task=task,
        group=share.pool,
        seconds=costs.option(task, share).seconds,
        details=list(_details(task, share)),
        **{name: getattr(share, name) for name in names},
    )


def _details(task: Task, share: Share) -> list[str]:
    found = []
    if task in TRAINING and share.shards > 1:
        found.append(f"ZeRO-{share.fsdp}")
    if share.recompute:
        found.append("activation checkpointing")
    if task in INFERENCE and share.pp * share.tp > 1:
        found.append(f"split over {share.pp * share.tp} GPUs")
    if share.offload:
        where = {"generation": "asleep while others work"}.get(task, "weights wait in host memory")
        found.append("optimizer in host memory" if task in TRAINING else where)
    return found


def _searched(costs: GPUCosts, limits: Limits) -> Result:
    return Search(limits, costs, Effort(EFFORT)).run()


def _worth(found: Result, plainer: Result, steps: int) -> Result:
    """The result of the simpler search, unless `found` gains enough over it."""
    best, other = found.best, plainer.best
    assert best is not None
    if other is None or worth(best.seconds, other.seconds, steps):
        return found
    return replace(plainer, rejected=alternatives(found, other))


def _least_split(layouts: Sequence[Parallelism], ranks: int) -> tuple[Parallelism, ...]:
    """The layout on all ranks that splits the model least, and those on fewer ranks that do not split it."""
    whole = [layout for layout in layouts if world_size(layout) == ranks]
    parts = (layout for layout in layouts if world_size(layout) < ranks and layout.pp == layout.tp == 1)
    return (*sorted(whole, key=lambda layout: (layout.pp * layout.tp, layout.pp))[:1], *parts)


def _reason(job: PlannedJob, why: str | None, limits: Limits) -> str:
    if why is None and limits.dedicated == (True,):
        return (
            f"spec.plan.intraStageFusion is Dedicated, but the {job.trainers.gpus} trainer ranks cannot be "
            "divided between actor and critic; give the trainer groups more ranks, or change spec.plan.parallelism"
        )
    if why is None:
        return "no placement of the groups was found; set spec.plan.placement to Auto"
    for remedy, changed in _remedies(job, limits):
        if _searched(job.costs, changed).best is not None:
            return f"{why}; {remedy}"
    shared = any(g.colocated for g in job.spec.groups)
    more = "give generation a group of its own, or " if shared else ""
    return f"{why}; {more}use GPUs with more memory, more of them, or shorter sequences"


def _remedies(job: PlannedJob, limits: Limits) -> Iterator[tuple[str, Limits]]:
    """The changes that a user can make, as sentences and limits, the smallest first."""
    plan, ppo = job.spec.plan, job.spec.ppo
    fields = ["spec.ppo.actorOptimizer.offload"]
    fields += ["spec.ppo.criticOptimizer.offload"] if job.work.critic is not None else []
    if True not in limits.recompute:
        yield "set spec.plan.recompute to Auto", replace(limits, recompute=(False, True))
    if plan.zero3 == "Never":
        yield "set spec.plan.zero3 to Auto", replace(limits, fsdp=(3,))
    offload = f"set {' and '.join(fields)} to true"
    offloaded = replace(limits, offload=dict.fromkeys(TRAINING, (True,)))
    yield offload, offloaded
    if ppo.micro_batch_tokens is None and ppo.micro_batch_size > 1:
        yield "set spec.ppo.microBatchSize to 1", replace(limits, micro_batch=1)
        yield f"{offload} and spec.ppo.microBatchSize to 1", replace(offloaded, micro_batch=1)


def supervised(job: PlannedJob, model: str, by_layer: bool = False) -> list[Fitting]:
    """The layouts of a trained model on all ranks that divide each of its batches and fit in each stage that trains it,
    the fastest first. Those in which a stage before PPO needs ZeRO-3 come last. The list is empty if no layout divides
    the batches; the caller says why. `by_layer`: PPO uses ZeRO-3. Raises Infeasible if no layout fits."""
    fitting: list[tuple[float, Fitting]] = []
    failed: list[tuple[Training, str]] = []
    rules = [_smallest(job, rule) for rule in job.rules if rule.model == model]
    longest = max(longest_sample(job.spec, rule.stage) // sequences(rule.stage) for rule in rules)
    layers, degrees = job.shape(model).layers, degrees_of(job, model)
    for layout in allowed_layouts(job, model, job.trainers.gpus, layers, degrees, longest):
        seconds, recompute, gathering = 0.0, set[Stage](), set[Stage]()
        for rule in rules:
            ways = _ways(job, rule, layout, by_layer)
            held = {way: job.training(rule, way, job.trainers.gpu.training.dtype) for way in ways}
            fits = next((way for way in ways if worst(held[way]).device_bytes <= job.trainers.gpu.memory), None)
            if fits is None:
                least = min(held.values(), key=lambda training: worst(training).device_bytes)
                failed.append((least, _TASK[rule.stage, model]))
                break
            recompute |= {rule.stage} if fits.recompute else set()
            gathering |= {rule.stage} if fits.gathers else set()
            seconds += _step_seconds(job, rule, fits)
        else:
            fitting.append((seconds, Fitting(layout, frozenset(recompute), frozenset(gathering))))
    if failed and not fitting:
        least, task = min(failed, key=lambda f: worst(f[0]).device_bytes)
        never, pool = job.spec.plan.zero3 == "Never", job.trainers
        pinned = job.spec.plan.parallelism != "Auto" and _fits(job.pinned(parallelism="Auto"), model, by_layer)
        otherwise = "set spec.plan.parallelism to Auto" if pinned else ""
        raise Infeasible(str(problem(task, pool.name, least, pool.gpu.memory, never, otherwise)))
    return [fit for _, fit in sorted(fitting, key=lambda f: (bool(f[1].by_layer - {Stage.PPO}), f[0]))]


def _fits(job: PlannedJob, model: str, by_layer: bool) -> bool:
    with suppress(Infeasible):
        return bool(supervised(job, model, by_layer))
    return False


def _smallest(job: PlannedJob, rule: BatchRule) -> BatchRule:
    """The rule with the smallest micro-batch that the planner may choose. The search finds how many samples fit."""
    free = rule.stage is Stage.PPO and job.spec.ppo.micro_batch_tokens == "Auto"
    return rule._replace(tokens=longest_sample(job.spec, rule.stage)) if free else rule


def _ways(job: PlannedJob, rule: BatchRule, layout: Parallelism, by_layer: bool) -> list[Share]:
    """The ways to train a model in a stage, the fastest first."""
    plan = job.spec.plan
    # Other stages use ZeRO-3 only if they do not fit without it.
    free = plan.zero3 == "Auto" and rule.stage is not Stage.PPO
    return [
        job.share(rule, layout, recompute=recompute, by_layer=zero3)
        for zero3 in ((False, True) if free else (by_layer,))
        for recompute in RECOMPUTE[plan.recompute]
    ]


def _step_seconds(job: PlannedJob, rule: BatchRule, share: Share, reference: bool = False) -> float:
    """The seconds of an optimizer step on the longest sequences. `reference`: with a forward pass over them."""
    task, work = job.mini_batch(rule)
    costs = GPUCosts(work, Inventory((job.trainers,)))
    step = costs.step(task, share)
    # Passes hide all messages but those that fill and drain the pipeline.
    seconds = step.work + step.bubble + 2 * (step.stages - 1) * step.hop + step.fixed
    return seconds + (costs.inference(task, share) if reference else 0.0)


_TASK = {
    (Stage.SFT, "actor"): "sft",
    (Stage.REWARD, "reward"): "reward_training",
    (Stage.DPO, "actor"): "dpo",
    (Stage.PPO, "actor"): "actor_training",
    (Stage.PPO, "critic"): "critic_training",
}


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
    limits, tried = _limits(job), effort(inventory, expired)
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


def _limits(job: PlannedJob) -> Limits:
    batches: dict[Task, tuple[int, ...]] = {"actor_training": (), "critic_training": ()}
    for rule in job.rules:
        if rule.stage is not Stage.PPO:  # the reward model has the critic's layout, if there is a critic
            task: Task = "critic_training" if rule.model == "reward" and has_critic(job.spec) else "actor_training"
            batches[task] += (rule.batch // rule.micro,)
    return replace(pinned(job, Limits()), layouts=pinned_shares(job), batches=batches)


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
    layouts = {model: _plain(share).model_dump() for model, share in trained.items()}
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
