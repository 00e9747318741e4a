"""Rules about layouts that the manifest pins, and about the actor's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.checks.rules.rule import Rule, Value, ppo_rule, spec_rule
from dovetail.manifest.checks.scratch import (
    NOT_ON_CPUS,
    SIZES,
    architecture_layers,
    cpu_head_error,
    head_size,
    is_count,
    needs_gpus,
    unsupported_heads,
)
from dovetail.manifest.model_families.support import text_part
from dovetail.manifest.sizes import draws_on_cpus, trained_models, trainer_world, world_size
from dovetail.manifest.types import LoRA, Parallelism, RLHFJobSpec, Stage

# ---------------------------------------------------------------- pinned layouts


def _laid_out(spec: RLHFJobSpec, name: str) -> tuple[str, Parallelism] | None:
    """The first trained model for which spec.plan.parallelism has this entry, and its layout."""
    pinned = pinned_layouts(spec)
    if pinned is None or trainer_world(spec) == 0:
        return None
    field_name = f"spec.plan.parallelism.{name}"
    return next(((model, pinned[model][1]) for model in trained_models(spec) if pinned[model][0] == field_name), None)


def _layers(spec: RLHFJobSpec, model: str) -> int | None:
    source = getattr(spec.models, model).source or spec.models.actor.source
    return architecture_layers(source.scratch) if source and source.scratch else None


def _of_layout(name: str, value: Callable[[RLHFJobSpec, str, Parallelism], object]) -> Value:
    return lambda spec: value(spec, *found) if (found := _laid_out(spec, name)) else ""


def _fills_the_ranks(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        return found is None or world_size(found[1]) == trainer_world(spec)

    return spec_rule(
        holds,
        f"spec.plan.parallelism.{name}: pp {{pp}} x tp {{tp}} x dp {{dp}} is {{ranks}} ranks, but the trainer groups "
        "have {world}; make the product {world}.",
        {
            "pp": _of_layout(name, lambda spec, model, layout: layout.pp),
            "tp": _of_layout(name, lambda spec, model, layout: layout.tp),
            "dp": _of_layout(name, lambda spec, model, layout: layout.dp),
            "ranks": _of_layout(name, lambda spec, model, layout: world_size(layout)),
            "world": trainer_world,
        },
    )


def _of_one_pipeline(spec: RLHFJobSpec, model: str, layout: Parallelism) -> int:
    """The data-parallel ranks whose schedule is the same, if two models share one."""
    actor, critic = _actor_and_critic(spec)
    together = math.lcm(actor.pp, critic.pp, layout.pp) // layout.pp if model != "reward" else 1
    return layout.dp // together if layout.dp % together == 0 else layout.dp


def _divides_the_pipeline(name: str, degree: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        return found is None or _of_one_pipeline(spec, *found) % getattr(found[1], degree) == 0

    return spec_rule(
        holds,
        f"spec.plan.parallelism.{name}.{degree} is {{degree}}, which does not divide its {{ranks}} data-parallel ranks "
        f"(those of one pipeline, where actor and critic share a schedule); use one that does.",
        {
            "degree": _of_layout(name, lambda spec, model, layout: getattr(layout, degree)),
            "ranks": _of_layout(name, _of_one_pipeline),
        },
    )


def _tokens_are_shared(name: str) -> Rule:
    return _divides_the_pipeline(name, "cp")


def _experts_are_divided(name: str) -> Rule:
    return _divides_the_pipeline(name, "ep")


def _layer_for_each_stage(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        layers = _layers(spec, found[0]) if found else None
        return found is None or layers is None or found[1].pp <= layers

    return spec_rule(
        holds,
        f"spec.plan.parallelism.{name}.pp is {{pp}}, but the {{model}} has only {{layers}} layers; lower it.",
        {
            "pp": _of_layout(name, lambda spec, model, layout: layout.pp),
            "model": _of_layout(name, lambda spec, model, layout: model),
            "layers": _of_layout(name, lambda spec, model, layout: _layers(spec, model)),
        },
    )


def _layers_for_two_stages(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        layers = _layers(spec, found[0]) if found else None
        return found is None or layers is None or not found[1].pp <= layers < found[1].pp * spec.plan.chunks

    return spec_rule(
        holds,
        f"spec.plan.parallelism.{name}.pp is {{pp}}, and spec.plan.intraStageFusion VShaped puts two stages of a model "
        "on each rank, but the {model} has only {layers} layers; lower pp, or set spec.plan.intraStageFusion to Auto.",
        {
            "pp": _of_layout(name, lambda spec, model, layout: layout.pp),
            "model": _of_layout(name, lambda spec, model, layout: model),
            "layers": _of_layout(name, lambda spec, model, layout: _layers(spec, model)),
        },
    )


def _adapters_fit(model: str, degree: str, fit: Callable[[LoRA], bool], why: str) -> Rule:
    def pinned(spec: RLHFJobSpec) -> tuple[str, Parallelism]:
        return (pinned_layouts(spec) or {}).get(model, ("", Parallelism()))

    def holds(spec: RLHFJobSpec) -> bool:
        if model not in trained_models(spec) or trainer_world(spec) == 0:
            return True
        lora = getattr(spec.models, model).lora
        return getattr(pinned(spec)[1], degree) == 1 or lora is None or fit(lora)

    return spec_rule(
        holds,
        f"{{field}}.{degree} is {{degree}}, but {why}.",
        {"field": lambda spec: pinned(spec)[0], "degree": lambda spec: getattr(pinned(spec)[1], degree)},
    )


def _whole_adapters(model: str) -> Rule:
    why = f"adapters with dropout (spec.models.{model}.lora) are not split over tensor-parallel ranks"
    return _adapters_fit(model, "tp", lambda lora: lora.dropout == 0, f"{why}; make tp 1, or the dropout 0")


def _whole_experts(model: str) -> Rule:
    why = f"adapters on experts (spec.models.{model}.lora.targetModules) are not divided over ranks; make ep 1"
    return _adapters_fit(model, "ep", lambda lora: not any(n.startswith("experts.") for n in lora.target_modules), why)


def _actor_and_critic(spec: RLHFJobSpec) -> tuple[Parallelism, Parallelism]:
    """The pinned layouts of actor and critic. If nothing is pinned or no critic is trained, the two are equal."""
    pinned = pinned_layouts(spec)
    if pinned is None or "critic" not in trained_models(spec):
        return Parallelism(), Parallelism()
    return pinned["actor"][1], pinned["critic"][1]


def _same_tensor_parallel(spec: RLHFJobSpec) -> bool:
    actor, critic = _actor_and_critic(spec)
    return actor.tp == critic.tp or trainer_world(spec) == 0


def _pipelines_divide(spec: RLHFJobSpec) -> bool:
    """Fused and time-shared schedules merge stages of the longer pipeline (RLHFuse section 5.2)."""
    actor, critic = _actor_and_critic(spec)
    low, high = sorted((actor.pp, critic.pp))
    return high % low == 0 or spec.plan.intra_stage_fusion == "Serial"


def _divisors(spec: RLHFJobSpec) -> str:
    high = max(layout.pp for layout in _actor_and_critic(spec))
    return ", ".join(str(pp) for pp in range(1, high + 1) if high % pp == 0)


LAYOUT_RULES = (
    *(
        rule(name)
        for name in ("actor", "critic")
        for rule in (
            _fills_the_ranks,
            _tokens_are_shared,
            _experts_are_divided,
            _layer_for_each_stage,
            _layers_for_two_stages,
        )
    ),
    *(rule(model) for model in ("actor", "critic", "reward") for rule in (_whole_adapters, _whole_experts)),
    spec_rule(
        _same_tensor_parallel,
        "spec.plan.parallelism: the actor's tp {actor} and the critic's tp {critic} differ, but both train on the same "
        "ranks in turn; make them equal.",
        {
            "actor": lambda spec: _actor_and_critic(spec)[0].tp,
            "critic": lambda spec: _actor_and_critic(spec)[1].tp,
        },
    ),
    spec_rule(
        _pipelines_divide,
        "spec.plan.parallelism: the actor's pp {actor} and the critic's pp {critic} do not divide each other, so "
        "their pipelines cannot share a schedule; make the lower one of {fits}, or set spec.plan.intraStageFusion to "
        "Serial.",
        {
            "actor": lambda spec: _actor_and_critic(spec)[0].pp,
            "critic": lambda spec: _actor_and_critic(spec)[1].pp,
            "fits": _divisors,
        },
    ),
)

# ---------------------------------------------------------------- what the actor's configuration allows


def _actor_config(spec: RLHFJobSpec) -> Mapping[str, Any]:
    """The configuration of an actor from scratch. {} for other actors."""
    source = spec.models.actor.source
    if source is None or source.scratch is None:
        return {}
    return text_part({"model_type": source.scratch.architecture, **source.scratch.config})


def _heads_fit(spec: RLHFJobSpec) -> bool:
    config = _actor_config(spec)
    if not draws_on_cpus(spec) or needs_gpus(config) or not all(is_count(config.get(size, 1)) for size in SIZES):
        return True  # another rule is about sizes that are no numbers
    return cpu_head_error(config) is None


def _positions(spec: RLHFJobSpec) -> int | None:
    """The longest sequence that the actor allows, in tokens. None if the configuration does not say."""
    positions = _actor_config(spec).get("max_position_embeddings")
    return positions if is_count(positions) else None


def _longest(spec: RLHFJobSpec) -> int:
    return spec.data.max_prompt_tokens + spec.generation.max_tokens


CONFIGURATION_RULES = (
    ppo_rule(
        _heads_fit,
        f"spec.models.actor.source.scratch.config: {unsupported_heads('{size}')}.",
        {"size": lambda spec: head_size(_actor_config(spec))},
    ),
    ppo_rule(
        lambda spec: not (draws_on_cpus(spec) and needs_gpus(_actor_config(spec))),
        f"spec.models.actor.source.scratch.architecture: {NOT_ON_CPUS}; take rollouts on GPUs.",
    ),
    ppo_rule(
        lambda spec: _longest(spec) <= (_positions(spec) or _longest(spec)),
        "spec.data.maxPromptTokens + spec.generation.maxTokens is {longest}, but the actor has "
        "max_position_embeddings {positions}; lower the former or raise the latter.",
        {
            "longest": _longest,
            "positions": _positions,
        },
    ),
    spec_rule(
        lambda spec: (
            not {Stage.SFT, Stage.REWARD, Stage.DPO} & set(spec.stages)
            or spec.data.max_tokens <= (_positions(spec) or spec.data.max_tokens)
        ),
        "spec.data.maxTokens is {data.maxTokens}, but the actor has max_position_embeddings {positions}; "
        "lower the former or raise the latter.",
        {"positions": _positions},
    ),
)
