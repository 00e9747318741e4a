"""The rules between fields of a spec: what no single field's type can say. Pure.

`RULES` is the one table. Each row has the place of the rule, a Python predicate, the same predicate in CEL, and the
sentence for the user. `check` runs the predicates; the CRD and the reference page are made of the
same rows, so the API server refuses what `dovetail validate` refuses, in the same words. CEL cannot see free-form
objects (a scratch model's config) and unions (plan.parallelism). Such rows have no CEL: the operator checks them, and
the condition Planned says what it found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from dovetail.manifest.checks.batching import BatchRule, batch_rules, cannot_cut, pinned_layouts
from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.checks.scratch import (
    SIZES,
    architecture_layers,
    cpu_head_error,
    head_size,
    is_count,
    unsupported_heads,
)
from dovetail.manifest.critic import shares_body
from dovetail.manifest.sizes import trained_models, trainer_world, world_size
from dovetail.manifest.training import Optimizer
from dovetail.manifest.types import (
    DataSource,
    Dtype,
    Group,
    LoRA,
    ModelSource,
    Parallelism,
    RewardFunction,
    RewardModel,
    RLHFJobSpec,
    Role,
    ScratchModel,
    Stage,
    Tokenizer,
    TrainedModel,
)

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

# `{path}`, `{ppo.clip}` and `{value}` in a sentence, but not `{vocabSize: 512}`.
_HOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True)
class Value:
    """A value in a sentence that is computed: `of(object)` in Python, the joined values of `cel` on the API server."""

    of: Callable[[Any], object]
    cel: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    `at`: the places of the object that the predicate gets, such as `spec` or `spec.groups[]` (`[]`: each item). Where
    there is no such object, the rule holds. `holds`: the predicate in Python. `cel`: the same in CEL, where `self` is
    the object; None where CEL cannot say it. `sentence`: what the user is told where it does not hold; `{path}` is
    the object's path, `{minReplicas}` a field below it, other names are in `values`. The sentence of a rule in a list
    starts with `{path}`. `by_type`: the API server refuses the manifest by the type of the list (a set, or a map by
    name), in words of its own."""

    at: tuple[str, ...]
    holds: Callable[[Any], bool]
    cel: str | None
    sentence: str
    values: Mapping[str, Value] = field(default_factory=dict)
    by_type: bool = False

    def check(self, spec: RLHFJobSpec) -> Iterator[tuple[str, str]]:
        """Path and sentence of each object that breaks the rule."""
        for place in self.at:
            for path, found in _objects(spec, place):
                if not self.holds(found):
                    yield path, self._fill(partial(self._value, found, path))

    def cel_rules(self) -> Iterator[CelRule]:
        """The rule in the CRD, once for each place; nothing without CEL."""
        for place in self.at if self.cel is not None else ():
            sentence = self.sentence
            if "[]" in place:  # the API server puts the path of the item before it
                sentence = sentence.removeprefix("{path}").lstrip(".: ")
            message = _HOLE.sub(lambda hole: self._cel(hole[1]), sentence.replace("{path}", place))
            yield CelRule(place, self.cel or "", message)

    def shown(self) -> str:
        """The sentence for a page: values that depend on the manifest are `…`."""
        path = _joined(self.at)
        return self._fill(lambda name: path if name == "path" else "…")

    def _fill(self, value: Callable[[str], str]) -> str:
        return _HOLE.sub(lambda hole: value(hole[1]), self.sentence)

    def _value(self, found: Any, path: str, name: str) -> str:
        if name == "path":
            return path
        if name in self.values:
            return str(self.values[name].of(found))
        for step in name.split("."):
            found = _get(found, step)
        return str(found)

    def _cel(self, name: str) -> str:
        expressions = self.values[name].cel if name in self.values else (f"self.{name}",)
        return "".join(f"{{{expression}}}" for expression in expressions)


def check(spec: RLHFJobSpec) -> list[str]:
    """One sentence for each rule that the spec breaks, each with the field's path and the fix; [] if none."""
    return [sentence for rule in RULES for _, sentence in rule.check(spec)]


def _objects(spec: RLHFJobSpec, place: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each object at a place; objects that are not given are left out."""
    found: list[tuple[str, Any]] = [("spec", spec)]
    for step in place.split(".")[1:]:
        name = step.removesuffix("[]")
        found = [(f"{path}.{name}", _get(value, name)) for path, value in found]
        if step.endswith("[]"):
            found = [(f"{path}[{i}]", item) for path, items in found for i, item in enumerate(items or ())]
        found = [(path, value) for path, value in found if value is not None]
    yield from found


def _get(value: Any, alias: str) -> Any:
    """A field by its name in manifests."""
    return getattr(value, _names(value.__class__)[alias])


@cache
def _names(model: Any) -> dict[str, str]:
    return {info.alias or name: name for name, info in model.model_fields.items()}


def _joined(places: tuple[str, ...]) -> str:
    """`a.{x,y}.b` of `a.x.b` and `a.y.b`, and likewise for places of each other length."""
    found = []
    for length in sorted({place.count(".") for place in places}):
        steps = zip(*(place.split(".") for place in places if place.count(".") == length), strict=True)
        names = [tuple(dict.fromkeys(step)) for step in steps]
        found.append(".".join(step[0] if len(step) == 1 else f"{{{','.join(step)}}}" for step in names))
        found[-1] = re.sub(r"\{[^}]*\[\]\}", lambda names: names[0].replace("[]", "") + "[]", found[-1])
    return " or ".join(found)


# ---------------------------------------------------------------- shorter ways to write a row


def _spec(
    holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    return Rule(("spec",), holds, cel, sentence, values or {})


def _ppo(
    holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    """A rule that holds without the ppo stage."""
    return _spec(
        lambda spec: Stage.PPO not in spec.stages or holds(spec),
        None if cel is None else f"!('ppo' in self.stages) || {cel}",
        sentence,
        values,
    )


def _group(
    holds: Callable[[Group], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    return Rule(("spec.groups[]",), holds, cel, sentence, values or {})


def _listed(flags: Mapping[str, str], separator: str) -> tuple[str, ...]:
    """CEL expressions that together write the names whose expression in `flags` is true."""
    found, earlier = [], list(flags.values())
    for index, (name, flag) in enumerate(flags.items()):
        first = f"({' || '.join(earlier[:index])} ? '{separator}{name}' : '{name}')" if index else f"'{name}'"
        found.append(f"{flag} ? {first} : ''")
    return tuple(found)


def _one_of(at: tuple[str, ...], *names: str) -> tuple[Rule, Rule]:
    flags = {name: f"has(self.{name})" for name in names}
    flag_list, known = f"[{', '.join(flags.values())}]", ", ".join(names)

    def given(source: Any) -> list[str]:
        return [name for name in names if _get(source, name) is not None]

    return (
        Rule(
            at,
            lambda source: bool(given(source)),
            f"{flag_list}.exists(x, x)",
            f"{{path}} names nothing; give exactly one of {known}.",
        ),
        Rule(
            at,
            lambda source: len(given(source)) < 2,
            f"{flag_list}.filter(x, x).size() < 2",
            f"{{path}} has {{given}}; give exactly one of {known}.",
            {"given": Value(lambda source: " and ".join(given(source)), _listed(flags, " and "))},
        ),
    )


# ---------------------------------------------------------------- stages

_ORDER = tuple(Stage)


def _in_order(stages: list[Stage]) -> list[Stage]:
    return [stage for stage in _ORDER if stage in stages]


_STAGES = (
    Rule(
        ("spec.stages",),
        lambda stages: len(set(stages)) == len(stages),
        "self.all(s, self.exists_one(t, t == s))",
        "{path} names a stage twice; name each once.",
    ),
    Rule(
        ("spec.stages",),
        lambda stages: len(set(stages)) != len(stages) or stages == _in_order(stages),
        "!self.all(s, self.exists_one(t, t == s)) || self == ['sft', 'reward', 'ppo'].filter(s, s in self)",
        "{path} must be in the order sft, reward, ppo; write [{order}].",
        {
            "order": Value(
                lambda stages: ", ".join(_in_order(stages)),
                _listed({stage.value: f"'{stage.value}' in self" for stage in _ORDER}, ", "),
            )
        },
    ),
)

# ---------------------------------------------------------------- models

_MODEL_NAMES = ("actor", "critic", "reward", "reference")
_SOURCES = tuple(f"spec.models.{name}.source" for name in _MODEL_NAMES)
_SCRATCH = tuple(f"{source}.scratch" for source in _SOURCES)
_LORAS = tuple(f"spec.models.{name}.lora" for name in _MODEL_NAMES)
_KINDS_OF_MODEL = ("huggingFace", "path", "pvc", "scratch")


def _revision(source: ModelSource | DataSource) -> bool:
    return source.revision is None or source.hugging_face is not None


def _claim_and_path(source: ModelSource) -> bool:
    return source.pvc is None or "/" in source.pvc.strip("/")


def _no_full_dropout(lora: LoRA) -> bool:
    return lora.dropout < 1


def _trainable(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        model: TrainedModel = getattr(spec.models, name)
        return model.dtype is not Dtype.FLOAT16

    return _spec(
        holds,
        f"self.models.{name}.dtype != 'float16'",
        f"spec.models.{name}.dtype float16 cannot be trained in (it needs loss scaling); use bfloat16 or float32.",
    )


def _divided(whole: str, part: str) -> Callable[[ScratchModel], bool]:
    """Whether the configuration's number `part` divides `whole`; what is no number has a rule of its own."""

    def holds(model: ScratchModel) -> bool:
        config = model.config
        if not (is_count(config.get(whole)) and is_count(config.get(part))):
            return True
        return bool(config[whole] % config[part] == 0)

    return holds


def _config(name: str) -> Value:
    return Value(lambda model: repr(model.config[name]))


_MODELS = (
    *_one_of(_SOURCES, *_KINDS_OF_MODEL),
    Rule(
        _SOURCES,
        _claim_and_path,
        "!has(self.pvc) || self.pvc.matches('[^/]/+[^/]')",
        "{path}.pvc must be claim/path, the claim's name and a folder in it; it is '{pvc}'.",
    ),
    Rule(
        _SCRATCH,
        lambda model: "vocab_size" not in model.config,
        None,
        "{path}.config.vocab_size comes from the tokenizer; remove it.",
    ),
    *(
        Rule(
            _SCRATCH,
            lambda model, size=size: size not in model.config or is_count(model.config[size]),  # type: ignore[misc]
            None,
            f"{{path}}.config.{size} must be a whole number of at least 1; it is {{value}}.",
            {"value": _config(size)},
        )
        for size in SIZES
    ),
    Rule(
        _SCRATCH,
        lambda model: "head_dim" in model.config or _divided("hidden_size", "num_attention_heads")(model),
        None,
        "{path}.config.hidden_size is {hidden}, which num_attention_heads ({heads}) does not divide; make it a "
        "multiple of {heads}.",
        {"hidden": _config("hidden_size"), "heads": _config("num_attention_heads")},
    ),
    Rule(
        _SCRATCH,
        _divided("num_attention_heads", "num_key_value_heads"),
        None,
        "{path}.config.num_attention_heads is {heads}, which num_key_value_heads ({groups}) does not divide; make it a "
        "multiple of {groups}.",
        {"heads": _config("num_attention_heads"), "groups": _config("num_key_value_heads")},
    ),
    Rule(
        _LORAS,
        _no_full_dropout,
        "self.dropout < 1.0",
        "{path}.dropout is 1, which drops everything; use less, such as 0.05.",
    ),
    Rule(
        _LORAS,
        lambda lora: len(set(lora.target_modules)) == len(lora.target_modules),
        None,
        "{path}.targetModules names a module twice; name each once.",
        by_type=True,
    ),
    *(_trainable(name) for name in ("actor", "critic", "reward")),
    _spec(
        lambda spec: spec.models.actor.source is not None,
        "has(self.models.actor.source)",
        "spec.models.actor.source is required: give exactly one of huggingFace, path, pvc and scratch "
        "(for example `path: models/my-model`).",
    ),
    Rule(
        ("spec.models.reference",),
        lambda model: model.lora is None,
        "!has(self.lora)",
        "{path}.lora has no effect, for the reference is not trained; remove it.",
    ),
)

# ---------------------------------------------------------------- reward

_CALLS = "(has(self.models.reward.__function__) || has(self.models.reward.functions))"


def _calls_field(reward: RewardModel) -> str:
    return "functions" if reward.functions is not None else "function"


def _not_beside_functions(name: str) -> Rule:
    return Rule(
        ("spec.models.reward",),
        lambda reward: not reward.calls or getattr(reward, name) is None,
        f"!(has(self.__function__) || has(self.functions)) || !has(self.{name})",
        f"{{path}}.{name} cannot go with {{path}}.{{calls}}, which replaces the reward model; remove one of them.",
        {"calls": Value(_calls_field, ("has(self.functions) ? 'functions' : 'function'",))},
    )


def _different_titles(functions: list[RewardFunction]) -> bool:
    return len({function.title for function in functions}) == len(functions)


def _trained_elsewhere(spec: RLHFJobSpec) -> bool:
    """Whether PPO takes its rewards from a model that the job does not train."""
    return Stage.PPO in spec.stages and Stage.REWARD not in spec.stages and not spec.models.reward.calls


_NOT_TRAINED_ELSEWHERE = f"!('ppo' in self.stages) || 'reward' in self.stages || {_CALLS} || "
_TITLE = "(has({0}.name) ? {0}.name : {0}.__function__.substring({0}.__function__.indexOf(':') + 1))"

_REWARD = (
    Rule(
        ("spec.models.reward",),
        lambda reward: reward.function is None or reward.functions is None,
        "!has(self.__function__) || !has(self.functions)",
        "{path} has both function and functions; move the one into the list of the others.",
    ),
    *(_not_beside_functions(name) for name in ("source", "lora")),
    _spec(
        lambda spec: not spec.models.reward.calls or spec.stages != [Stage.REWARD],
        f"!{_CALLS} || self.stages != ['reward']",
        "spec.stages has only reward, but spec.models.reward.{calls} replaces the reward model; remove the function or "
        "add ppo.",
        {
            "calls": Value(
                lambda spec: _calls_field(spec.models.reward),
                ("has(self.models.reward.functions) ? 'functions' : 'function'",),
            )
        },
    ),
    Rule(
        ("spec.models.reward.functions",),
        _different_titles,
        f"self.all(f, self.exists_one(g, {_TITLE.format('g')} == {_TITLE.format('f')}))",
        "{path} has two of the same name; give each a `name` of its own.",
    ),
    Rule(
        ("spec.models.reward.functions",),
        lambda functions: any(function.weight != 0 for function in functions),
        "self.exists(f, f.weight != 0.0)",
        "{path} gives every function the weight 0; give one another weight.",
    ),
    _spec(
        lambda spec: not _trained_elsewhere(spec) or spec.models.reward.source is not None,
        f"{_NOT_TRAINED_ELSEWHERE}has(self.models.reward.source)",
        "spec.models.reward needs a source or a function when spec.stages has ppo without reward; "
        "give the folder of a trained reward model in spec.models.reward.source.path.",
    ),
    _spec(
        lambda spec: (
            not _trained_elsewhere(spec)
            or spec.models.reward.source is None
            or spec.models.reward.source.scratch is None
        ),
        f"{_NOT_TRAINED_ELSEWHERE}!has(self.models.reward.source) || !has(self.models.reward.source.scratch)",
        "spec.models.reward.source.scratch is an untrained reward model, and spec.stages does not train it; "
        "add reward to spec.stages or name a trained model.",
    ),
)

# ---------------------------------------------------------------- tokenizer


def _not_both(tokenizer: Tokenizer) -> bool:
    return tokenizer.path is None or tokenizer.train is None


def _from_scratch(spec: RLHFJobSpec, unknown: bool) -> bool:
    """Whether the actor is trained from scratch; `unknown`: what to say of an actor without a source."""
    source = spec.models.actor.source
    return unknown if source is None else source.scratch is not None


_TOKENIZER = (
    Rule(
        ("spec.models.tokenizer",),
        _not_both,
        "!(has(self.path) && has(self.train))",
        "{path} has both path and train; give one of them.",
    ),
    _spec(
        lambda spec: (
            not _from_scratch(spec, unknown=False)
            or spec.models.tokenizer.path is not None
            or spec.models.tokenizer.train is not None
        ),
        "!has(self.models.actor.source) || !has(self.models.actor.source.scratch) "
        "|| has(self.models.tokenizer.path) || has(self.models.tokenizer.train)",
        "spec.models.tokenizer is required for an actor from scratch: give path, or train: {vocabSize: 512} "
        "to train one on the job's data.",
    ),
    _spec(
        lambda spec: spec.models.tokenizer.train is None or _from_scratch(spec, unknown=True),
        "!has(self.models.tokenizer.train) || !has(self.models.actor.source) || has(self.models.actor.source.scratch)",
        "spec.models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; "
        "remove it to use the actor's own tokenizer.",
    ),
)

# ---------------------------------------------------------------- data

_DATA_SOURCES = tuple(f"spec.data.{name}[]" for name in ("demonstrations", "preferences", "prompts"))


def _whole_unless_hub(source: DataSource) -> bool:
    return source.hugging_face is not None or source.split == "train"


def _subset_of_hub(source: DataSource) -> bool:
    return source.subset is None or source.hugging_face is not None


def _trains(stage: Stage) -> tuple[Callable[[RLHFJobSpec], bool], str]:
    """Whether the job trains the stage's model, in Python and in CEL."""
    if stage is Stage.REWARD:
        return (
            lambda spec: Stage.REWARD in spec.stages and not spec.models.reward.calls,
            f"'reward' in self.stages && !{_CALLS}",
        )
    return lambda spec: stage in spec.stages, f"'{stage.value}' in self.stages"


def _needed(stage: Stage, name: str) -> Rule:
    trains, cel = _trains(stage)
    return _spec(
        lambda spec: not trains(spec) or bool(getattr(spec.data, name)),
        f"!({cel}) || size(self.data.{name}) > 0",
        f"spec.data.{name} is empty, but the {stage.value} stage needs it; add a source or drop the stage from "
        "spec.stages.",
    )


def _has_share(stage: Stage) -> Rule:
    trains, cel = _trains(stage)
    return _spec(
        lambda spec: not trains(spec) or getattr(spec.data.split, stage.value) > 0,
        f"!({cel}) || self.data.split.{stage.value} > 0.0",
        f"spec.data.split.{stage.value} is 0, but spec.stages has {stage.value}; give it a share above 0.",
    )


_DATA = (
    *_one_of(_DATA_SOURCES, "huggingFace", "path", "synthetic"),
    Rule(
        _DATA_SOURCES,
        _subset_of_hub,
        "!has(self.subset) || has(self.huggingFace)",
        "{path}.subset belongs to huggingFace; remove it or give huggingFace.",
    ),
    Rule(
        (*_SOURCES, *_DATA_SOURCES),
        _revision,
        "!has(self.revision) || has(self.huggingFace)",
        "{path}.revision belongs to huggingFace; remove it or give huggingFace.",
    ),
    Rule(
        _DATA_SOURCES,
        _whole_unless_hub,
        "has(self.huggingFace) || self.split == 'train'",
        "{path}.split belongs to huggingFace; remove it, for files and synthetic data are used whole.",
    ),
    _needed(Stage.SFT, "demonstrations"),
    _needed(Stage.REWARD, "preferences"),
    _needed(Stage.PPO, "prompts"),
    *(_has_share(stage) for stage in Stage),
    _ppo(
        lambda spec: spec.ppo.ptx_coef == 0 or bool(spec.data.demonstrations),
        "self.ppo.ptxCoef == 0.0 || size(self.data.demonstrations) > 0",
        "spec.ppo.ptxCoef is above 0, but spec.data.demonstrations is empty; add a source or set ptxCoef to 0.",
    ),
    _spec(
        lambda spec: spec.data.held_out < 1,
        "self.data.heldOut < 1.0",
        "spec.data.heldOut is 1, which leaves nothing to train on; use less, such as 0.1.",
    ),
)

# ---------------------------------------------------------------- batch sizes


def _cut(stage: Stage, model: str, batch: str, micro: str, size: Callable[[RLHFJobSpec], tuple[int, int]]) -> Rule:
    """`size`: batch and micro-batch. One data-parallel rank must be able to take the whole batch: Auto may always
    choose one; whether the ranks then suffice is the planner's to say."""

    def holds(spec: RLHFJobSpec) -> bool:
        whole, part = size(spec)
        return stage not in spec.stages or whole % part == 0

    return _spec(
        holds,
        f"!('{stage.value}' in self.stages) || self.{batch} % self.{micro} == 0",
        cannot_cut(f"spec.{batch}", f"{{{batch}}}", f"spec.{micro}", f"{{{micro}}}", f"the {model}", f"{{{micro}}}")
        + ".",
    )


def _cut_on_ranks(stage: Stage, model: str, batch: str, micro: str) -> Rule:
    """The same on the data-parallel ranks that spec.plan.parallelism pins."""

    def pinned(spec: RLHFJobSpec) -> tuple[BatchRule, int] | None:
        rule = next((rule for rule in batch_rules(spec) if (rule.stage, rule.model) == (stage, model)), None)
        layouts = pinned_layouts(spec)
        if rule is None or layouts is None or (model == "critic" and layouts["actor"][1].dp == layouts[model][1].dp):
            return None
        return rule, layouts[model][1].dp

    def holds(spec: RLHFJobSpec) -> bool:
        found = pinned(spec)
        return found is None or found[1] == 1 or found[0].problem(found[1]) is None

    def of(value: Callable[[BatchRule, int], object]) -> Value:
        return Value(lambda spec: value(*found) if (found := pinned(spec)) else "")

    return _spec(
        holds,
        None,
        cannot_cut(
            f"spec.{batch}",
            f"{{{batch}}}",
            f"spec.{micro}",
            f"{{{micro}}}",
            f"{{dp}} data-parallel ranks of the {model}",
            "{multiple}",
        )
        + ".",
        {"dp": of(lambda rule, dp: dp), "multiple": of(lambda rule, dp: dp * rule.micro)},
    )


def _multiple_of(part: str, size: Callable[[RLHFJobSpec], int]) -> Rule:
    return _ppo(
        lambda spec: spec.ppo.global_batch_size % size(spec) == 0,
        f"self.ppo.globalBatchSize % self.ppo.{part} == 0",
        f"spec.ppo.globalBatchSize is {{ppo.globalBatchSize}}, which spec.ppo.{part} ({{ppo.{part}}}) does not divide; "
        f"make it a multiple of {{ppo.{part}}}.",
    )


_PPO_SIZES = ("ppo.miniBatchSize", "ppo.microBatchSize")
_SFT_SIZES = ("sft.batchSize", "sft.microBatchSize")
_REWARD_SIZES = ("reward.batchSize", "reward.microBatchSize")

_BATCHES = (
    _multiple_of("samplesPerPrompt", lambda spec: spec.ppo.samples_per_prompt),
    _multiple_of("miniBatchSize", lambda spec: spec.ppo.mini_batch_size),
    _cut(Stage.PPO, "actor", *_PPO_SIZES, lambda spec: (spec.ppo.mini_batch_size, spec.ppo.micro_batch_size)),
    _cut(Stage.SFT, "actor", *_SFT_SIZES, lambda spec: (spec.sft.batch_size, spec.sft.micro_batch_size)),
    _cut(Stage.REWARD, "reward", *_REWARD_SIZES, lambda spec: (spec.reward.batch_size, spec.reward.micro_batch_size)),
    _cut_on_ranks(Stage.PPO, "actor", *_PPO_SIZES),
    _cut_on_ranks(Stage.PPO, "critic", *_PPO_SIZES),
    _cut_on_ranks(Stage.SFT, "actor", *_SFT_SIZES),
    _cut_on_ranks(Stage.REWARD, "reward", *_REWARD_SIZES),
)

# ---------------------------------------------------------------- PPO and generation

_KL_IN_LOSS = "(self.ppo.kl.__in__ == 'Loss' || (self.ppo.kl.__in__ == 'Auto' && self.ppo.advantage == 'grpo'))"

_PPO = (
    _ppo(
        lambda spec: spec.ppo.advantage == "gae" or spec.ppo.samples_per_prompt >= 2,
        "self.ppo.advantage == 'gae' || self.ppo.samplesPerPrompt >= 2",
        "spec.ppo.samplesPerPrompt is {ppo.samplesPerPrompt}, but {ppo.advantage} compares samples of the same prompt; "
        "set it to 2 or more.",
    ),
    _ppo(
        lambda spec: spec.ppo.advantage == "gae" or spec.ppo.critic_warmup_iterations == 0,
        "self.ppo.advantage == 'gae' || self.ppo.criticWarmupIterations == 0",
        "spec.ppo.criticWarmupIterations is {ppo.criticWarmupIterations}, but {ppo.advantage} has no critic; "
        "remove it.",
    ),
    _ppo(
        lambda spec: spec.ppo.critic_warmup_iterations < spec.ppo.iterations,
        "self.ppo.criticWarmupIterations < self.ppo.iterations",
        "spec.ppo.criticWarmupIterations ({ppo.criticWarmupIterations}) leaves no iteration that trains the actor; "
        "make it less than spec.ppo.iterations ({ppo.iterations}).",
    ),
    _ppo(
        lambda spec: spec.ppo.kl.estimator not in ("k2", "k3") or spec.ppo.kl_in_loss,
        f"!(self.ppo.kl.estimator in ['k2', 'k3']) || {_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is {ppo.kl.estimator}, which in the reward lowers another quantity than the KL; "
        "use k1, or set spec.ppo.kl.in to Loss.",
    ),
    _ppo(
        lambda spec: spec.ppo.kl.estimator != "k1" or not spec.ppo.kl_in_loss,
        f"self.ppo.kl.estimator != 'k1' || !{_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0 on average; use k2 or k3, or set "
        "spec.ppo.kl.in to Reward.",
    ),
    _ppo(
        lambda spec: (
            not spec.ppo.kl_in_loss
            or spec.ppo.advantage != "gae"
            or not spec.ppo.whiten_advantages
            or spec.ppo.advantage_function is not None
        ),
        f"!{_KL_IN_LOSS} || self.ppo.advantage != 'gae' || !self.ppo.whitenAdvantages "
        "|| has(self.ppo.advantageFunction)",
        "spec.ppo.kl.in is Loss, but spec.ppo.whitenAdvantages divides by the advantages' deviation, beside which "
        "the penalty has no fixed weight; set whitenAdvantages to false, or kl.in to Reward.",
    ),
    _ppo(
        lambda spec: spec.ppo.normalize_std or spec.ppo.advantage == "grpo",
        "self.ppo.normalizeStd || self.ppo.advantage == 'grpo'",
        "spec.ppo.normalizeStd is false, but {ppo.advantage} does not divide by a group's deviation; remove it.",
    ),
    _ppo(
        lambda spec: not spec.ppo.whiten_rewards or spec.ppo.advantage != "grpo" or not spec.ppo.normalize_std,
        "!self.ppo.whitenRewards || self.ppo.advantage != 'grpo' || !self.ppo.normalizeStd",
        "spec.ppo.whitenRewards has no effect with grpo, which divides by each group's own deviation; remove it, "
        "or set spec.ppo.normalizeStd to false.",
    ),
    _ppo(
        lambda spec: spec.ppo.old_log_probs != "Rollout" or spec.generation.temperature == 1.0,
        "self.ppo.oldLogProbs != 'Rollout' || self.generation.temperature == 1.0",
        "spec.ppo.oldLogProbs is Rollout, but rollouts report log-probabilities at temperature 1 and the trainer's are "
        "at spec.generation.temperature, which is not 1; use Recompute or Auto.",
    ),
    _ppo(
        lambda spec: spec.ppo.kl.target is None or spec.ppo.kl.coef > 0,
        "!has(self.ppo.kl.target) || self.ppo.kl.coef > 0.0",
        "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move; start above 0 or drop target.",
    ),
    _spec(
        lambda spec: spec.generation.min_tokens <= spec.generation.max_tokens,
        "self.generation.minTokens <= self.generation.maxTokens",
        "spec.generation.minTokens ({generation.minTokens}) is above spec.generation.maxTokens "
        "({generation.maxTokens}); lower it.",
    ),
)

# ---------------------------------------------------------------- a value head on the actor's body

_SHARED = "cannot go with spec.models.critic.shareActorBody"
_OWN = "which leaves no critic model; remove one of them."
_OPTIMIZER = {
    name: repr(value) if isinstance(value, str) else str(value).lower()
    for name, value in Optimizer().model_dump(mode="json", by_alias=True).items()
}


def _shared(holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str) -> Rule:
    """A rule for a critic that is a head on the actor's body."""
    return _ppo(
        lambda spec: not shares_body(spec) or holds(spec),
        None if cel is None else f"self.ppo.advantage != 'gae' || !self.models.critic.shareActorBody || ({cel})",
        sentence,
    )


_SHARED_BODY = (
    _shared(
        lambda spec: spec.models.critic.source is None,
        "!has(self.models.critic.source)",
        f"spec.models.critic.source {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.models.critic.lora is None,
        "!has(self.models.critic.lora)",
        f"spec.models.critic.lora {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.models.critic.dtype is Dtype.AUTO,
        "self.models.critic.dtype == 'Auto'",
        f"spec.models.critic.dtype {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.ppo.critic_optimizer == Optimizer(),
        " && ".join(f"self.ppo.criticOptimizer.{name} == {value}" for name, value in _OPTIMIZER.items()),
        f"spec.ppo.criticOptimizer {_SHARED}: spec.ppo.actorOptimizer steps both heads; remove it.",
    ),
    _shared(
        lambda spec: spec.ppo.critic_warmup_iterations == 0,
        "self.ppo.criticWarmupIterations == 0",
        f"spec.ppo.criticWarmupIterations {_SHARED}: the value head does not train without the actor; remove it.",
    ),
    _shared(
        lambda spec: spec.plan.parallelism == "Auto" or spec.plan.parallelism.critic is None,
        None,
        f"spec.plan.parallelism.critic {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.plan.intra_stage_fusion in ("Auto", "Serial"),
        "self.plan.intraStageFusion in ['Auto', 'Serial']",
        f"spec.plan.intraStageFusion Fused, TimeSharing or Dedicated {_SHARED}, which leaves one model to train; set "
        "it to Auto or Serial.",
    ),
)

# ---------------------------------------------------------------- groups


def _twice(groups: list[Group]) -> list[str]:
    names = [group.name for group in groups]
    return sorted({name for name in names if names.count(name) > 1})


def _trainers_alike(groups: list[Group]) -> bool:
    return len({group.gpu.product is None for group in groups if Role.TRAINER in group.roles}) < 2


def _ordered(group: Group) -> bool:
    return group.min_replicas is None or group.max_replicas is None or group.min_replicas <= group.max_replicas


def _within(group: Group) -> bool:
    count = group.replicas
    if count is None or not _ordered(group):
        return True
    return (group.min_replicas or 1) <= count <= (group.max_replicas or count)


def _fixed(group: Group) -> bool:
    bounds = {bound for bound in (group.min_replicas, group.max_replicas) if bound is not None}
    return Role.TRAINER not in group.roles or bounds <= {group.replicas}


def _option(argument: str) -> str:
    return argument.split("=", 1)[0].replace("_", "-")


_OPTION = "self.split('=', 2)[0].replace('_', '-')"
_RESERVED = "[" + ", ".join(f"'{option}'" for option in RESERVED_VLLM_ARGS) + "]"

_GROUPS = (
    Rule(
        ("spec.groups",),
        lambda groups: not _twice(groups),
        None,
        "{path} has {names} twice; give every group a name of its own.",
        {"names": Value(lambda groups: " and ".join(map(repr, _twice(groups))))},
        by_type=True,
    ),
    Rule(
        ("spec.groups",),
        lambda groups: any(Role.TRAINER in group.roles for group in groups),
        "self.exists(g, 'trainer' in g.roles)",
        "{path} has no group with the role trainer; add `trainer` to the roles of one.",
    ),
    _ppo(
        lambda spec: any(Role.ROLLOUT in group.roles for group in spec.groups),
        "self.groups.exists(g, 'rollout' in g.roles)",
        "spec.groups has no group with the role rollout, but the ppo stage generates; add `rollout` to one.",
    ),
    Rule(
        ("spec.groups",),
        _trainers_alike,
        "!(self.exists(g, 'trainer' in g.roles && has(g.gpu.product)) "
        "&& self.exists(g, 'trainer' in g.roles && !has(g.gpu.product)))",
        "{path} mixes trainer groups with and without GPUs; "
        "all trainer ranks work in step, so give all of them GPUs or none.",
    ),
    Rule(
        ("spec.groups[]",),
        lambda group: len(set(group.roles)) == len(group.roles),
        None,
        "{path}.roles names a role twice; name each once.",
        by_type=True,
    ),
    _group(
        _ordered,
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "{path}.minReplicas ({minReplicas}) is above maxReplicas ({maxReplicas}); lower it.",
    ),
    _group(
        _within,
        "!has(self.replicas) || (has(self.minReplicas) && has(self.maxReplicas) "
        "&& self.minReplicas > self.maxReplicas) || ((!has(self.minReplicas) || self.minReplicas <= self.replicas) "
        "&& (!has(self.maxReplicas) || self.replicas <= self.maxReplicas))",
        "{path}.replicas ({replicas}) must be within minReplicas and maxReplicas (from {low}{high}).",
        {
            "low": Value(lambda group: group.min_replicas or 1, ("has(self.minReplicas) ? self.minReplicas : 1",)),
            "high": Value(
                lambda group: f" to {group.max_replicas}" if group.max_replicas else " up",
                (
                    "has(self.maxReplicas) ? ' to ' : ' up'",
                    "has(self.maxReplicas) ? string(self.maxReplicas) : ''",
                ),
            ),
        },
    ),
    _group(
        _fixed,
        "!('trainer' in self.roles) || ((!has(self.minReplicas) || (has(self.replicas) && self.minReplicas == "
        "self.replicas)) && (!has(self.maxReplicas) || (has(self.replicas) && self.maxReplicas == self.replicas)))",
        "{path} has the role trainer, whose number of pods is fixed; set replicas and remove minReplicas and "
        "maxReplicas.",
    ),
    _group(
        lambda group: group.gpu.product is not None or group.gpu.per_pod <= 1,
        "has(self.gpu.product) || self.gpu.perPod <= 1",
        "{path}.gpu.perPod is {gpu.perPod} without gpu.product; name the product or remove perPod.",
    ),
    _group(
        lambda group: group.gpu.product is None or group.gpu.per_pod > 0,
        "!has(self.gpu.product) || self.gpu.perPod > 0",
        "{path}.gpu.perPod is 0, but gpu.product names a GPU; set perPod to 1 or more, or remove product.",
    ),
    _group(
        lambda group: Role.ROLLOUT in group.roles or not group.vllm_args,
        "'rollout' in self.roles || size(self.vllmArgs) == 0",
        "{path}.vllmArgs has no effect without the role rollout; remove it.",
    ),
    Rule(
        ("spec.groups[].vllmArgs[]",),
        lambda argument: _option(argument) not in RESERVED_VLLM_ARGS,
        f"!({_OPTION} in {_RESERVED})",
        "{path}: {option} is set by Dovetail; remove it.",
        {"option": Value(_option, (_OPTION,))},
    ),
    _group(
        lambda group: Role.ROLLOUT not in group.roles or group.name not in ("trainer", "coordinator"),
        "!('rollout' in self.roles) || !(self.name in ['trainer', 'coordinator'])",
        "{path}.name '{name}' is the name of other processes; choose another, such as `rollouts`.",
    ),
    _group(
        lambda group: (
            Role.ROLLOUT not in group.roles
            or group.dtype is not Dtype.BFLOAT16
            or group.gpu.product is None
            or "V100" not in group.gpu.product
        ),
        "!('rollout' in self.roles) || self.dtype != 'bfloat16' || !has(self.gpu.product) "
        "|| !self.gpu.product.contains('V100')",
        "{path}.dtype is bfloat16, which {gpu.product} does not have; use float16 or float32.",
    ),
)

# ---------------------------------------------------------------- pinned layouts


def _laid_out(spec: RLHFJobSpec, name: str) -> tuple[str, Parallelism] | None:
    """The first trained model that spec.plan.parallelism.<name> lays out, and its layout."""
    pinned = pinned_layouts(spec)
    if pinned is None or trainer_world(spec) == 0:
        return None
    field_name = f"spec.plan.parallelism.{name}"
    return next(((model, pinned[model][1]) for model in trained_models(spec) if pinned[model][0] == field_name), None)


def _layers(spec: RLHFJobSpec, model: str) -> int | None:
    source = getattr(spec.models, model).source or spec.models.actor.source
    return architecture_layers(source.scratch) if source and source.scratch else None


def _of_layout(name: str, value: Callable[[RLHFJobSpec, str, Parallelism], object]) -> Value:
    return Value(lambda spec: value(spec, *found) if (found := _laid_out(spec, name)) else "")


def _fills_the_ranks(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        return found is None or world_size(found[1]) == trainer_world(spec)

    return _spec(
        holds,
        None,
        f"spec.plan.parallelism.{name}: pp {{pp}} x tp {{tp}} x dp {{dp}} is {{ranks}} ranks, but the trainer groups "
        "have {world}; make the product {world}.",
        {
            "pp": _of_layout(name, lambda spec, model, layout: layout.pp),
            "tp": _of_layout(name, lambda spec, model, layout: layout.tp),
            "dp": _of_layout(name, lambda spec, model, layout: layout.dp),
            "ranks": _of_layout(name, lambda spec, model, layout: world_size(layout)),
            "world": Value(trainer_world),
        },
    )


def _layer_for_each_stage(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        found = _laid_out(spec, name)
        layers = _layers(spec, found[0]) if found else None
        return found is None or layers is None or found[1].pp <= layers

    return _spec(
        holds,
        None,
        f"spec.plan.parallelism.{name}.pp is {{pp}}, but the {{model}} has only {{layers}} layers; lower it.",
        {
            "pp": _of_layout(name, lambda spec, model, layout: layout.pp),
            "model": _of_layout(name, lambda spec, model, layout: model),
            "layers": _of_layout(name, lambda spec, model, layout: _layers(spec, model)),
        },
    )


def _whole_adapters(model: str) -> Rule:
    def pinned(spec: RLHFJobSpec) -> tuple[str, Parallelism]:
        return (pinned_layouts(spec) or {}).get(model, ("", Parallelism()))

    def holds(spec: RLHFJobSpec) -> bool:
        if model not in trained_models(spec) or trainer_world(spec) == 0:
            return True
        return pinned(spec)[1].tp == 1 or getattr(spec.models, model).lora is None

    return _spec(
        holds,
        None,
        f"{{field}}.tp is {{tp}}, but adapters (spec.models.{model}.lora) are not split over tensor-parallel ranks; "
        "make tp 1, or remove lora.",
        {"field": Value(lambda spec: pinned(spec)[0]), "tp": Value(lambda spec: pinned(spec)[1].tp)},
    )


def _actor_and_critic(spec: RLHFJobSpec) -> tuple[Parallelism, Parallelism]:
    """Their pinned layouts; two equal ones where nothing is pinned or no critic is trained."""
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


_LAYOUTS = (
    *(rule for name in ("actor", "critic") for rule in (_fills_the_ranks(name), _layer_for_each_stage(name))),
    *(_whole_adapters(model) for model in ("actor", "critic", "reward")),
    _spec(
        _same_tensor_parallel,
        None,
        "spec.plan.parallelism: the actor's tp {actor} and the critic's tp {critic} differ, but both train on the same "
        "ranks in turn; make them equal.",
        {
            "actor": Value(lambda spec: _actor_and_critic(spec)[0].tp),
            "critic": Value(lambda spec: _actor_and_critic(spec)[1].tp),
        },
    ),
    _spec(
        _pipelines_divide,
        None,
        "spec.plan.parallelism: the actor's pp {actor} and the critic's pp {critic} do not divide each other, so "
        "their pipelines cannot share a schedule; make the lower one of {fits}, or set spec.plan.intraStageFusion to "
        "Serial.",
        {
            "actor": Value(lambda spec: _actor_and_critic(spec)[0].pp),
            "critic": Value(lambda spec: _actor_and_critic(spec)[1].pp),
            "fits": Value(_divisors),
        },
    ),
)

# ---------------------------------------------------------------- what the actor's configuration allows


def _actor_config(spec: RLHFJobSpec) -> Mapping[str, Any]:
    """The configuration of an actor from scratch; {} for others."""
    source = spec.models.actor.source
    return source.scratch.config if source and source.scratch else {}


def _heads_fit(spec: RLHFJobSpec) -> bool:
    config = _actor_config(spec)
    on_cpu = any(Role.ROLLOUT in group.roles and group.on_cpu for group in spec.groups)
    if not on_cpu or not all(is_count(config.get(size, 1)) for size in SIZES):
        return True  # a size that is no number has a rule of its own
    return cpu_head_error(config) is None


def _positions(spec: RLHFJobSpec) -> int | None:
    """Longest sequence that the actor takes, tokens; None where the configuration does not say."""
    positions = _actor_config(spec).get("max_position_embeddings")
    return positions if is_count(positions) else None


def _longest(spec: RLHFJobSpec) -> int:
    return spec.data.max_prompt_tokens + spec.generation.max_tokens


_POSITIONS = Value(_positions)

_CONFIGURATION = (
    _ppo(
        _heads_fit,
        None,
        f"spec.models.actor.source.scratch.config: {unsupported_heads('{size}')}.",
        {"size": Value(lambda spec: head_size(_actor_config(spec)))},
    ),
    _ppo(
        lambda spec: _longest(spec) <= (_positions(spec) or _longest(spec)),
        None,
        "spec.data.maxPromptTokens + spec.generation.maxTokens is {longest}, but the actor has "
        "max_position_embeddings {positions}; lower the former or raise the latter.",
        {
            "longest": Value(_longest),
            "positions": _POSITIONS,
        },
    ),
    _spec(
        lambda spec: (
            not {Stage.SFT, Stage.REWARD} & set(spec.stages)
            or spec.data.max_tokens <= (_positions(spec) or spec.data.max_tokens)
        ),
        None,
        "spec.data.maxTokens is {data.maxTokens}, but the actor has max_position_embeddings {positions}; "
        "lower the former or raise the latter.",
        {"positions": _POSITIONS},
    ),
)

RULES: tuple[Rule, ...] = (
    *_STAGES,
    *_MODELS,
    *_REWARD,
    *_TOKENIZER,
    *_DATA,
    *_BATCHES,
    *_PPO,
    *_SHARED_BODY,
    *_GROUPS,
    *_LAYOUTS,
    *_CONFIGURATION,
)

CEL_RULES: tuple[CelRule, ...] = tuple(found for rule in RULES for found in rule.cel_rules())
