"""The rules between fields of a spec, which the type of a single field cannot express.

`RULES` is the only table. Each row (`Rule`) has the place of the rule, the rule in CEL, and the sentence for the user.
`check` runs the rules here. The CRD and the reference page are made from the same rows, so the API server refuses what
`dovetail validate` refuses, with the same sentences. CEL cannot see free-form objects (a scratch model's config) and
unions (plan.parallelism). Rows about these are Python functions. The operator checks them, and the condition Planned
has the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.checks.rules.data_rules import DATA_RULES, EVALUATION_RULES
from dovetail.manifest.checks.rules.group_rules import GROUP_RULES
from dovetail.manifest.checks.rules.layout_rules import CONFIGURATION_RULES, LAYOUT_RULES
from dovetail.manifest.checks.rules.model_rules import (
    DPO_RULES,
    MODEL_RULES,
    OUTPUT_RULES,
    REWARD_RULES,
    STAGE_RULES,
    TOKENIZER_RULES,
    TRACKER_RULES,
)
from dovetail.manifest.checks.rules.pod_rules import POD_RULES
from dovetail.manifest.checks.rules.ppo_rules import BATCH_RULES, PPO_RULES, SESSION_RULES, SHARED_BODY_RULES
from dovetail.manifest.checks.rules.rule import Objects, Rule
from dovetail.manifest.types import RLHFJobSpec

RULES: tuple[Rule, ...] = (
    *STAGE_RULES,
    *DPO_RULES,
    *OUTPUT_RULES,
    *MODEL_RULES,
    *REWARD_RULES,
    *TOKENIZER_RULES,
    *DATA_RULES,
    *BATCH_RULES,
    *PPO_RULES,
    *SESSION_RULES,
    *SHARED_BODY_RULES,
    *EVALUATION_RULES,
    *TRACKER_RULES,
    *GROUP_RULES,
    *POD_RULES,
    *LAYOUT_RULES,
    *CONFIGURATION_RULES,
)

CEL_RULES: tuple[CelRule, ...] = tuple(found for rule in RULES for found in rule.cel_rules())


def check(spec: RLHFJobSpec) -> list[str]:
    """One sentence for each rule that the spec breaks, with the field's path and the fix. [] if it breaks none."""
    objects = Objects(spec)
    (whole,) = objects.at("spec")
    too_large = [f"{path} must be below 2^63; it is {number}." for path, number in _too_large(whole.seen, "spec")]
    return too_large or [sentence for rule in RULES for _, sentence in rule.check(objects)]


def _too_large(seen: Any, path: str) -> Iterator[tuple[str, int]]:
    """The numbers that neither CEL nor the API server can hold."""
    if isinstance(seen, dict):
        for name, value in seen.items():
            yield from _too_large(value, f"{path}.{name}")
    elif isinstance(seen, list):
        for index, value in enumerate(seen):
            yield from _too_large(value, f"{path}[{index}]")
    elif isinstance(seen, int) and abs(seen) >= 2**63:
        yield path, seen
