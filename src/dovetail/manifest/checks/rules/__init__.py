"""The rules between fields of a spec, which the type of a single field cannot express. The functions are pure.

`RULES` is the only table. Each row (`Rule`) has the place of the rule, a Python predicate, the same predicate in CEL,
and the sentence for the user. `check` runs the Python predicates. The CRD and the reference page are made from the same
rows. So the API server refuses what `dovetail validate` refuses, with the same sentences. CEL cannot see free-form
objects (a scratch model's config) and unions (plan.parallelism). Rows about these have no CEL. The operator checks
them, and the condition Planned has the result."""

from __future__ import annotations

from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.checks.rules.data_rules import DATA_RULES
from dovetail.manifest.checks.rules.evaluation_rules import EVALUATION_RULES
from dovetail.manifest.checks.rules.group_rules import GROUP_RULES
from dovetail.manifest.checks.rules.layout_rules import CONFIGURATION_RULES, LAYOUT_RULES
from dovetail.manifest.checks.rules.model_rules import (
    DPO_RULES,
    MODEL_RULES,
    OUTPUT_RULES,
    REWARD_RULES,
    STAGE_RULES,
    TOKENIZER_RULES,
)
from dovetail.manifest.checks.rules.pod_rules import POD_RULES
from dovetail.manifest.checks.rules.ppo_rules import BATCH_RULES, PPO_RULES, SHARED_BODY_RULES
from dovetail.manifest.checks.rules.rule import Objects, Rule
from dovetail.manifest.checks.rules.tracker_rules import TRACKER_RULES
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
    return [sentence for rule in RULES for _, sentence in rule.check(objects)]
