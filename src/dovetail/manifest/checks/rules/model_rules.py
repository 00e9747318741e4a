"""Rules about stages, models, rewards, trackers and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.manifest.checks.rules.rule import CALLS, Rule, Value, listed, one_of, spec_rule
from dovetail.manifest.checks.scratch import SIZES, is_count
from dovetail.manifest.fixed_names import MODEL_NAMES
from dovetail.manifest.types import (
    ScratchModel,
    Stage,
)

# ---------------------------------------------------------------- stages

_ORDER = tuple(Stage)


STAGE_RULES = (
    Rule(
        ("spec.stages",),
        "self.all(s, self.exists_one(t, t == s))",
        "{path} names a stage twice; name each once.",
    ),
    Rule(
        ("spec.stages",),
        "!self.all(s, self.exists_one(t, t == s)) || self == ['sft', 'reward', 'dpo', 'ppo'].filter(s, s in self)",
        "{path} must be in the order sft, reward, dpo, ppo; write [{order}].",
        {"order": listed({stage.value: f"'{stage.value}' in self" for stage in _ORDER}, ", ")},
    ),
    Rule(
        ("spec.stages",),
        "!('dpo' in self) || !('reward' in self || 'ppo' in self)",
        "{path} has dpo beside reward or ppo, which it takes the place of; remove it or them.",
    ),
)

DPO_RULES = (
    spec_rule(
        "self.dpo.labelSmoothing == 0.0 || self.dpo.loss == 'DPO'",
        "spec.dpo.labelSmoothing is for loss DPO, but spec.dpo.loss is {dpo.loss}; remove one of them.",
    ),
    spec_rule(
        "!('dpo' in self.stages) || self.dpo.loss != 'KTO' || self.dpo.batchSize >= 2",
        "spec.dpo.batchSize is 1, but loss KTO compares the pairs of a batch; make it at least 2.",
    ),
)

# ---------------------------------------------------------------- where models and metrics go

OUTPUT_RULES = (
    *one_of(("spec.output",), "path", "pvc", "s3"),
    Rule(
        ("spec.output",),
        "!has(self.path) || !self.path.contains('://')",
        "{path}.path is an address, but a path is a folder of this machine; give s3 with bucket and prefix for object "
        "storage.",
    ),
)

TRACKER_RULES = (
    Rule(
        ("spec.trackers",),
        "self.all(t, self.exists_one(u, u.kind == t.kind))",
        "{path} names a kind twice; keep one of each.",
    ),
)

# ---------------------------------------------------------------- models

MODEL_SOURCES = tuple(f"spec.models.{name}.source" for name in MODEL_NAMES)
_SCRATCH = tuple(f"{source}.scratch" for source in MODEL_SOURCES)
_LORAS = tuple(f"spec.models.{name}.lora" for name in MODEL_NAMES)
_KINDS_OF_MODEL = ("huggingFace", "path", "pvc", "scratch")


def claim_rule(*at: str, what: str = "a folder") -> Rule:
    """The rule that `pvc` of these objects has the form claim/path."""
    return Rule(
        at,
        "!has(self.pvc) || self.pvc.matches('[^/]/+[^/]') && !self.pvc.matches('(^|/)[.][.](/|$)')",
        f"{{path}}.pvc must be claim/path, the claim's name and {what} in it; it is '{{pvc}}'.",
    )


def _trainable(name: str) -> Rule:
    return spec_rule(
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
    return lambda model: repr(model.config[name])


MODEL_RULES = (
    *one_of(MODEL_SOURCES, *_KINDS_OF_MODEL),
    claim_rule(*MODEL_SOURCES, "spec.models.tokenizer", "spec.models.reward.code", "spec.output"),
    Rule(
        _SCRATCH,
        lambda model: "vocab_size" not in model.config,
        "{path}.config.vocab_size comes from the tokenizer; remove it.",
    ),
    *(
        Rule(
            _SCRATCH,
            lambda model, size=size: size not in model.config or is_count(model.config[size]),  # type: ignore[misc]
            f"{{path}}.config.{size} must be a whole number of at least 1; it is {{value}}.",
            {"value": _config(size)},
        )
        for size in SIZES
    ),
    Rule(
        _SCRATCH,
        lambda model: "head_dim" in model.config or _divided("hidden_size", "num_attention_heads")(model),
        "{path}.config.hidden_size is {hidden}, which num_attention_heads ({heads}) does not divide; make it a "
        "multiple of {heads}.",
        {"hidden": _config("hidden_size"), "heads": _config("num_attention_heads")},
    ),
    Rule(
        _SCRATCH,
        _divided("num_attention_heads", "num_key_value_heads"),
        "{path}.config.num_attention_heads is {heads}, which num_key_value_heads ({groups}) does not divide; make it a "
        "multiple of {groups}.",
        {"heads": _config("num_attention_heads"), "groups": _config("num_key_value_heads")},
    ),
    Rule(
        _LORAS,
        "self.dropout < 1.0",
        "{path}.dropout is 1, which drops everything; use less, such as 0.05.",
    ),
    Rule(
        _LORAS,
        lambda lora: len(set(lora.target_modules)) == len(lora.target_modules),
        "{path}.targetModules names a module twice; name each once.",
        by_type=True,
    ),
    *(_trainable(name) for name in ("actor", "critic", "reward")),
    spec_rule(
        "has(self.models.actor.source)",
        "spec.models.actor.source is required: give exactly one of huggingFace, path, pvc and scratch "
        "(for example `path: models/my-model`).",
    ),
    Rule(
        ("spec.models.reference",),
        "!has(self.lora)",
        "{path}.lora has no effect, for the reference is not trained; remove it.",
    ),
    Rule(
        ("spec.models.reference",),
        "!has(self.routerAuxLossCoef)",
        "{path}.routerAuxLossCoef has no effect, for the reference is not trained; remove it.",
    ),
)

# ---------------------------------------------------------------- reward


def _not_beside_functions(name: str) -> Rule:
    return Rule(
        ("spec.models.reward",),
        f"!(has(self.__function__) || has(self.functions)) || !has(self.{name})",
        f"{{path}}.{name} cannot go with {{path}}.{{calls}}, which replaces the reward model; remove one of them.",
        {"calls": ("has(self.functions) ? 'functions' : 'function'",)},
    )


_NOT_TRAINED_ELSEWHERE = f"!('ppo' in self.stages) || 'reward' in self.stages || {CALLS} || "
_TITLE = "(has({0}.name) ? {0}.name : {0}.__function__.substring({0}.__function__.indexOf(':') + 1))"

REWARD_RULES = (
    Rule(
        ("spec.models.reward",),
        "!has(self.__function__) || !has(self.functions)",
        "{path} has both function and functions; move the one into the list of the others.",
    ),
    *(_not_beside_functions(name) for name in ("source", "lora")),
    spec_rule(
        f"!has(self.models.reward.code) || {CALLS} || self.evaluation.metrics.exists(m, m.contains(':'))",
        "spec.models.reward.code has no effect without a function; remove it, or name a function of it in "
        "spec.models.reward.function.",
    ),
    Rule(
        ("spec.models.reward",),
        "!has(self.code) || !has(self.importPath)",
        "{path} has both code and importPath; remove one of them.",
    ),
    *one_of(("spec.models.reward.code",), "configMap", "pvc"),
    spec_rule(
        f"!{CALLS} || self.stages != ['reward']",
        "spec.stages has only reward, but spec.models.reward.{calls} replaces the reward model; remove the function or "
        "add ppo.",
        {"calls": ("has(self.models.reward.functions) ? 'functions' : 'function'",)},
    ),
    Rule(
        ("spec.models.reward.functions",),
        f"self.all(f, self.exists_one(g, {_TITLE.format('g')} == {_TITLE.format('f')}))",
        "{path} has two of the same name; give each a `name` of its own.",
    ),
    Rule(
        ("spec.models.reward.functions",),
        "self.exists(f, !has(f.weight) || f.weight != 0.0)",
        "{path} gives every function the weight 0; give one another weight.",
    ),
    spec_rule(
        f"{_NOT_TRAINED_ELSEWHERE}has(self.models.reward.source)",
        "spec.models.reward needs a source or a function when spec.stages has ppo without reward; "
        "give the folder of a trained reward model in spec.models.reward.source.path.",
    ),
    spec_rule(
        f"{_NOT_TRAINED_ELSEWHERE}!has(self.models.reward.source) || !has(self.models.reward.source.scratch)",
        "spec.models.reward.source.scratch is an untrained reward model, and spec.stages does not train it; "
        "add reward to spec.stages or name a trained model.",
    ),
)

# ---------------------------------------------------------------- tokenizer


TOKENIZER_RULES = (
    Rule(
        ("spec.models.tokenizer",),
        "[has(self.path), has(self.pvc), has(self.train)].filter(given, given).size() < 2",
        "{path} has more than one of path, pvc and train; give one of them.",
    ),
    spec_rule(
        "!has(self.models.actor.source) || !has(self.models.actor.source.scratch) "
        "|| has(self.models.tokenizer.path) || has(self.models.tokenizer.pvc) || has(self.models.tokenizer.train)",
        "spec.models.tokenizer is required for an actor from scratch: give path, or train: {vocabSize: 512} "
        "to train one on the job's data.",
    ),
    spec_rule(
        "!has(self.models.tokenizer.train) || !has(self.models.actor.source) || has(self.models.actor.source.scratch)",
        "spec.models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; "
        "remove it to use the actor's own tokenizer.",
    ),
)
