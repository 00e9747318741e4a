"""Rules between fields of a spec: what no single field's type can say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dovetail.manifest.checks.batching import batch_rules, pinned_layouts
from dovetail.manifest.checks.scratch import architecture_layers, cpu_head_error, scratch_errors
from dovetail.manifest.critic import SHARED_BODY_RULES, shares_body
from dovetail.manifest.sizes import trained_models, trainer_world, world_size
from dovetail.manifest.types import DataSource, Dtype, Group, ModelSource, RLHFJobSpec, Role, Stage, TrainedModel

# Set by the launcher or fixed by the contract between the processes.
RESERVED_VLLM_ARGS = (
    "--host",
    "--port",
    "--model",
    "--served-model-name",
    "--tokenizer",
    "--load-format",
    "--weight-transfer-config",
    "--middleware",
    "--api-key",
    "--data-parallel-size",
    "-dp",
    "--pipeline-parallel-size",
    "-pp",
)


def check(spec: RLHFJobSpec) -> list[str]:
    """One sentence for each rule that the spec breaks, each with the field's path and the fix; [] if none."""
    return [error for rule in _RULES for error in rule(spec)]


def _stages(spec: RLHFJobSpec) -> Iterator[str]:
    order = [stage for stage in Stage if stage in spec.stages]
    if len(set(spec.stages)) != len(spec.stages):
        yield "spec.stages names a stage twice; name each once."
    elif spec.stages != order:
        yield f"spec.stages must be in the order sft, reward, ppo; write [{', '.join(order)}]."


def _models(spec: RLHFJobSpec) -> Iterator[str]:
    models = spec.models
    for name in ("actor", "critic", "reward", "reference"):
        model: TrainedModel = getattr(models, name)
        field = f"spec.models.{name}"
        if model.source is not None:
            yield from _model_source(f"{field}.source", model.source)
        if model.lora is not None:
            if model.lora.dropout >= 1:
                yield f"{field}.lora.dropout is 1, which drops everything; use less, such as 0.05."
            if len(set(model.lora.target_modules)) != len(model.lora.target_modules):
                yield f"{field}.lora.targetModules names a module twice; name each once."
        if name != "reference" and model.dtype is Dtype.FLOAT16:
            yield f"{field}.dtype float16 cannot be trained in (it needs loss scaling); use bfloat16 or float32."
    if models.actor.source is None:
        yield (
            "spec.models.actor.source is required: give exactly one of huggingFace, path, pvc and scratch "
            "(for example `path: models/my-model`)."
        )
    if models.reference.lora is not None:
        yield "spec.models.reference.lora has no effect, for the reference is not trained; remove it."


def _model_source(field: str, source: ModelSource) -> Iterator[str]:
    given = [name for name in ("huggingFace", "path", "pvc", "scratch") if _get(source, name) is not None]
    yield from _one_of(field, given, ("huggingFace", "path", "pvc", "scratch"))
    if source.revision is not None and source.hugging_face is None:
        yield f"{field}.revision belongs to huggingFace; remove it or give huggingFace."
    if source.pvc is not None and "/" not in source.pvc.strip("/"):
        yield f"{field}.pvc must be claim/path, the claim's name and a folder in it; it is {source.pvc!r}."
    if source.scratch is not None:
        yield from scratch_errors(f"{field}.scratch", source.scratch)


def _reward(spec: RLHFJobSpec) -> Iterator[str]:
    reward = spec.models.reward
    if reward.function is not None and reward.functions is not None:
        yield "spec.models.reward has both function and functions; move the one into the list of the others."
    if reward.calls:
        field = "spec.models.reward." + ("functions" if reward.functions is not None else "function")
        for name in ("source", "lora"):
            if getattr(reward, name) is not None:
                yield (
                    f"spec.models.reward.{name} cannot go with {field}, which replaces the reward model; "
                    "remove one of them."
                )
        if list(spec.stages) == [Stage.REWARD]:
            yield (
                f"spec.stages has only reward, but {field} replaces the reward model; remove the function or add ppo."
            )
        names = [function.title for function in reward.calls]
        if len(set(names)) != len(names):
            yield "spec.models.reward.functions has two of the same name; give each a `name` of its own."
        if all(function.weight == 0 for function in reward.calls):
            yield "spec.models.reward.functions gives every function the weight 0; give one another weight."
    elif Stage.PPO in spec.stages and Stage.REWARD not in spec.stages and reward.source is None:
        yield (
            "spec.models.reward needs a source or a function when spec.stages has ppo without reward; "
            "give the folder of a trained reward model in spec.models.reward.source.path."
        )
    elif Stage.PPO in spec.stages and Stage.REWARD not in spec.stages and reward.source and reward.source.scratch:
        yield (
            "spec.models.reward.source.scratch is an untrained reward model, and spec.stages does not train it; "
            "add reward to spec.stages or name a trained model."
        )


def _tokenizer(spec: RLHFJobSpec) -> Iterator[str]:
    tokenizer, source = spec.models.tokenizer, spec.models.actor.source
    if tokenizer.path is not None and tokenizer.train is not None:
        yield "spec.models.tokenizer has both path and train; give one of them."
    if source is None:
        return
    if source.scratch is not None and tokenizer.path is None and tokenizer.train is None:
        yield (
            "spec.models.tokenizer is required for an actor from scratch: give path, or train: {vocabSize: 512} "
            "to train one on the job's data."
        )
    if source.scratch is None and tokenizer.train is not None:
        yield (
            "spec.models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; "
            "remove it to use the actor's own tokenizer."
        )


def _data(spec: RLHFJobSpec) -> Iterator[str]:
    data = spec.data
    for name in ("demonstrations", "preferences", "prompts"):
        for index, source in enumerate(getattr(data, name)):
            yield from _data_source(f"spec.data.{name}[{index}]", source)
    trains_reward = Stage.REWARD in spec.stages and not spec.models.reward.calls
    needs = [
        (Stage.SFT in spec.stages, "demonstrations", "the sft stage"),
        (trains_reward, "preferences", "the reward stage"),
        (Stage.PPO in spec.stages, "prompts", "the ppo stage"),
    ]
    for needed, name, who in needs:
        if needed and not getattr(data, name):
            yield f"spec.data.{name} is empty, but {who} needs it; add a source or drop the stage from spec.stages."
    if Stage.PPO in spec.stages and spec.ppo.ptx_coef > 0 and not data.demonstrations:
        yield ("spec.ppo.ptxCoef is above 0, but spec.data.demonstrations is empty; add a source or set ptxCoef to 0.")
    for stage in spec.stages:
        if getattr(data.split, stage.value) == 0 and (stage is not Stage.REWARD or trains_reward):
            yield f"spec.data.split.{stage.value} is 0, but spec.stages has {stage.value}; give it a share above 0."
    if data.held_out >= 1:
        yield "spec.data.heldOut is 1, which leaves nothing to train on; use less, such as 0.1."


def _data_source(field: str, source: DataSource) -> Iterator[str]:
    kinds = ("huggingFace", "path", "synthetic")
    yield from _one_of(field, [name for name in kinds if _get(source, name) is not None], kinds)
    if source.subset is not None and source.hugging_face is None:
        yield f"{field}.subset belongs to huggingFace; remove it or give huggingFace."
    if source.revision is not None and source.hugging_face is None:
        yield f"{field}.revision belongs to huggingFace; remove it or give huggingFace."
    if source.split != "train" and source.hugging_face is None:
        yield f"{field}.split belongs to huggingFace; remove it, for files and synthetic data are used whole."


def _ppo(spec: RLHFJobSpec) -> Iterator[str]:
    ppo = spec.ppo
    if Stage.PPO not in spec.stages:
        return
    if ppo.global_batch_size % ppo.samples_per_prompt:
        yield (
            f"spec.ppo.globalBatchSize is {ppo.global_batch_size}, which spec.ppo.samplesPerPrompt "
            f"({ppo.samples_per_prompt}) does not divide; make it a multiple of {ppo.samples_per_prompt}."
        )
    if ppo.global_batch_size % ppo.mini_batch_size:
        yield (
            f"spec.ppo.globalBatchSize is {ppo.global_batch_size}, which spec.ppo.miniBatchSize "
            f"({ppo.mini_batch_size}) does not divide; make it a multiple of {ppo.mini_batch_size}."
        )
    if ppo.advantage != "gae":
        if ppo.samples_per_prompt < 2:
            yield (
                f"spec.ppo.samplesPerPrompt is {ppo.samples_per_prompt}, but {ppo.advantage} compares samples of the "
                "same prompt; set it to 2 or more."
            )
        if ppo.critic_warmup_iterations:
            yield (
                f"spec.ppo.criticWarmupIterations is {ppo.critic_warmup_iterations}, but {ppo.advantage} has no "
                "critic; remove it."
            )
    if ppo.critic_warmup_iterations >= ppo.iterations:
        yield (
            f"spec.ppo.criticWarmupIterations ({ppo.critic_warmup_iterations}) leaves no iteration that trains the "
            f"actor; make it less than spec.ppo.iterations ({ppo.iterations})."
        )
    if ppo.kl.estimator in ("k2", "k3") and not ppo.kl_in_loss:
        yield (
            f"spec.ppo.kl.estimator is {ppo.kl.estimator}, which in the reward lowers another quantity than the KL; "
            "use k1, or set spec.ppo.kl.in to Loss."
        )
    if ppo.kl.estimator == "k1" and ppo.kl_in_loss:
        yield (
            "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0 on average; use k2 or k3, or set "
            "spec.ppo.kl.in to Reward."
        )
    if ppo.kl_in_loss and ppo.advantage == "gae" and ppo.whiten_advantages and ppo.advantage_function is None:
        yield (
            "spec.ppo.kl.in is Loss, but spec.ppo.whitenAdvantages divides by the advantages' deviation, beside which "
            "the penalty has no fixed weight; set whitenAdvantages to false, or kl.in to Reward."
        )
    if not ppo.normalize_std and ppo.advantage != "grpo":
        yield (
            f"spec.ppo.normalizeStd is false, but {ppo.advantage} does not divide by a group's deviation; remove it."
        )
    if ppo.whiten_rewards and ppo.advantage == "grpo" and ppo.normalize_std:
        yield (
            "spec.ppo.whitenRewards has no effect with grpo, which divides by each group's own deviation; remove it, "
            "or set spec.ppo.normalizeStd to false."
        )
    if ppo.kl.target is not None and ppo.kl.coef == 0:
        yield "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move; start above 0 or drop target."


def _shared_body(spec: RLHFJobSpec) -> Iterator[str]:
    if Stage.PPO in spec.stages and shares_body(spec):
        yield from (rule.message for rule in SHARED_BODY_RULES if rule.broken(spec))


def _generation(spec: RLHFJobSpec) -> Iterator[str]:
    generation = spec.generation
    if generation.min_tokens > generation.max_tokens:
        yield (
            f"spec.generation.minTokens ({generation.min_tokens}) is above spec.generation.maxTokens "
            f"({generation.max_tokens}); lower it."
        )


def _batches(spec: RLHFJobSpec) -> Iterator[str]:
    pinned = pinned_layouts(spec)
    said = set()
    for rule in batch_rules(spec):
        # Auto may always choose one data-parallel rank; whether the ranks then suffice is the planner's to say.
        problem = rule.problem(pinned[rule.model][1].dp if pinned else 1)
        key = (rule.stage, pinned[rule.model][1].dp if pinned else 1)
        if problem and key not in said:
            said.add(key)
            yield f"{problem}."


def _groups(spec: RLHFJobSpec) -> Iterator[str]:
    names = [group.name for group in spec.groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"spec.groups has {name!r} twice; give every group a name of its own."
    for index, group in enumerate(spec.groups):
        yield from _group(f"spec.groups[{index}]", group)
    trainers = [group for group in spec.groups if Role.TRAINER in group.roles]
    if not trainers:
        yield "spec.groups has no group with the role trainer; add `trainer` to the roles of one."
    if Stage.PPO in spec.stages and not any(Role.ROLLOUT in group.roles for group in spec.groups):
        yield "spec.groups has no group with the role rollout, but the ppo stage generates; add `rollout` to one."
    if len({group.on_cpu for group in trainers}) > 1:
        yield (
            "spec.groups mixes trainer groups with and without GPUs; "
            "all trainer ranks work in step, so give all of them GPUs or none."
        )


def _group(field: str, group: Group) -> Iterator[str]:
    low, high, count = group.min_replicas, group.max_replicas, group.replicas
    if len(set(group.roles)) != len(group.roles):
        yield f"{field}.roles names a role twice; name each once."
    if low is not None and high is not None and low > high:
        yield f"{field}.minReplicas ({low}) is above maxReplicas ({high}); lower it."
    elif count is not None and not (low or 1) <= count <= (high or count):
        bounds = f"from {low or 1}" + (f" to {high}" if high else " up")
        yield f"{field}.replicas ({count}) must be within minReplicas and maxReplicas ({bounds})."
    if Role.TRAINER in group.roles and ((low or count) != count or (high or count) != count):
        yield (
            f"{field} has the role trainer, whose number of pods is fixed; "
            "set replicas and remove minReplicas and maxReplicas."
        )
    if group.gpu.product is None and group.gpu.per_pod > 1:
        yield f"{field}.gpu.perPod is {group.gpu.per_pod} without gpu.product; name the product or remove perPod."
    if group.gpu.product is not None and group.gpu.per_pod == 0:
        yield f"{field}.gpu.perPod is 0, but gpu.product names a GPU; set perPod to 1 or more, or remove product."
    if Role.ROLLOUT not in group.roles:
        if group.vllm_args:
            yield f"{field}.vllmArgs has no effect without the role rollout; remove it."
        return
    if group.name in ("trainer", "coordinator"):
        yield f"{field}.name {group.name!r} is the name of other processes; choose another, such as `rollouts`."
    if group.dtype is Dtype.BFLOAT16 and group.gpu.product is not None and "V100" in group.gpu.product:
        yield f"{field}.dtype is bfloat16, which {group.gpu.product} does not have; use float16 or float32."
    for position, argument in enumerate(group.vllm_args):
        option = argument.split("=", 1)[0].replace("_", "-")
        if option in RESERVED_VLLM_ARGS:
            yield f"{field}.vllmArgs[{position}]: {option} is set by Dovetail; remove it."


def _parallelism(spec: RLHFJobSpec) -> Iterator[str]:
    pinned, world, said = pinned_layouts(spec), trainer_world(spec), set()
    if pinned is None or world == 0:
        return
    for model in trained_models(spec):
        field, layout = pinned[model]
        if field in said:
            continue
        said.add(field)
        if world_size(layout) != world:
            yield (
                f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the "
                f"trainer groups have {world}; make the product {world}."
            )
        source = getattr(spec.models, model).source or spec.models.actor.source
        layers = architecture_layers(source.scratch) if source and source.scratch else None
        if layers is not None and layout.pp > layers:
            yield f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it."
    for model in trained_models(spec):
        field, layout = pinned[model]
        if layout.tp > 1 and getattr(spec.models, model).lora is not None:
            yield (
                f"{field}.tp is {layout.tp}, but adapters (spec.models.{model}.lora) are not split over "
                "tensor-parallel ranks; make tp 1, or remove lora."
            )
    actor, critic = pinned["actor"][1].tp, pinned["critic"][1].tp
    if "critic" in trained_models(spec) and actor != critic:
        yield (
            f"spec.plan.parallelism: the actor's tp {actor} and the critic's tp {critic} differ, but both train on the "
            "same ranks in turn; make them equal."
        )


def _shared_pipelines(spec: RLHFJobSpec) -> Iterator[str]:
    """Fused and time-shared schedules merge stages of the longer pipeline (RLHFuse section 5.2)."""
    pinned = pinned_layouts(spec)
    if pinned is None or "critic" not in trained_models(spec) or spec.plan.intra_stage_fusion == "Serial":
        return
    actor, critic = pinned["actor"][1].pp, pinned["critic"][1].pp
    high, low = max(actor, critic), min(actor, critic)
    if high % low:
        fits = ", ".join(str(pp) for pp in range(1, high + 1) if high % pp == 0)
        yield (
            f"spec.plan.parallelism: the actor's pp {actor} and the critic's pp {critic} do not divide each other, so "
            f"their pipelines cannot share a schedule; make the lower one of {fits}, or set "
            "spec.plan.intraStageFusion to Serial."
        )


def _heads(spec: RLHFJobSpec) -> Iterator[str]:
    source = spec.models.actor.source
    on_cpu = any(Role.ROLLOUT in group.roles and group.on_cpu for group in spec.groups)
    if on_cpu and Stage.PPO in spec.stages and source is not None and source.scratch is not None:
        problem = cpu_head_error(source.scratch.config)
        if problem:
            yield f"spec.models.actor.source.scratch.config: {problem}."


def _lengths(spec: RLHFJobSpec) -> Iterator[str]:
    source = spec.models.actor.source
    positions = source.scratch.config.get("max_position_embeddings") if source and source.scratch else None
    if not isinstance(positions, int) or isinstance(positions, bool):
        return
    longest = spec.data.max_prompt_tokens + spec.generation.max_tokens
    if Stage.PPO in spec.stages and longest > positions:
        yield (
            f"spec.data.maxPromptTokens + spec.generation.maxTokens is {longest}, but the actor has "
            f"max_position_embeddings {positions}; lower the former or raise the latter."
        )
    if {Stage.SFT, Stage.REWARD} & set(spec.stages) and spec.data.max_tokens > positions:
        yield (
            f"spec.data.maxTokens is {spec.data.max_tokens}, but the actor has max_position_embeddings {positions}; "
            "lower the former or raise the latter."
        )


def _get(source: Any, alias: str) -> Any:
    return getattr(source, {"huggingFace": "hugging_face"}.get(alias, alias))


def _one_of(field: str, given: list[str], known: tuple[str, ...]) -> Iterator[str]:
    if not given:
        yield f"{field} names nothing; give exactly one of {', '.join(known)}."
    if len(given) > 1:
        yield f"{field} has {' and '.join(given)}; give exactly one of {', '.join(known)}."


_RULES: tuple[Callable[[RLHFJobSpec], Iterator[str]], ...] = (
    _stages,
    _models,
    _reward,
    _tokenizer,
    _data,
    _ppo,
    _shared_body,
    _generation,
    _batches,
    _groups,
    _parallelism,
    _shared_pipelines,
    _heads,
    _lengths,
)
