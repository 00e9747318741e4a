"""The job that is planned, the layouts and the stages a rank that its manifest allows, and the form of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import GPU, gpu
from dovetail.gpus.inventory import NETWORK_GBPS, Inventory, Pool
from dovetail.manifest.checks.batching import BatchRule, batch_rules, longest_sample, pinned_layouts
from dovetail.manifest.model_families.support import family_of
from dovetail.manifest.model_shape import Head, ModelShape, ShapeError
from dovetail.manifest.sizes import has_critic, owner, pod_count, shares_body, trained_models, trainer_world
from dovetail.manifest.types import Dtype, Group, ModelSource, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner import candidate
from dovetail.planner.candidate import Candidate, Share, Task
from dovetail.planner.lags import DrawnIterations
from dovetail.planner.memory import GIB, Training, training_job
from dovetail.planner.search import context_degrees, every_layout
from dovetail.planner.seconds import GPUCosts
from dovetail.planner.workload import Workload
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Layout
from dovetail.protocol.prediction import PredictedStage, Prediction


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
    def trained(self) -> list[str]:
        """The trained models."""
        return trained_models(self.spec)

    @cached_property
    def ranks(self) -> int:
        """The number of trainer ranks."""
        return trainer_world(self.spec)

    @cached_property
    def pins(self) -> dict[str, tuple[str, Parallelism]] | None:
        """The pinned layouts by model, each with its field. None if spec.plan.parallelism is Auto."""
        return pinned_layouts(self.spec)

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
            cp=layout.cp,
            ep=layout.ep,
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
    told = {**made.config, **vocabulary, "model_type": made.architecture}
    family = family_of(told)
    return {**(family.defaults if family else {}), **told}


# Splitting a model or interleaving must gain this factor over doing neither, because the cost model is not exact.
WORTH = 1.05
# The part of an optimizer step that the cost model does not count, such as launches and Python.
UNCOUNTED_SECONDS = 0.01


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


def most_stages(job: PlannedJob, layers: int) -> int:
    """The most pipeline ranks of a model with `layers` layers."""
    return max(1, layers // job.spec.plan.chunks)


def allowed_layouts(
    job: PlannedJob, model: str, ranks: int, layers: int | None, degrees: Sequence[int] = (1,), longest: int = 0
) -> list[Parallelism]:
    """The layouts over `ranks` ranks that share every batch of the model in every stage evenly. If a layout is pinned,
    only that one is allowed. `layers`: the model's layers, or None if they are not known. `degrees`: the allowed tp.
    `longest`: the tokens of samples whose tokens ranks may share."""
    rules = [rule for rule in job.rules if rule.model == model]
    pinned = None if job.pins is None else job.pins[model][1]
    asked = set() if pinned is None else {pinned.cp}
    contexts = context_degrees(None if job.shapes is None else job.shape(model), longest, asked)
    most, experts = ranks if layers is None else most_stages(job, layers), () if pinned is None else (pinned.ep,)
    return [
        layout
        for layout in every_layout(ranks, degrees, most, contexts, experts or (1,))
        if all(rule.problem(layout.batch_shares) is None for rule in rules) and pinned in (None, layout)
    ]


# The numbers of stages that are tried: a V, and two of them.
SEVERAL = (2, 4)


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
    stages = even_chunks(job, {model: placed.layouts[model] for model in trained}, several)
    if not job.trains_on_gpus:
        return max(stages, default=1)
    if (chosen := placed.chosen) is None:
        return 1
    folded = replace(chosen.candidate, schedule="VShaped")
    return max((c for c in stages if costs_with(chosen, c).estimate(folded).fits), default=1)


def even_chunks(job: PlannedJob, layouts: Mapping[str, Parallelism], several: Sequence[int]) -> list[int]:
    """Which of `several` numbers of stages on a rank divide the layers of all models evenly. The list is empty if the
    models have unlike pipelines or no pipeline, or if adapters have dropout."""
    spec, known, first = job.spec, job.shapes, next(iter(layouts.values()))
    adapters = [getattr(spec.models, model).lora for model in layouts]
    dropout = any(each is not None and each.dropout for each in adapters)
    if any(each != first for each in layouts.values()) or first.pp == 1 or dropout:
        return []
    counts = [known[m].layers if known is not None else job.layers.get(m) for m in layouts]
    return [c for c in several if all(n is not None and n % (first.pp * c) == 0 for n in counts)]


def costs_with(chosen: Chosen, chunks: int) -> GPUCosts:
    """The costs of a placement on GPUs if each rank holds `chunks` stages."""
    costs = chosen.costs
    return GPUCosts(replace(costs.work, chunks=chunks), costs.inventory, costs.max_samples)
