"""The job that is planned, what its manifest allows (layouts, schedules, stages a rank), and the form of a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import GPU, UnknownProduct, gpu
from dovetail.manifest.accelerators import sleeps
from dovetail.manifest.checks.batching import BatchRule, batch_rules, longest_sample, micro_batch_tokens, pinned_layouts
from dovetail.manifest.critic import has_critic, shares_body
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_shape import Head, ModelShape, ShapeError
from dovetail.manifest.resolve import old_is_current
from dovetail.manifest.sizes import owner, pod_count, trained_models, trainer_world, world_size
from dovetail.manifest.types import Dtype, Group, ModelSource, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner import candidate, lives
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Placement, Schedule, Share, Task
from dovetail.planner.inventory import NETWORK_GBPS, Inventory, Pool
from dovetail.planner.lags import DrawnIterations
from dovetail.planner.memory import GIB, Training, training_job, training_memory
from dovetail.planner.search import MIGRATIONS, Limits, Result, every_layout, part_sizes, tensor_degrees
from dovetail.planner.seconds import Estimate, GPUCosts
from dovetail.planner.workload import Workload
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Layout, divisions
from dovetail.protocol.prediction import Alternative, PredictedMemory, PredictedStage, PredictedTask, Prediction


class ConfigError(ValueError):
    """A model configuration cannot be read. The message is one sentence that names the field."""


@dataclass(frozen=True)
class PlannedJob:
    """The arguments of `make_plan` for a job whose lag is known. What follows from them is computed once."""

    spec: RLHFJobSpec
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, GPU] | None = None
    profile: Profile | None = None
    zero3: bool | None = None

    def pinned(self, **plan: Any) -> PlannedJob:
        """The same job with other values of spec.plan."""
        return replace(self, spec=self.spec.model_copy(update={"plan": self.spec.plan.model_copy(update=plan)}))

    # ------------------------------------------------------------ models

    @cached_property
    def rules(self) -> list[BatchRule]:
        """The batches of the trained models, by stage."""
        return batch_rules(self.spec)

    @cached_property
    def shapes(self) -> dict[str, ModelShape] | None:
        """The shapes of the job's models. None if the configuration of one is not known. Raises ConfigError."""
        spec, found = self.spec, {}
        for model in ("actor", "reference", "reward", "critic"):
            if not needed(spec, model):
                continue
            if (config := self.config(model)) is None:
                return None
            try:
                found[model] = ModelShape.of(config)
            except ShapeError as error:
                raise ConfigError(f"spec.models.{owner(spec, model)}.source: {error}") from error
        return found

    def config(self, model: str) -> Mapping[str, Any] | None:
        """The configuration of the model that `model` starts from. None if it is not known."""
        if (name := owner(self.spec, model)) is None:
            return None
        return _scratch(self.spec, getattr(self.spec.models, name).source) or self.configs.get(name)

    def shape(self, model: str) -> ModelShape:
        """The shape of one model. The shapes must be known."""
        assert self.shapes is not None
        return self.shapes[model]

    @cached_property
    def work(self) -> Workload:
        """The work of one PPO iteration. Lengths are not measured yet, so prompts are half as long as they may be, and
        responses have a long tail. The shapes must be known."""
        spec, longest = self.spec, self.spec.data.max_prompt_tokens
        tokens = spec.ppo.micro_batch_tokens
        limit = spec.plan.activation_memory
        return Workload(
            actor=self.shape("actor"),
            reference=self.shape("reference") if spec.ppo.reads_reference else None,
            reward=None if spec.models.reward.calls else self.shape("reward"),
            critic=self.shape("critic") if has_critic(spec) else None,
            batch=spec.ppo.global_batch_size,
            mini_batch=spec.ppo.mini_batch_size,
            epochs=spec.ppo.epochs,
            prompt=Lengths(max(1.0, longest / 2), 0.0, longest),
            response=Lengths.long_tailed(spec.generation.max_tokens),
            actor_lora=spec.models.actor.lora,
            critic_lora=spec.models.critic.lora or spec.models.reward.lora,
            ema=spec.ppo.ema is not None,
            kept_versions=spec.ppo.kept_versions,
            value_head=shares_body(spec),
            per_prompt=spec.ppo.samples_per_prompt,
            # If the planner may choose the tokens, a share's `micro_batch` counts longest samples.
            micro_batch_tokens=longest_sample(spec, Stage.PPO) if tokens == "Auto" else tokens,
            chunks=spec.plan.chunks,
            activation_limit=None if limit is None else limit * GIB,
        )

    # ------------------------------------------------------------ GPUs

    @property
    def trains_on_gpus(self) -> bool:
        return any(Role.TRAINER in group.roles and not group.on_cpu for group in self.spec.groups)

    @cached_property
    def inventory(self) -> Inventory | None:
        """An inventory with a pool for each group, with the pods that the group starts with. The trainer groups are one
        pool with the slowest of their GPUs, because their ranks work in step. It is the first pool. None if a group has
        no GPUs. Raises UnknownProduct."""
        groups = self.spec.groups
        if any(group.on_cpu for group in groups):
            return None
        trainers = [g for g in groups if Role.TRAINER in g.roles]
        pools = [self._pool(g) for g in groups if Role.TRAINER not in g.roles]
        mine = [self._pool(g) for g in trainers]
        slowest = min((p.gpu for p in mine), key=lambda g: (g.training.flops[g.training.dtype], g.memory))
        least = replace(slowest, memory=min(p.gpu.memory for p in mine))
        per_node = min(p.per_node for p in mine)
        count = sum(p.gpus for p in mine)
        joined = Pool("+".join(g.name for g in trainers), least, count // per_node, per_node, mine[0].network)
        return Inventory((joined, *pools))

    def _pool(self, group: Group) -> Pool:
        product = gpu(str(group.gpu.product), self.measured)
        return Pool(group.name, product, pod_count(group), group.gpu.per_pod, NETWORK_GBPS * 1e9 / 8)

    @property
    def trainers(self) -> Pool:
        """The pool of the trainers. All groups must have GPUs."""
        assert self.inventory is not None
        return self.inventory.pools[0]

    @cached_property
    def costs(self) -> GPUCosts:
        """The costs of a PPO iteration on these GPUs. All groups must have GPUs."""
        assert self.inventory is not None
        return GPUCosts(self.work, self.inventory, self.spec.generation.max_concurrent)

    # ------------------------------------------------------------ training

    def pipelines(self, stage: Stage, layouts: Mapping[str, Parallelism], model: str) -> int:
        """The number of pipelines of a model that are side by side in a stage of the job. It is more than 1 only in
        PPO, if actor and critic have different numbers of stages on the same ranks. `layouts`: by model."""
        other = layouts.get({"actor": "critic", "critic": "actor"}.get(model, ""))
        if stage is not Stage.PPO or other is None or self.spec.ppo.micro_batch_tokens is not None:
            return 1
        mine = layouts[model]
        if getattr(mine, "first", 0) or getattr(other, "first", 0):
            return 1  # each has ranks of its own
        return candidate.pipelines(mine.pp, other.pp, mine.dp)

    def share(
        self,
        rule: BatchRule,
        layout: Parallelism,
        *,
        recompute: bool = False,
        by_layer: bool = False,
        pipelines: int = 1,
    ) -> Share:
        """The training of `rule`'s model in `rule`'s stage of the job, on the trainers' ranks. `by_layer`: it runs
        under ZeRO-3. `pipelines`: see the method of that name."""
        return Share(
            "" if self.inventory is None else self.trainers.name,
            pp=layout.pp,
            tp=layout.tp,
            dp=layout.dp,
            micro_batch=1 if rule.tokens is not None else rule.micro * sequences(rule.stage),
            fsdp=3 if by_layer else 2,
            recompute=recompute,
            offload=self._offload(rule),
            pipelines=pipelines,
        )

    def mini_batch(self, rule: BatchRule, chunks: int | None = None) -> tuple[Task, Workload]:
        """The task and the work of one mini-batch of `rule`, with samples of the longest length. `chunks`: the stages
        of the model on a rank. By default the manifest decides."""
        spec, ppo, shape = self.spec, rule.stage is Stage.PPO, self.shape(rule.model)
        lora, head = getattr(spec.models, rule.model).lora, self._head(rule.model)
        longest = longest_sample(spec, rule.stage) // sequences(rule.stage)
        outputs = spec.generation.max_tokens if ppo else longest
        work = Workload(
            actor=shape,
            reference=shape,
            reward=None,
            critic=shape,
            batch=rule.batch * sequences(rule.stage),
            mini_batch=rule.batch * sequences(rule.stage),
            epochs=1,
            prompt=Lengths.fixed(longest - outputs),
            response=Lengths.fixed(outputs),
            actor_lora=lora,
            critic_lora=lora,
            ema=ppo and spec.ppo.ema is not None,
            value_head=head == "lm+value",
            kept_versions=spec.ppo.kept_versions if ppo else 0,
            micro_batch_tokens=rule.tokens,
            chunks=(chunks or spec.plan.chunks) if ppo or rule.tokens is None else 1,
        )
        return "critic_training" if head == "value" else "actor_training", work

    def training(
        self, rule: BatchRule, share: Share, dtype: Dtype, stage: int = 0, chunks: int | None = None
    ) -> Training:
        """What pipeline stage `stage` of a share holds under 1F1B. `dtype`: the dtype if the manifest says Auto.
        `chunks`: see `mini_batch`."""
        task, work = self.mini_batch(rule, chunks)
        given = getattr(self.spec.models, rule.model).dtype
        job = training_job(work, task, share, dtype if given is Dtype.AUTO else given, stage)
        return replace(job, gpu=self.trains_on_gpus)

    def _head(self, model: str) -> Head:
        if model != "actor":
            return "value"
        return "lm+value" if shares_body(self.spec) else "lm"

    def _offload(self, rule: BatchRule) -> bool:
        if rule.stage is not Stage.PPO:
            return self.spec.supervised(rule.stage).optimizer.offload
        ppo = self.spec.ppo
        return (ppo.actor_optimizer if rule.model == "actor" else ppo.critic_optimizer).offload


def sequences(stage: Stage) -> int:
    """The sequences of one sample. A preference has two."""
    return 2 if stage.has_pairs else 1


def needed(spec: RLHFJobSpec, model: str) -> bool:
    """Whether the job runs the model."""
    ppo = Stage.PPO in spec.stages
    if model == "reward":
        return Stage.REWARD in spec.stages or (ppo and not spec.models.reward.calls)
    wanted = {"actor": True, "reference": ppo and spec.ppo.reads_reference, "critic": ppo and has_critic(spec)}
    return wanted[model]


def _scratch(spec: RLHFJobSpec, source: ModelSource) -> dict[str, Any] | None:
    """The configuration of a model from scratch. None for other models."""
    if source.scratch is None:
        return None
    made = source.scratch
    trained = spec.models.tokenizer.train
    vocabulary = {} if trained is None else {"vocab_size": trained.vocab_size}
    return {**MODEL_FAMILIES[made.architecture].defaults, **made.config, **vocabulary, "model_type": made.architecture}


# Splitting a model or interleaving must gain this factor over doing neither, because the cost model is not exact.
WORTH = 1.05
# The part of an optimizer step that the cost model does not count, such as launches and Python.
UNCOUNTED_SECONDS = 0.01
ALTERNATIVES = 12


class Infeasible(ValueError):
    """No layout of the job's groups can run it. The message is one sentence: what failed, and what would help."""


@dataclass(frozen=True)
class Chosen:
    """The placement of a PPO iteration on GPUs, with the costs that estimated it and the prediction."""

    candidate: Candidate
    costs: GPUCosts
    prediction: Prediction


@dataclass(frozen=True)
class Placed:
    """The placement of a job. `layouts`: the layout of each trained model on all ranks. `dedicated`: the layouts of
    actor and critic in PPO, if each has its own trainer ranks. `recompute`: the stages and models with activation
    checkpointing. `by_layer`: those to which the placement gives ZeRO-3. `prediction`: that of a PPO iteration, or None
    if nothing is predicted. `chosen`: the candidate and costs behind the prediction, on GPUs.

    `draw()`: iterations with other lengths, for a job whose trainers and rollouts share no GPUs. `stages`: the
    predictions of DPO and of the stages before PPO, on GPUs. `warnings`: one sentence each."""

    layouts: Mapping[str, Parallelism]
    prediction: Prediction | None = None
    recompute: frozenset[tuple[Stage, str]] = frozenset()
    by_layer: frozenset[tuple[Stage, str]] = frozenset()
    dedicated: Mapping[str, Layout] = field(default_factory=dict)
    chosen: Chosen | None = None
    draw: Callable[[], DrawnIterations] | None = None
    stages: tuple[PredictedStage, ...] = ()
    warnings: tuple[str, ...] = ()

    def layouts_in(self, stage: Stage) -> Mapping[str, Parallelism]:
        """The layouts of the models in a stage."""
        return {**self.layouts, **self.dedicated} if stage is Stage.PPO else self.layouts

    @property
    def interleaved(self) -> bool:
        """Whether reference and reward run on halves of the rollouts."""
        return self.prediction is not None and self.prediction.placement == "Interleaving"


def worth(best: float, other: float, steps: int) -> bool:
    """Whether an iteration of `best` seconds gains more over one of `other` seconds than the cost model's error.
    `steps`: the optimizer steps of an iteration."""
    return other > WORTH * best + UNCOUNTED_SECONDS * steps


# ------------------------------------------------------------ on GPUs


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
    return PredictedTask(
        task=task,
        group=share.pool,
        first=share.first,
        gpus=share.gpus,
        pp=share.pp,
        tp=share.tp,
        dp=share.dp,
        micro_batch=share.micro_batch,
        seconds=costs.option(task, share).seconds,
        details=list(_details(task, share)),
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


TRAINING_TASKS: dict[str, Task] = {"actor": "actor_training", "critic": "critic_training"}


def pinned_shares(spec: RLHFJobSpec) -> dict[Task, tuple[Parallelism, ...]]:
    """The layouts that spec.plan.parallelism allows for actor and critic training. Empty if it allows all."""
    pins = pinned_layouts(spec)
    if pins is None:
        return {}
    whole = {model: pins[model][1] for model in TRAINING_TASKS}
    if spec.plan.intra_stage_fusion != "Dedicated" or not has_critic(spec):
        return {task: (whole[model],) for model, task in TRAINING_TASKS.items()}
    parts = divisions(whole, spec.ppo.mini_batch_size // spec.ppo.micro_batch_size)
    return {
        task: tuple(Parallelism(pp=part[model].pp, tp=part[model].tp, dp=part[model].dp) for part in parts)
        for model, task in TRAINING_TASKS.items()
    }


def trainable_layouts(job: PlannedJob, model: str) -> list[Parallelism]:
    """The `allowed_layouts` of a model on all GPUs of the trainers."""
    return allowed_layouts(job, model, job.trainers.gpus, job.shape(model).layers, degrees_of(job, model))


def degrees_of(job: PlannedJob, model: str) -> list[int]:
    """The tensor-parallel degrees of a trained model on the trainers' nodes."""
    return tensor_degrees(job.shape(model), job.trainers.per_node, getattr(job.spec.models, model).lora)


def most_stages(job: PlannedJob, layers: int) -> int:
    """The most pipeline ranks of a model with `layers` layers."""
    return max(1, layers // job.spec.plan.chunks)


def allowed_layouts(
    job: PlannedJob, model: str, ranks: int, layers: int | None, degrees: Sequence[int] = (1,)
) -> list[Parallelism]:
    """The layouts over `ranks` ranks that share every batch of the model in every stage evenly. If a layout is pinned,
    only that one is allowed. `layers`: the model's layers, or None if they are not known. `degrees`: the allowed tp."""
    rules = [rule for rule in job.rules if rule.model == model]
    pins = pinned_layouts(job.spec)
    return [
        layout
        for layout in every_layout(ranks, degrees, ranks if layers is None else most_stages(job, layers))
        if all(rule.problem(layout.dp) is None for rule in rules) and (pins is None or pins[model][1] == layout)
    ]


def place_evenly(job: PlannedJob) -> Placed:
    """The layouts of the trained models of a job whose GPUs or models are not known: with as many data-parallel ranks
    as its batch sizes allow, or as pinned. A model has pipeline stages only if not all ranks can share its batches.

    Raises Infeasible or ConfigError."""
    pins = pinned_layouts(job.spec)
    if pins is not None:
        return Placed({model: _checked(job, model, *pins[model]) for model in trained_models(job.spec)})
    layouts = {model: _widest(job, model) for model in trained_models(job.spec)}
    warnings = tuple(
        f"the {model} is split into {layout.pp} pipeline stages because its batches cannot be shared evenly by "
        f"more than {layout.dp} data-parallel rank{'s' if layout.dp > 1 else ''}"
        for model, layout in layouts.items()
        if layout.pp > 1
    )
    return Placed(layouts, warnings=warnings)


def _widest(job: PlannedJob, model: str) -> Parallelism:
    """The layout with the most data-parallel ranks."""
    world = trainer_world(job.spec)
    if allowed := allowed_layouts(job, model, world, job.layers.get(model)):
        return allowed[0]
    why = next((p for rule in job.rules if rule.model == model and (p := rule.problem(world))), None)
    raise Infeasible(why or f"the {model} cannot be laid out on {world} trainer ranks; change the groups' replicas")


def _checked(job: PlannedJob, model: str, field: str, layout: Parallelism) -> Parallelism:
    """A pinned layout, which `field` names."""
    spec, world, layers = job.spec, trainer_world(job.spec), job.layers.get(model)
    if world_size(layout) != world:
        raise Infeasible(
            f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the trainer "
            f"groups have {world}; make the product {world}"
        )
    if layers is not None and layout.pp > layers:
        raise Infeasible(f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it")
    if why := next((p for rule in job.rules if rule.model == model and (p := rule.problem(layout.dp))), None):
        raise Infeasible(why)
    if layers is not None and layout.pp > 1 and layers < layout.pp * spec.plan.chunks:
        raise Infeasible(
            f"{field}.pp is {layout.pp}, and spec.plan.intraStageFusion VShaped puts two stages of a model on each "
            f"rank, but the {model} has only {layers} layers; lower pp, or set spec.plan.intraStageFusion to Auto"
        )
    if job.shapes is not None and (why := job.shape(model).split_problem(layout.tp, model)):
        raise Infeasible(f"{field}.tp is {layout.tp}, {why}")
    return layout


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


# The numbers of stages that are tried: a V, and two of them.
SEVERAL = (2, 4)


def fitting(chosen: Chosen) -> Literal["Auto", "TimeSharing", "Serial"]:
    """The schedules that fit if a placement on GPUs was chosen and the manifest leaves the schedule open. Those that
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
    spec = job.spec
    if schedule != "Auto":
        return spec.plan.chunks if schedule == "VShaped" else 1
    trained = [model for model in ("actor", "critic") if model in placed.layouts]
    whole = any(stage is Stage.PPO for stage, _ in placed.recompute | placed.by_layer)
    several = SEVERAL[:1] if len(trained) == 1 or whole else SEVERAL
    stages = _even(job, {model: placed.layouts[model] for model in trained}, several)
    if not job.trains_on_gpus:
        return max(stages, default=1)
    return max((c for c in stages if placed.chosen is not None and held(placed.chosen, c).fits), default=1)


def chunks_alone(job: PlannedJob, placed: Placed, rule: BatchRule) -> int:
    """The most stages of a model on a rank in a stage before PPO, or in DPO. It is what the manifest pins, or what the
    job permits. On GPUs it is 1 unless it is pinned: these stages are short, and memory is known with one stage."""
    layout, pin = placed.layouts_in(rule.stage)[rule.model], job.spec.plan.intra_stage_fusion
    if layout.pp == 1 or rule.tokens is not None or pin == "Serial":
        return 1
    if pin == "VShaped":
        layers = job.shape(rule.model).layers if job.shapes is not None else job.layers.get(rule.model)
        return job.spec.plan.chunks if layers is None or layers >= layout.pp * job.spec.plan.chunks else 1
    return 1 if job.trains_on_gpus else max(_even(job, {rule.model: layout}, SEVERAL[:1]), default=1)


def _even(job: PlannedJob, layouts: Mapping[str, Parallelism], several: Sequence[int]) -> list[int]:
    """Which of `several` numbers of stages on a rank divide the layers of all models evenly. The list is empty if the
    models have unlike pipelines or no pipeline, or if adapters have dropout."""
    spec, known, first = job.spec, job.shapes, next(iter(layouts.values()))
    adapters = [getattr(spec.models, model).lora for model in layouts]
    dropout = any(each is not None and each.dropout for each in adapters)
    if any(each != first for each in layouts.values()) or first.pp == 1 or dropout:
        return []
    counts = [known[m].layers if known is not None else job.layers.get(m) for m in layouts]
    return [c for c in several if all(n is not None and n % (first.pp * c) == 0 for n in counts)]


def held(chosen: Chosen, chunks: int) -> Estimate:
    """The estimate of a placement on GPUs if each rank holds `chunks` stages."""
    return _costs(chosen, chunks).estimate(replace(chosen.candidate, schedule="VShaped"))


def server_memory(chosen: Chosen, chunks: int) -> dict[str, float]:
    """The fraction of a GPU's memory for the servers of each group that leaves some to others. The others are trainers
    that keep their state there, and scorers that stay beside a server that is awake. It holds for every number of
    stages on a rank up to `chunks`, because the schedules choose that number."""
    candidate = chosen.candidate
    parts = chosen.costs.memory.server_memory(candidate)
    for count in (c for c in SEVERAL if c <= chunks):
        several = _costs(chosen, count).memory.server_memory(replace(candidate, schedule="VShaped"))
        parts = {share: min(part, several[share]) for share, part in parts.items()}
    training = {share.pool for share in candidate.trained}
    scored = [share for task in INFERENCE for share in candidate.shares(task)]
    found: dict[str, float] = {}
    for share, part in parts.items():
        beside = not share.offload and any(share.overlaps(other) for other in scored)
        if share.pool in training or beside:
            found |= dict.fromkeys(share.pool.split("+"), math.floor(100 * part) / 100)
    return found


def _costs(chosen: Chosen, chunks: int) -> GPUCosts:
    costs = chosen.costs
    return GPUCosts(replace(costs.work, chunks=chunks), costs.inventory, costs.max_samples)


def activation_bytes(job: PlannedJob, placed: Placed, chunks: int | None = None) -> dict[str, list[int]]:
    """The bytes that autograd keeps of one micro-batch of the longest sequences, by trained model and by pipeline rank.
    The result is empty if a model's configuration is not known.

    `placed`: the layouts, and the models with activation checkpointing. `chunks`: the number of stages of each rank. If
    it is given, the result is by stage. Raises ConfigError."""
    layouts = placed.layouts_in(Stage.PPO)
    rules = [rule for rule in job.rules if rule.stage is Stage.PPO]
    if job.shapes is None or any(job.shape(rule.model).layers < layouts[rule.model].pp for rule in rules):
        return {}
    dtype = Dtype.BFLOAT16 if job.trains_on_gpus else Dtype.FLOAT32
    found = {}
    for rule in rules:
        share = job.share(rule, layouts[rule.model], recompute=(Stage.PPO, rule.model) in placed.recompute)
        training = job.training(rule, share, dtype)
        if chunks is not None:
            # A stage keeps the same, whether its rank has other stages or not.
            stages = training.layout.model_copy(update={"pp": training.layout.pp * chunks})
            training = replace(training, layout=stages, chunks=1)
        training = replace(training, in_flight=1)
        memory = (training_memory(training, stage) for stage in range(training.layout.pp))
        found[rule.model] = [round(part.device["activations"]) for part in memory]
    return found


def check_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> None:
    """Raises Infeasible if spec.plan.activationMemory is below the largest micro-batch on a stage. Even a schedule with
    one micro-batch at a time needs that much. `sizes`: as `activation_bytes` gives them."""
    limit = spec.plan.activation_memory
    if limit is None or not sizes:
        return
    least, model, stage = max((size, m, stage) for m, each in sizes.items() for stage, size in enumerate(each))
    if limit * GIB < least:
        tokens = spec.data.max_prompt_tokens + spec.generation.max_tokens
        never = "set spec.plan.recompute to Auto, " if spec.plan.recompute == "Never" else ""
        what, field = f"{spec.ppo.micro_batch_size} sequences of {tokens} tokens hold", "microBatchSize"
        if (most := micro_batch_tokens(spec, Stage.PPO)) is not None:
            what, field = f"a micro-batch of {most} tokens holds", "microBatchTokens"
        raise Infeasible(
            f"spec.plan.activationMemory is {limit:g} GiB, but {what} {_up(least / GIB)} GiB on stage {stage} of the "
            f"{model}, the least that any schedule needs; {never}raise it, or lower spec.ppo.{field}"
        )


def beyond_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> set[str]:
    """The models whose micro-batch needs more than spec.plan.activationMemory."""
    limit = spec.plan.activation_memory
    return set() if limit is None else {model for model, each in sizes.items() if max(each) > limit * GIB}


def _up(value: float) -> str:
    """The value with three digits, rounded up."""
    shown = f"{value:.3g}"
    return shown if float(shown) >= value else f"{value * 1.005:.3g}"
