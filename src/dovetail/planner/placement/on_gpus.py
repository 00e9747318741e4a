"""Places a job on its own groups of GPUs, by the cost model of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from dovetail.manifest.checks.batching import BatchRule, batch_rules, longest_sample
from dovetail.manifest.sizes import trained_models, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner.candidate import TRAINING, Candidate, Placement, Share, Task
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.costs.memory import Training, problem, worst
from dovetail.planner.costs.steps import StepTimes
from dovetail.planner.hardware import GPU
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.placement.by_layer import may_gain, reached, taken
from dovetail.planner.placement.configs import rows, sequence_tokens, shapes, training_job
from dovetail.planner.placement.layouts import trainable_layouts
from dovetail.planner.placement.manifest import (
    RECOMPUTE,
    groups_inventory,
    groups_limits,
    with_parts,
    workload,
)
from dovetail.planner.placement.placed import Chosen, Infeasible, Placed, prediction, worth
from dovetail.planner.placement.search.limits import Limits
from dovetail.planner.placement.search.search import Effort, Result, Search, alternatives, search_fewest_stages
from dovetail.planner.shape import ModelShape
from dovetail.planner.simulate.hidden_training import hidden
from dovetail.planner.simulate.lanes import Lanes, Parts
from dovetail.planner.simulate.rollout import play_rollout
from dovetail.planner.workload import Lengths, Workload
from dovetail.protocol.plan import Layout
from dovetail.protocol.prediction import PredictedStage

# The search may estimate so many whole iterations. A manifest's groups leave few choices.
EFFORT = 600
# So many iterations have lengths that are drawn at random.
DRAWS = 4


@dataclass(frozen=True)
class Fitting:
    """A layout of a trained model that fits in each stage that trains it. `recompute`: the stages in which it fits only
    with activation checkpointing. `by_layer`: the stages in which it fits only with ZeRO-3, or has it as asked."""

    layout: Parallelism
    recompute: frozenset[Stage] = frozenset()
    by_layer: frozenset[Stage] = frozenset()


def place(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    measured: Mapping[str, GPU] | None = None,
    zero3: bool | None = None,
) -> Placed | None:
    """The fastest placement that fits, by the cost model of GPUs. None if the job's GPUs or models are not known, or if
    its groups have CPUs. `zero3`: whether PPO has ZeRO-3, if the manifest leaves that open. None: the planner chooses.
    Raises Infeasible, ConfigError or UnknownProduct."""
    known = shapes(spec, configs)
    inventory = groups_inventory(spec, measured)
    if known is None or inventory is None:
        return None
    job = _Job(spec, known, inventory)
    if spec.plan.zero3 != "Auto":
        return _place(job, spec.plan.zero3 == "Always")
    if zero3 is not None:
        return _place(job, True) if zero3 else _plain(job)
    plain, refused = None, None
    try:
        plain = _plain(job)
        if plain is None or plain.chosen is None or not may_gain(plain.chosen):
            return plain
    except Infeasible as error:
        refused = error
    try:
        found = _place(job, True, None if plain is None else reached(spec, known, plain))
    except Infeasible as error:
        if refused is not None:
            raise refused from error
        found = None
    return plain if found is None else taken(plain, "" if refused is None else str(refused), found)


@dataclass(frozen=True)
class _Job:
    """A manifest, its models and its GPUs."""

    spec: RLHFJobSpec
    known: Mapping[str, ModelShape]
    inventory: Inventory

    @cached_property
    def costs(self) -> GPUCosts:
        """The costs of PPO."""
        return GPUCosts(workload(self.spec, self.known), self.inventory, self.spec.generation.max_concurrent)


def _plain(job: _Job) -> Placed | None:
    """The fastest placement whose PPO has no ZeRO-3. Other stages have it only if nothing fits without it."""
    try:
        return _place(job, False)
    except Infeasible as error:
        if set(job.spec.stages) <= {Stage.PPO}:
            raise
        try:
            return _place(job, False, others=True)
        except Infeasible:
            raise error from None


def _place(job: _Job, by_layer: bool, than: float | None = None, others: bool | None = None) -> Placed | None:
    """The fastest placement with or without ZeRO-3. `by_layer`: PPO's models train under ZeRO-3. `others`: those of
    other stages do if they do not fit otherwise; None: as `by_layer`. `than`: the result is None unless its iterations
    gain enough over so many seconds."""
    spec, known, trainers = job.spec, job.known, job.inventory.pools[0]
    others = by_layer if others is None else others
    layouts = {
        model: supervised(spec, model, known[model], trainers, by_layer, others) for model in trained_models(spec)
    }
    if not all(layouts.values()):
        return None
    chosen = {model: fitting[0].layout for model, fitting in layouts.items()}
    if Stage.PPO not in spec.stages:
        again, gathering = (_stages_with(way, chosen, layouts) for way in ("recompute", "by_layer"))
        stages = _stages(spec, known, trainers, chosen, again, gathering)
        return Placed(chosen, recompute=again, by_layer=gathering, stages=stages)
    found = _iteration(job, layouts, by_layer, than)
    if found is None:
        return None
    shares = _trained(found.candidate)
    if found.candidate.schedule != "Dedicated":
        chosen |= {m: Parallelism(pp=share.pp, tp=share.tp, dp=share.dp) for m, (share, *_) in shares.items()}
    else:
        # The critic's layout on all ranks is not used, but it must have the actor's tp.
        actor = chosen["actor"]
        critics = [fitting.layout for fitting in layouts["critic"]]
        chosen["critic"] = min(critics, key=lambda layout: (layout != actor, layout.tp != actor.tp))
    if "reward" in chosen and chosen.get("critic") in [fitting.layout for fitting in layouts["reward"]]:
        chosen["reward"] = chosen["critic"]
    before, gathering = (
        frozenset(each for each in _stages_with(way, chosen, layouts) if each[0] is not Stage.PPO)
        for way in ("recompute", "by_layer")
    )
    return Placed(
        chosen,
        found.prediction,
        recompute=before | {(Stage.PPO, m) for m, s in shares.items() if s[0].recompute},
        by_layer=gathering | {(Stage.PPO, m) for m, s in shares.items() if s[0].gathers},
        apart=_apart(shares) if found.candidate.schedule == "Dedicated" else {},
        chosen=found,
        lanes=lambda: _lanes(found, spec.seed),
        hidden=lambda parts: _hidden(found, spec.seed, parts),
        stages=_stages(spec, known, trainers, chosen, before, gathering),
    )


def _stages(
    spec: RLHFJobSpec,
    known: Mapping[str, ModelShape],
    pool: Pool,
    chosen: Mapping[str, Parallelism],
    recomputed: frozenset[tuple[Stage, str]],
    gathered: frozenset[tuple[Stage, str]],
) -> tuple[PredictedStage, ...]:
    """The predicted times of DPO and of the stages before PPO, if all sequences have the longest possible length."""
    found = []
    for rule in batch_rules(spec):
        if rule.stage is Stage.PPO:
            continue
        job = training_job(
            spec,
            rule,
            known[rule.model],
            chosen[rule.model],
            pool.gpu.training.dtype,
            recompute=(rule.stage, rule.model) in recomputed,
            by_layer=(rule.stage, rule.model) in gathered,
        )
        costs, task, share = _alone(rule, job, pool, sequence_tokens(spec, rule.stage))
        seconds = _seconds(costs.step(task, share))
        if rule.stage is Stage.DPO:
            # The responses' log-probabilities under the reference are computed once, before the first step.
            seconds += costs.inference(task, share)
        steps = spec.supervised(rule.stage).steps
        found.append(PredictedStage(stage=rule.stage, steps=steps, step_seconds=seconds))
    return tuple(found)


def _lanes(found: Chosen, seed: int) -> Lanes:
    """Iterations whose lengths are drawn at random. Generation and scoring are simulated event by event, and scaled so
    that their means are those of the prediction. The time of training is in proportion to its tokens. With a lag the
    trainers recompute the old log-probabilities."""
    candidate, costs = replace(found.candidate, folded=True), found.costs
    work, rng = costs.work, np.random.default_rng(seed)
    mean, inference = costs.estimate(candidate).phases, costs.estimate(found.candidate).phases["inference"]
    _, rooms = costs.memory.of(candidate)
    draws = [(work.prompt.draw(work.batch, rng), work.response.draw(work.batch, rng)) for _ in range(DRAWS)]
    tokens = [float(prompts.sum() + lengths.sum()) for prompts, lengths in draws]
    played = [play_rollout(candidate, costs, rooms, prompts, lengths) for prompts, lengths in draws]
    generated, scored = [each.generated for each in played], [each.scored - each.generated for each in played]
    own = max(costs.inference("actor_training", share) for share in candidate.actor_training)
    hidden = 0.0
    if candidate.migration is not None:
        hidden = costs.estimate(replace(candidate, migration=None)).phases["inference"] - mean["inference"]
    synchronous, lagged = [], []
    for at, each in enumerate(played):
        made = {
            "transfer": mean["transfer"],
            "swap": mean["swap"],
            "generation": mean["generation"] * _relative(generated, at),
            "inference": mean["inference"] * _relative(scored, at),
        }
        training = mean["training"] * _relative(tokens, at)
        rest = (made["generation"] + made["inference"]) * (1 - each.busy(candidate.generation))
        alone = {**made, "inference": inference * _relative(scored, at)}
        synchronous.append(Parts(alone, {"training": training}, rest + alone["inference"] - made["inference"]))
        tail = made["generation"] * (1 - each.half / each.generated) if each.generated else 0.0
        # Scoring on free servers in the tail takes their time too.
        kept = min(1.0, each.kept + max(0.0, hidden) / tail) if tail else 0.0
        lagged.append(Parts(made, {"training": training + own}, rest, tail=tail, kept=kept))
    return Lanes(synchronous, lagged)


def _hidden(found: Chosen, seed: int, parts: int) -> float:
    """The mean seconds of training that are hidden if samples are learnt in `parts` parts, over DRAWS iterations whose
    lengths are drawn at random."""
    candidate, costs = replace(found.candidate, folded=True), found.costs
    work, rng = costs.work, np.random.default_rng(seed)
    training = costs.estimate(candidate).phases["training"]
    _, rooms = costs.memory.of(candidate)
    each, seconds = work.per_prompt, 0.0
    for _ in range(DRAWS):
        prompts = np.repeat(work.prompt.draw(work.batch // each, rng), each)
        lengths = work.response.draw(work.batch, rng)
        rolled = play_rollout(candidate, costs, rooms, prompts, lengths)
        totals = (prompts + lengths).tolist()
        seconds += hidden(rolled.ready, lengths.tolist(), totals, each, parts, training, rolled.scored)
    return seconds / DRAWS


def _relative(values: Sequence[float], at: int) -> float:
    """A value as a multiple of the mean of all."""
    mean = sum(values) / len(values)
    return values[at] / mean if mean else 1.0


def _apart(shares: Mapping[str, Sequence[Share]]) -> dict[str, Layout]:
    """The layouts of models that have trainer ranks of their own."""
    return {
        name: Layout(pp=share.pp, tp=share.tp, dp=share.dp, first=share.first) for name, (share, *_) in shares.items()
    }


def _trained(candidate: Candidate) -> dict[str, tuple[Share, ...]]:
    """The shares of the models that are trained."""
    found = {"actor": candidate.actor_training, "critic": candidate.critic_training}
    return {model: shares for model, shares in found.items() if shares}


def _stages_with(
    way: str, chosen: Mapping[str, Parallelism], layouts: Mapping[str, Sequence[Fitting]]
) -> frozenset[tuple[Stage, str]]:
    """The stages and models with a way to save memory, a field of Fitting."""
    fits = ((model, fit) for model, fitting in layouts.items() for fit in fitting if fit.layout == chosen[model])
    return frozenset((stage, model) for model, fit in fits for stage in getattr(fit, way))


def _iteration(
    job: _Job, layouts: Mapping[str, Sequence[Fitting]], by_layer: bool, than: float | None
) -> Chosen | None:
    spec, known, inventory, costs, work = job.spec, job.known, job.inventory, job.costs, job.costs.work
    limits = replace(groups_limits(spec, inventory, known), fsdp=(3,) if by_layer else (2,))
    tasks: dict[str, Task] = {"actor": "actor_training", "critic": "critic_training"}
    fitting = {tasks[m]: tuple(each.layout for each in fit) for m, fit in layouts.items() if m in tasks}
    if than is not None and False in limits.apart:
        limits = replace(limits, apart=(False,))  # parts would only be slower: what needs them lacks memory
    limits = with_parts(spec, replace(limits, layouts=fitting), inventory, known)
    most = max(limits.servers[pool] for pool in limits.rollouts or ())
    result, limits = search_fewest_stages(limits, most, partial(_searched, costs))
    if result.best is None:
        # The reason is that of the simplest placement.
        why = min(result.rejected, key=lambda r: len(r.candidate.note)).problem if result.rejected else None
        raise Infeasible(_reason(spec, why, limits, costs))
    if than is not None and not worth(result.best.seconds, than, work.steps):
        return None
    if result.best.candidate.schedule == "Dedicated" and False in limits.apart:
        limits = replace(limits, apart=(False,))
        result = _worth(result, _searched(costs, limits), work)
    plain = replace(
        limits,
        layouts={task: _least_split(layouts, inventory.pools[0].gpus) for task, layouts in limits.layouts.items()},
        apart=limits.apart[:1],
        placements=tuple(p for p in limits.placements if p is not Placement.INTERLEAVING) or limits.placements,
        serving_pp=1,
    )
    result = _worth(result, _searched(costs, plain), work)
    assert result.best is not None
    if than is not None and not worth(result.best.seconds, than, work.steps):
        return None
    return Chosen(result.best.candidate, costs, prediction(result, costs))


def _searched(costs: GPUCosts, limits: Limits) -> Result:
    return Search(limits, costs, Effort(EFFORT)).run()


def _worth(found: Result, plainer: Result, work: Workload) -> Result:
    """The result of the simpler search, unless `found` gains enough over it."""
    best, other = found.best, plainer.best
    assert best is not None
    if other is None or worth(best.seconds, other.seconds, work.steps):
        return found
    return replace(plainer, rejected=alternatives(found, other))


def _least_split(layouts: Sequence[Parallelism], ranks: int) -> tuple[Parallelism, ...]:
    """Among the layouts on all ranks, the one that splits the model least. Among those on fewer ranks, the ones that do
    not split it."""
    whole = [layout for layout in layouts if world_size(layout) == ranks]
    parts = (layout for layout in layouts if world_size(layout) < ranks and layout.pp == layout.tp == 1)
    return (*sorted(whole, key=lambda layout: (layout.pp * layout.tp, layout.pp))[:1], *parts)


def _reason(spec: RLHFJobSpec, why: str | None, limits: Limits, costs: GPUCosts) -> str:
    if why is None and limits.apart == (True,):
        return (
            f"spec.plan.intraStageFusion is Dedicated, but the {costs.inventory.pools[0].gpus} trainer ranks cannot be "
            "divided between actor and critic; give the trainer groups more ranks, or change spec.plan.parallelism"
        )
    if why is None:
        return "no placement of the groups was found; set spec.plan.placement to Auto"
    for remedy, changed in _remedies(spec, costs.work, limits):
        if _searched(costs, changed).best is not None:
            return f"{why}; {remedy}"
    shared = any({Role.TRAINER, Role.ROLLOUT} <= set(g.roles) for g in spec.groups)
    more = "give generation a group of its own, or " if shared else ""
    return f"{why}; {more}use GPUs with more memory, more of them, or shorter sequences"


def _remedies(spec: RLHFJobSpec, work: Workload, limits: Limits) -> Iterator[tuple[str, Limits]]:
    """The changes that a user can make, as sentences and limits, the smallest first."""
    fields = ["spec.ppo.actorOptimizer.offload"]
    fields += ["spec.ppo.criticOptimizer.offload"] if work.critic is not None else []
    if True not in limits.recompute:
        yield "set spec.plan.recompute to Auto", replace(limits, recompute=(False, True))
    if spec.plan.zero3 == "Never":
        yield "set spec.plan.zero3 to Auto", replace(limits, fsdp=(3,))
    offload = f"set {' and '.join(fields)} to true"
    offloaded = replace(limits, offload=dict.fromkeys(TRAINING, (True,)))
    yield offload, offloaded
    if spec.ppo.micro_batch_tokens is None and spec.ppo.micro_batch_size > 1:
        yield "set spec.ppo.microBatchSize to 1", replace(limits, micro_batch=1)
        yield f"{offload} and spec.ppo.microBatchSize to 1", replace(offloaded, micro_batch=1)


def supervised(
    spec: RLHFJobSpec, model: str, shape: ModelShape, pool: Pool, by_layer: bool = False, others: bool = False
) -> list[Fitting]:
    """The layouts of a trained model on all ranks that divide each of its batches and fit in each stage that trains it,
    the fastest first. The list is empty if no layout divides the batches; the caller says why. `by_layer`: PPO uses
    ZeRO-3. `others`: other stages may use it. Raises Infeasible if no layout fits."""
    layouts = trainable_layouts(spec, model, pool, shape)
    found = [_fitting(spec, model, layout, shape, pool, by_layer, others) for layout in layouts]
    fitting = [(seconds, fit) for seconds, fit, _ in found if fit is not None]
    if found and not fitting:
        least, task = min((f for _, _, f in found if f is not None), key=lambda f: worst(f[0]).device_bytes)
        raise Infeasible(str(problem(task, pool.name, least, pool.gpu.memory, spec.plan.zero3 == "Never")))
    return [fit for _, fit in sorted(fitting, key=lambda f: f[0])]


def _fitting(
    spec: RLHFJobSpec, model: str, layout: Parallelism, shape: ModelShape, pool: Pool, by_layer: bool, others: bool
) -> tuple[float, Fitting | None, tuple[Training, str] | None]:
    """The seconds of one step in each stage together, each in the fastest way that fits, and the layout. If the layout
    does not fit in a stage, it is that stage's training and task instead."""
    dtype = pool.gpu.training.dtype
    seconds, checkpointed, gathering = 0.0, set(), set()
    for rule in (rule for rule in batch_rules(spec) if rule.model == model):
        if rule.stage is Stage.PPO and spec.ppo.micro_batch_tokens == "Auto":
            # The search finds how many samples fit. At least one must fit.
            rule = rule._replace(tokens=longest_sample(spec, rule.stage))
        # Other stages use ZeRO-3 only if they do not fit without it.
        free = others and spec.plan.zero3 == "Auto" and rule.stage is not Stage.PPO
        jobs = [
            training_job(spec, rule, shape, layout, dtype, by_layer=z) for z in ((False, True) if free else (by_layer,))
        ]
        ways = [replace(job, recompute=way) for job in jobs for way in RECOMPUTE[spec.plan.recompute]]
        fits = next((way for way in ways if worst(way).device_bytes <= pool.gpu.memory), None)
        if fits is None:
            return 0.0, None, (min(ways, key=lambda way: worst(way).device_bytes), _TASK[rule.stage, model])
        checkpointed |= {rule.stage} if fits.recompute else set()
        gathering |= {rule.stage} if fits.fsdp == 3 else set()
        seconds += _step_seconds(rule, fits, pool, sequence_tokens(spec, rule.stage))
    return seconds, Fitting(layout, frozenset(checkpointed), frozenset(gathering)), None


def _step_seconds(rule: BatchRule, job: Training, pool: Pool, tokens: int) -> float:
    """The seconds of an optimizer step on a mini-batch of sequences of `tokens` tokens each."""
    costs, task, share = _alone(rule, job, pool, tokens)
    return _seconds(costs.step(task, share))


def _seconds(step: StepTimes) -> float:
    # Passes hide all messages but those that fill and drain the pipeline.
    return step.work + step.bubble + 2 * (step.stages - 1) * step.hop + step.fixed


def _alone(rule: BatchRule, job: Training, pool: Pool, tokens: int) -> tuple[GPUCosts, Task, Share]:
    """The costs of training on a mini-batch of sequences of `tokens` tokens each, the task, and its share, which has
    all GPUs."""
    task: Task = "critic_training" if job.head == "value" else "actor_training"
    batch, lengths = rule.batch * rows(rule), Lengths.fixed(1)
    work = Workload(
        actor=job.shape,
        reference=job.shape,
        reward=None,
        critic=job.shape,
        batch=batch,
        mini_batch=batch,
        epochs=1,
        prompt=lengths,
        response=Lengths.fixed(tokens - 1),
        actor_lora=job.lora,
        critic_lora=job.lora,
        value_head=job.head == "lm+value",
        micro_batch_tokens=rule.tokens,
    )
    layout = job.layout
    micro = 1 if rule.tokens is not None else rule.micro * rows(rule)
    share = Share(pool.name, 0, layout.pp, layout.tp, layout.dp, micro, job.fsdp, job.recompute, job.offload)
    return GPUCosts(work, Inventory((pool,))), task, share


_TASK = {
    (Stage.SFT, "actor"): "sft",
    (Stage.REWARD, "reward"): "reward_training",
    (Stage.DPO, "actor"): "dpo",
    (Stage.PPO, "actor"): "actor_training",
    (Stage.PPO, "critic"): "critic_training",
}
