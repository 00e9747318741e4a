"""Rules about evaluation."""

from __future__ import annotations

from dovetail.manifest.checks.rules.rule import Rule, ppo_rule

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
