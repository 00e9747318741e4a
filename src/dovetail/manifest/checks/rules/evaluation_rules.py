"""Rules about evaluation."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.manifest.checks.rules.rule import Rule, ppo_rule
from dovetail.manifest.types import RLHFJobSpec, metric_name

_NAME = "{0}.substring({0}.indexOf(':') + 1)"


def _different_names(spec: RLHFJobSpec) -> bool:
    metrics = spec.evaluation.metrics
    return len({metric_name(metric) for metric in metrics}) == len(metrics)


def _needs_evaluations(field: str, given: Callable[[RLHFJobSpec], bool], cel: str) -> Rule:
    return ppo_rule(
        lambda spec: not given(spec) or spec.evaluation.every_iterations is not None,
        f"!{cel} || has(self.evaluation.everyIterations)",
        f"spec.evaluation.{field} has no effect without evaluations during PPO; set spec.evaluation.everyIterations, "
        f"or remove {field}.",
    )


EVALUATION_RULES = (
    _needs_evaluations("keepBest", lambda spec: spec.evaluation.keep_best, "self.evaluation.keepBest"),
    _needs_evaluations(
        "stopAfterNoGain",
        lambda spec: spec.evaluation.stop_after_no_gain is not None,
        "has(self.evaluation.stopAfterNoGain)",
    ),
    ppo_rule(
        lambda spec: (
            spec.evaluation.every_iterations is None
            or bool(spec.evaluation.prompts)
            or (spec.evaluation.held_out > 0 and spec.data.held_out > 0)
        ),
        "!has(self.evaluation.everyIterations) || size(self.evaluation.prompts) > 0 "
        "|| (self.evaluation.heldOut > 0 && self.data.heldOut > 0.0)",
        "spec.evaluation.everyIterations is given, but no prompts are kept for it; raise spec.evaluation.heldOut and "
        "spec.data.heldOut above 0, or name spec.evaluation.prompts.",
    ),
    ppo_rule(
        _different_names,
        "self.evaluation.metrics.all(m, self.evaluation.metrics.exists_one(n, "
        f"{_NAME.format('n')} == {_NAME.format('m')}))",
        "spec.evaluation.metrics has two of the same name; remove one, or rename the function.",
    ),
)
