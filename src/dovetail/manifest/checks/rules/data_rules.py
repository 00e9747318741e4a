"""Rules about data sets, and the evaluation on them."""

from __future__ import annotations

import re

from dovetail.manifest.checks.hub_names import address_fix
from dovetail.manifest.checks.rules.model_rules import MODEL_SOURCES, claim_rule
from dovetail.manifest.checks.rules.rule import CALLS, Rule, one_of, ppo_rule, spec_rule
from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.types import DataSource, ModelSource, RLHFJobSpec, Stage

# ---------------------------------------------------------------- data

_DATA_SOURCES = (
    *(f"spec.data.{name}[]" for name in DATA_KINDS),
    "spec.evaluation.prompts[]",
)


_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _trains(stage: Stage) -> str:
    """The expression that the job trains the stage's model."""
    return f"'reward' in self.stages && !{CALLS}" if stage is Stage.REWARD else f"'{stage.value}' in self.stages"


# These names are no options. A chat template gets them anyway, or they say how it is applied.
_GIVEN_TO_TEMPLATES = frozenset(
    (
        *("messages", "tools", "documents", "chat_template", "conversation", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    )
)


def is_option(name: str) -> bool:
    """Whether data.chatTemplateKwargs may have this name."""
    return bool(_OPTION.fullmatch(name)) and name not in _GIVEN_TO_TEMPLATES


def _no_options(spec: RLHFJobSpec) -> list[str]:
    """The names in data.chatTemplateKwargs that cannot be options of a template."""
    return sorted(name for name in spec.data.chat_template_kwargs if not is_option(name))


def _needed(stage: Stage, name: str) -> Rule:
    return spec_rule(
        f"!({_trains(stage)}) || size(self.data.{name}) > 0",
        f"spec.data.{name} is empty, but the {stage.value} stage needs it; add a source or drop the stage from "
        "spec.stages.",
    )


def _has_share(stage: Stage) -> Rule:
    share = "reward" if stage.has_pairs else stage.value
    return spec_rule(
        f"!({_trains(stage)}) || self.data.split.{share} > 0.0",
        f"spec.data.split.{share} is 0, but spec.stages has {stage.value}; give it a share above 0.",
    )


def _address(source: ModelSource | DataSource) -> tuple[str, str] | None:
    """The field with an address in place of a name or a path, and how to correct it."""
    for name, text in (("huggingFace", source.hugging_face), ("path", source.path)):
        if text is not None and (fix := address_fix(text)) is not None:
            moved = "" if name == "huggingFace" or not fix.startswith("write") else "huggingFace: "
            return f"{name}: {text}", fix.replace("write ", f"write {moved}")
    return None


DATA_RULES = (
    Rule(
        (*MODEL_SOURCES, *_DATA_SOURCES),
        lambda source: _address(source) is None,
        "{path}.{address} is an address; {fix}.",
        {
            "address": lambda source: (_address(source) or ("", ""))[0],
            "fix": lambda source: (_address(source) or ("", ""))[1],
        },
    ),
    *one_of(_DATA_SOURCES, "huggingFace", "path", "pvc", "synthetic"),
    claim_rule(*_DATA_SOURCES, what="a file or folder"),
    Rule(
        _DATA_SOURCES,
        "!has(self.subset) || has(self.huggingFace)",
        "{path}.subset belongs to huggingFace; remove it or give huggingFace.",
    ),
    Rule(
        (*MODEL_SOURCES, *_DATA_SOURCES),
        "!has(self.revision) || has(self.huggingFace)",
        "{path}.revision belongs to huggingFace; remove it or give huggingFace.",
    ),
    Rule(
        _DATA_SOURCES,
        "has(self.huggingFace) || !has(self.split) || self.split == 'train'",
        "{path}.split belongs to huggingFace; remove it, for files and synthetic data are used whole.",
    ),
    Rule(
        _DATA_SOURCES,
        "!has(self.systemPrompt) || !has(self.synthetic)",
        "{path}.systemPrompt opens conversations, but synthetic records are texts; remove it.",
    ),
    spec_rule(
        lambda spec: not _no_options(spec),
        "spec.data.chatTemplateKwargs has {names}, which cannot be an option of a chat template: a name has letters, "
        "digits and _, and messages, tools, documents and the tokenizer's tokens are given anyway; remove it.",
        {"names": lambda spec: ", ".join(_no_options(spec))},
    ),
    spec_rule(
        lambda spec: not spec.data.chat_template_kwargs or spec.models.tokenizer.train is None,
        "spec.data.chatTemplateKwargs are options of a chat template, but a tokenizer that the job trains "
        "(spec.models.tokenizer.train) has none; remove them.",
    ),
    _needed(Stage.SFT, "demonstrations"),
    _needed(Stage.REWARD, "preferences"),
    _needed(Stage.DPO, "preferences"),
    _needed(Stage.PPO, "prompts"),
    *(_has_share(stage) for stage in Stage),
    ppo_rule(
        "self.ppo.ptxCoef == 0.0 || size(self.data.demonstrations) > 0",
        "spec.ppo.ptxCoef is above 0, but spec.data.demonstrations is empty; add a source or set ptxCoef to 0.",
    ),
    spec_rule(
        "self.data.heldOut < 1.0",
        "spec.data.heldOut is 1, which leaves nothing to train on; use less, such as 0.1.",
    ),
)

# ---------------------------------------------------------------- evaluation

_NAME = "{0}.substring({0}.indexOf(':') + 1)"


def _needs_evaluations(field: str, given: str) -> Rule:
    return ppo_rule(
        f"!{given} || has(self.evaluation.everyIterations)",
        f"spec.evaluation.{field} has no effect without evaluations during PPO; set spec.evaluation.everyIterations, "
        f"or remove {field}.",
    )


EVALUATION_RULES = (
    _needs_evaluations("keepBest", "self.evaluation.keepBest"),
    _needs_evaluations("stopAfterNoGain", "has(self.evaluation.stopAfterNoGain)"),
    ppo_rule(
        "!has(self.evaluation.everyIterations) || size(self.evaluation.prompts) > 0 "
        "|| (self.evaluation.heldOut > 0 && self.data.heldOut > 0.0)",
        "spec.evaluation.everyIterations is given, but no prompts are kept for it; raise spec.evaluation.heldOut and "
        "spec.data.heldOut above 0, or name spec.evaluation.prompts.",
    ),
    ppo_rule(
        "self.evaluation.metrics.all(m, self.evaluation.metrics.exists_one(n, "
        f"{_NAME.format('n')} == {_NAME.format('m')}))",
        "spec.evaluation.metrics has two of the same name; remove one, or rename the function.",
    ),
)
