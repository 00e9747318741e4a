"""Rules about stages, models, rewards and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.manifest.checks.rules.rule import CALLS, Rule, Value, listed, one_of, spec_rule
from dovetail.manifest.checks.scratch import SIZES, is_count
from dovetail.manifest.fixed_names import MODEL_NAMES
from dovetail.manifest.types import (
    DataSource,
    Dtype,
    LoRA,
    ModelSource,
    Output,
    RewardCode,
    RewardFunction,
    RewardModel,
    RLHFJobSpec,
    ScratchModel,
    Stage,
    Tokenizer,
    TrainedModel,
)

# ---------------------------------------------------------------- stages

_ORDER = tuple(Stage)


def _in_order(stages: list[Stage]) -> list[Stage]:
    return [stage for stage in _ORDER if stage in stages]


STAGE_RULES = (
    Rule(
        ("spec.stages",),
        lambda stages: len(set(stages)) == len(stages),
        "self.all(s, self.exists_one(t, t == s))",
        "{path} names a stage twice; name each once.",
    ),
    Rule(
        ("spec.stages",),
        lambda stages: len(set(stages)) != len(stages) or stages == _in_order(stages),
        "!self.all(s, self.exists_one(t, t == s)) || self == ['sft', 'reward', 'dpo', 'ppo'].filter(s, s in self)",
        "{path} must be in the order sft, reward, dpo, ppo; write [{order}].",
        {
            "order": Value(
                lambda stages: ", ".join(_in_order(stages)),
                listed({stage.value: f"'{stage.value}' in self" for stage in _ORDER}, ", "),
            )
        },
    ),
    Rule(
        ("spec.stages",),
        lambda stages: Stage.DPO not in stages or not {Stage.REWARD, Stage.PPO} & set(stages),
        "!('dpo' in self) || !('reward' in self || 'ppo' in self)",
        "{path} has dpo beside reward or ppo, which it takes the place of; remove it or them.",
    ),
)

DPO_RULES = (
    spec_rule(
        lambda spec: spec.dpo.label_smoothing == 0 or spec.dpo.loss == "DPO",
        "self.dpo.labelSmoothing == 0.0 || self.dpo.loss == 'DPO'",
        "spec.dpo.labelSmoothing is for loss DPO, but spec.dpo.loss is {dpo.loss}; remove one of them.",
    ),
    spec_rule(
        lambda spec: Stage.DPO not in spec.stages or spec.dpo.loss != "KTO" or spec.dpo.batch_size >= 2,
        "!('dpo' in self.stages) || self.dpo.loss != 'KTO' || self.dpo.batchSize >= 2",
        "spec.dpo.batchSize is 1, but loss KTO compares the pairs of a batch; make it at least 2.",
    ),
)

# ---------------------------------------------------------------- where models go

OUTPUT_RULES = (
    *one_of(("spec.output",), "path", "pvc", "s3"),
    Rule(
        ("spec.output",),
        lambda output: output.path is None or "://" not in output.path,
        "!has(self.path) || !self.path.contains('://')",
        "{path}.path is an address, but a path is a folder of this machine; give s3 with bucket and prefix for object "
        "storage.",
    ),
)

# ---------------------------------------------------------------- models

MODEL_SOURCES = tuple(f"spec.models.{name}.source" for name in MODEL_NAMES)
_SCRATCH = tuple(f"{source}.scratch" for source in MODEL_SOURCES)
_LORAS = tuple(f"spec.models.{name}.lora" for name in MODEL_NAMES)
_KINDS_OF_MODEL = ("huggingFace", "path", "pvc", "scratch")


def _claim_and_path(source: ModelSource | DataSource | Tokenizer | RewardCode | Output) -> bool:
    return source.pvc is None or ("/" in source.pvc.strip("/") and ".." not in source.pvc.split("/"))


def claim_rule(*at: str, what: str = "a folder") -> Rule:
    """The rule that `pvc` of these objects has the form claim/path."""
    return Rule(
        at,
        _claim_and_path,
        "!has(self.pvc) || self.pvc.matches('[^/]/+[^/]') && !self.pvc.matches('(^|/)[.][.](/|$)')",
        f"{{path}}.pvc must be claim/path, the claim's name and {what} in it; it is '{{pvc}}'.",
    )


def _no_full_dropout(lora: LoRA) -> bool:
    return lora.dropout < 1


def _trainable(name: str) -> Rule:
    def holds(spec: RLHFJobSpec) -> bool:
        model: TrainedModel = getattr(spec.models, name)
        return model.dtype is not Dtype.FLOAT16

    return spec_rule(
        holds,
        f"self.models.{name}.dtype != 'float16'",
        f"spec.models.{name}.dtype float16 cannot be trained in (it needs loss scaling); use bfloat16 or float32.",
    )


def _divided(whole: str, part: str) -> Callable[[ScratchModel], bool]:
    """Whether the configuration's number `part` divides `whole`. Another rule is about values that are no numbers."""

    def holds(model: ScratchModel) -> bool:
        config = model.config
        if not (is_count(config.get(whole)) and is_count(config.get(part))):
            return True
        return bool(config[whole] % config[part] == 0)

    return holds


def _config(name: str) -> Value:
    return Value(lambda model: repr(model.config[name]))


MODEL_RULES = (
    *one_of(MODEL_SOURCES, *_KINDS_OF_MODEL),
    claim_rule(*MODEL_SOURCES, "spec.models.tokenizer", "spec.models.reward.code", "spec.output"),
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
    spec_rule(
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
    Rule(
        ("spec.models.reference",),
        lambda model: model.router_aux_loss_coef is None,
        "!has(self.routerAuxLossCoef)",
        "{path}.routerAuxLossCoef has no effect, for the reference is not trained; remove it.",
    ),
)

# ---------------------------------------------------------------- reward


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


_NOT_TRAINED_ELSEWHERE = f"!('ppo' in self.stages) || 'reward' in self.stages || {CALLS} || "
_TITLE = "(has({0}.name) ? {0}.name : {0}.__function__.substring({0}.__function__.indexOf(':') + 1))"

REWARD_RULES = (
    Rule(
        ("spec.models.reward",),
        lambda reward: reward.function is None or reward.functions is None,
        "!has(self.__function__) || !has(self.functions)",
        "{path} has both function and functions; move the one into the list of the others.",
    ),
    *(_not_beside_functions(name) for name in ("source", "lora")),
    spec_rule(
        lambda spec: (
            spec.models.reward.code is None or bool(spec.models.reward.calls) or bool(spec.evaluation.functions)
        ),
        f"!has(self.models.reward.code) || {CALLS} || self.evaluation.metrics.exists(m, m.contains(':'))",
        "spec.models.reward.code has no effect without a function; remove it, or name a function of it in "
        "spec.models.reward.function.",
    ),
    Rule(
        ("spec.models.reward",),
        lambda reward: reward.code is None or reward.import_path is None,
        "!has(self.code) || !has(self.importPath)",
        "{path} has both code and importPath; remove one of them.",
    ),
    *one_of(("spec.models.reward.code",), "configMap", "pvc"),
    spec_rule(
        lambda spec: not spec.models.reward.calls or spec.stages != [Stage.REWARD],
        f"!{CALLS} || self.stages != ['reward']",
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
    spec_rule(
        lambda spec: not _trained_elsewhere(spec) or spec.models.reward.source is not None,
        f"{_NOT_TRAINED_ELSEWHERE}has(self.models.reward.source)",
        "spec.models.reward needs a source or a function when spec.stages has ppo without reward; "
        "give the folder of a trained reward model in spec.models.reward.source.path.",
    ),
    spec_rule(
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


def _one_at_most(tokenizer: Tokenizer) -> bool:
    return sum(value is not None for value in (tokenizer.path, tokenizer.pvc, tokenizer.train)) < 2


def _from_scratch(spec: RLHFJobSpec, unknown: bool) -> bool:
    """Whether the actor is trained from scratch. It is `unknown` for an actor without a source."""
    source = spec.models.actor.source
    return unknown if source is None else source.scratch is not None


TOKENIZER_RULES = (
    Rule(
        ("spec.models.tokenizer",),
        _one_at_most,
        "[has(self.path), has(self.pvc), has(self.train)].filter(given, given).size() < 2",
        "{path} has more than one of path, pvc and train; give one of them.",
    ),
    spec_rule(
        lambda spec: (
            not _from_scratch(spec, unknown=False)
            or spec.models.tokenizer.path is not None
            or spec.models.tokenizer.pvc is not None
            or spec.models.tokenizer.train is not None
        ),
        "!has(self.models.actor.source) || !has(self.models.actor.source.scratch) "
        "|| has(self.models.tokenizer.path) || has(self.models.tokenizer.pvc) || has(self.models.tokenizer.train)",
        "spec.models.tokenizer is required for an actor from scratch: give path, or train: {vocabSize: 512} "
        "to train one on the job's data.",
    ),
    spec_rule(
        lambda spec: spec.models.tokenizer.train is None or _from_scratch(spec, unknown=True),
        "!has(self.models.tokenizer.train) || !has(self.models.actor.source) || has(self.models.actor.source.scratch)",
        "spec.models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; "
        "remove it to use the actor's own tokenizer.",
    ),
)
