"""Rules about groups of pods."""

from __future__ import annotations

from dovetail.manifest.checks.rules.rule import Rule, group_rule, ppo_rule
from dovetail.manifest.fixed_names import COORDINATOR
from dovetail.manifest.types import Group

# These are set by the launcher or fixed by the protocol between the processes.
RESERVED_VLLM_ARGS = (
    "--host",
    "--port",
    "--model",
    "--served-model-name",
    "--tokenizer",
    "--load-format",
    "--weight-transfer-config",
    "--worker-extension-cls",
    "--middleware",
    "--api-key",
    "--data-parallel-size",
    "-dp",
    "--pipeline-parallel-size",
    "-pp",
)

# ---------------------------------------------------------------- groups


def _twice(groups: list[Group]) -> list[str]:
    names = [group.name for group in groups]
    return sorted({name for name in names if names.count(name) > 1})


_OPTION = "self.split('=', 2)[0].replace('_', '-')"
_RESERVED = "[" + ", ".join(f"'{option}'" for option in RESERVED_VLLM_ARGS) + "]"

GROUP_RULES = (
    Rule(
        ("spec.groups",),
        lambda groups: not _twice(groups),
        "{path} has {names} twice; give every group a name of its own.",
        {"names": lambda groups: " and ".join(map(repr, _twice(groups)))},
        by_type=True,
    ),
    Rule(
        ("spec.groups",),
        "self.exists(g, 'trainer' in g.roles)",
        "{path} has no group with the role trainer; add `trainer` to the roles of one.",
    ),
    ppo_rule(
        "self.groups.exists(g, 'rollout' in g.roles)",
        "spec.groups has no group with the role rollout, but the ppo stage generates; add `rollout` to one.",
    ),
    Rule(
        ("spec.groups",),
        "!(self.exists(g, 'trainer' in g.roles && has(g.gpu) && has(g.gpu.product)) "
        "&& self.exists(g, 'trainer' in g.roles && (!has(g.gpu) || !has(g.gpu.product))))",
        "{path} mixes trainer groups with and without GPUs; "
        "all trainer ranks work in step, so give all of them GPUs or none.",
    ),
    group_rule(
        f"self.name != '{COORDINATOR}'",
        f"{{path}}.name is {COORDINATOR}, which is the name of another process of the job; choose another.",
    ),
    Rule(
        ("spec.groups[]",),
        lambda group: len(set(group.roles)) == len(group.roles),
        "{path}.roles names a role twice; name each once.",
        by_type=True,
    ),
    group_rule(
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "{path}.minReplicas ({minReplicas}) is above maxReplicas ({maxReplicas}); lower it.",
    ),
    group_rule(
        "!has(self.replicas) || (has(self.minReplicas) && has(self.maxReplicas) "
        "&& self.minReplicas > self.maxReplicas) || ((!has(self.minReplicas) || self.minReplicas <= self.replicas) "
        "&& (!has(self.maxReplicas) || self.replicas <= self.maxReplicas))",
        "{path}.replicas ({replicas}) must be within minReplicas and maxReplicas (from {low}{high}).",
        {
            "low": ("has(self.minReplicas) ? self.minReplicas : 1",),
            "high": (
                "has(self.maxReplicas) ? ' to ' : ' up'",
                "has(self.maxReplicas) ? string(self.maxReplicas) : ''",
            ),
        },
    ),
    group_rule(
        "!('trainer' in self.roles) || ((!has(self.minReplicas) || (has(self.replicas) && self.minReplicas == "
        "self.replicas)) && (!has(self.maxReplicas) || (has(self.replicas) && self.maxReplicas == self.replicas)))",
        "{path} has the role trainer, whose number of pods is fixed; set replicas and remove minReplicas and "
        "maxReplicas.",
    ),
    group_rule(
        "!has(self.gpu) || has(self.gpu.product) || !has(self.gpu.perPod) || self.gpu.perPod <= 1",
        "{path}.gpu.perPod is {gpu.perPod} without gpu.product; name the product or remove perPod.",
    ),
    group_rule(
        "!has(self.gpu) || !has(self.gpu.product) || !has(self.gpu.perPod) || self.gpu.perPod > 0",
        "{path}.gpu.perPod is 0, but gpu.product names a GPU; set perPod to 1 or more, or remove product.",
    ),
    group_rule(
        "!has(self.gpu) || has(self.gpu.product) || !has(self.gpu.claimTemplate)",
        "{path}.gpu.claimTemplate is given without gpu.product, which the plan is made for; name the product.",
    ),
    group_rule(
        "'rollout' in self.roles || !has(self.vllmArgs) || size(self.vllmArgs) == 0",
        "{path}.vllmArgs has no effect without the role rollout; remove it.",
    ),
    Rule(
        ("spec.groups[].vllmArgs[]",),
        f"!({_OPTION} in {_RESERVED})",
        "{path}: {option} is set by Dovetail; remove it.",
        {"option": (_OPTION,)},
    ),
    group_rule(
        "!('rollout' in self.roles) || !(self.name in ['trainer', 'coordinator'])",
        "{path}.name '{name}' is the name of other processes; choose another, such as `rollouts`.",
    ),
    group_rule(
        "!('rollout' in self.roles) || !has(self.dtype) || self.dtype != 'bfloat16' || !has(self.gpu) "
        "|| !has(self.gpu.product) || !(self.gpu.product.contains('V100') || self.gpu.product.contains('T4'))",
        "{path}.dtype is bfloat16, which {gpu.product} does not have; use float16 or float32.",
    ),
)
