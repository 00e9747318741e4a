"""The rules between fields again, in CEL, so that the API server refuses what `rules.py` refuses, and says so in the
same sentences. What CEL cannot see (free-form objects such as a scratch model's config) the operator checks.

The API server tries a rule also on the default of its object, before the fields inside have theirs: rules that read
defaulted fields of an object with a default belong to `spec`, which has none.
`function` and `in` are reserved words in CEL, which Kubernetes escapes as `__function__` and `__in__`."""

from __future__ import annotations

import re
from typing import NamedTuple

from dovetail.manifest.checks.rules import RESERVED_VLLM_ARGS
from dovetail.manifest.critic import SHARED_BODY_RULES

_HOLE = re.compile(r"\{([^{}]*\bself\b[^{}]*)\}")


class CelRule(NamedTuple):
    """`self` in `rule` is the object at `path`, dotted below the root ("" is the root); `[]` enters a list's items.

    `message` is the sentence of `dovetail validate`, from the item on where `path` enters a list; `{...self...}` in it
    is a CEL expression, whose value is written there. `field` is the path below `path` that is reported."""

    path: str
    rule: str
    message: str
    field: str | None = None

    def schema(self) -> dict[str, str]:
        """The entry of x-kubernetes-validations."""
        values = _HOLE.findall(self.message)
        said = {"message": self.message}
        if values:  # format() is the one way to build a string whose cost the API server can bound
            text = _HOLE.sub("%s", self.message.replace("%", "%%")).replace("'", "\\'")
            said = {"messageExpression": f"'{text}'.format([{', '.join(values)}])"}
        return {"rule": self.rule, **said} | ({"fieldPath": self.field} if self.field else {})


def _listed(flags: dict[str, str], separator: str) -> str:
    """Holes of a message that together write the names whose expression in `flags` is true."""
    holes, earlier = "", list(flags.values())
    for index, (name, flag) in enumerate(flags.items()):
        first = f"({' || '.join(earlier[:index])} ? '{separator}{name}' : '{name}')" if index else f"'{name}'"
        holes += f"{{{flag} ? {first} : ''}}"
    return holes


def _one_of(path: str, prefix: str, names: tuple[str, ...]) -> tuple[CelRule, CelRule]:
    flags = {name: f"has(self.{name})" for name in names}
    given, known = f"[{', '.join(flags.values())}]", ", ".join(names)
    too_many = f"{prefix}has {_listed(flags, ' and ')}; give exactly one of {known}."
    return (
        CelRule(path, f"{given}.exists(x, x)", f"{prefix}names nothing; give exactly one of {known}."),
        CelRule(path, f"{given}.filter(x, x).size() < 2", too_many),
    )


_MODELS = ("actor", "critic", "reward", "reference")
_DATA = ("demonstrations", "preferences", "prompts")
_IN_STAGES = {stage: f"'{stage}' in self" for stage in ("sft", "reward", "ppo")}
_PPO = "!('ppo' in self.stages) || "
_CALLS = "(has(self.models.reward.__function__) || has(self.models.reward.functions))"
_TRAINS_REWARD = f"'reward' in self.stages && !{_CALLS}"
_KL_IN_LOSS = "(self.ppo.kl.__in__ == 'Loss' || (self.ppo.kl.__in__ == 'Auto' && self.ppo.advantage == 'grpo'))"
_RESERVED = "[" + ", ".join(f"'{option}'" for option in RESERVED_VLLM_ARGS) + "]"
_OPTION = "self.split('=', 2)[0].replace('_', '-')"


def _divides(batch: str, micro: str, stage: str, models: str) -> CelRule:
    return CelRule(
        "spec",
        f"!('{stage}' in self.stages) || self.{batch} % self.{micro} == 0",
        f"spec.{batch} is {{self.{batch}}}, which cannot be cut into micro-batches of {{self.{micro}}} "
        f"(spec.{micro}) on the {models}; make it a multiple of {{self.{micro}}}.",
    )


def _models() -> list[CelRule]:
    rules = []
    for name in _MODELS:
        field = f"spec.models.{name}"
        rules += [
            *_one_of(f"{field}.source", f"{field}.source ", ("huggingFace", "path", "pvc", "scratch")),
            CelRule(
                f"{field}.source",
                "!has(self.revision) || has(self.huggingFace)",
                f"{field}.source.revision belongs to huggingFace; remove it or give huggingFace.",
            ),
            CelRule(
                f"{field}.source",
                "!has(self.pvc) || self.pvc.matches('[^/]/+[^/]')",
                f"{field}.source.pvc must be claim/path, the claim's name and a folder in it; it is '{{self.pvc}}'.",
            ),
            CelRule(
                f"{field}.lora",
                "self.dropout < 1.0",
                f"{field}.lora.dropout is 1, which drops everything; use less, such as 0.05.",
            ),
        ]
    for name in ("actor", "critic", "reward"):
        rules.append(
            CelRule(
                "spec",
                f"self.models.{name}.dtype != 'float16'",
                f"spec.models.{name}.dtype float16 cannot be trained in (it needs loss scaling); use bfloat16 or "
                "float32.",
            )
        )
    return [
        *rules,
        CelRule(
            "spec",
            "has(self.models.actor.source)",
            "spec.models.actor.source is required: give exactly one of huggingFace, path, pvc and scratch "
            "(for example `path: models/my-model`).",
        ),
        CelRule(
            "spec.models.reference",
            "!has(self.lora)",
            "spec.models.reference.lora has no effect, for the reference is not trained; remove it.",
        ),
    ]


def _reward() -> list[CelRule]:
    alone = f"!('ppo' in self.stages) || 'reward' in self.stages || {_CALLS} || "
    field = "spec.models.reward.{has(self.functions) ? 'functions' : 'function'}"
    name_of = "(has({0}.name) ? {0}.name : {0}.__function__.substring({0}.__function__.indexOf(':') + 1))"
    return [
        CelRule(
            "spec.models.reward",
            "!has(self.__function__) || !has(self.functions)",
            "spec.models.reward has both function and functions; move the one into the list of the others.",
        ),
        *(
            CelRule(
                "spec.models.reward",
                f"!(has(self.__function__) || has(self.functions)) || !has(self.{name})",
                f"spec.models.reward.{name} cannot go with {field}, which replaces the reward model; "
                "remove one of them.",
            )
            for name in ("source", "lora")
        ),
        CelRule(
            "spec",
            f"!{_CALLS} || self.stages != ['reward']",
            "spec.stages has only reward, but "
            "spec.models.reward.{has(self.models.reward.functions) ? 'functions' : 'function'} replaces the reward "
            "model; remove the function or add ppo.",
        ),
        CelRule(
            "spec.models.reward.functions",
            f"self.all(f, self.exists_one(g, {name_of.format('g')} == {name_of.format('f')}))",
            "spec.models.reward.functions has two of the same name; give each a `name` of its own.",
        ),
        CelRule(
            "spec.models.reward.functions",
            "self.exists(f, f.weight != 0.0)",
            "spec.models.reward.functions gives every function the weight 0; give one another weight.",
        ),
        CelRule(
            "spec",
            f"{alone}has(self.models.reward.source)",
            "spec.models.reward needs a source or a function when spec.stages has ppo without reward; "
            "give the folder of a trained reward model in spec.models.reward.source.path.",
        ),
        CelRule(
            "spec",
            f"{alone}!has(self.models.reward.source) || !has(self.models.reward.source.scratch)",
            "spec.models.reward.source.scratch is an untrained reward model, and spec.stages does not train it; "
            "add reward to spec.stages or name a trained model.",
        ),
    ]


def _tokenizer() -> list[CelRule]:
    return [
        CelRule(
            "spec.models.tokenizer",
            "!(has(self.path) && has(self.train))",
            "spec.models.tokenizer has both path and train; give one of them.",
        ),
        CelRule(
            "spec",
            "!has(self.models.actor.source) || !has(self.models.actor.source.scratch) "
            "|| has(self.models.tokenizer.path) || has(self.models.tokenizer.train)",
            "spec.models.tokenizer is required for an actor from scratch: give path, or train: {vocabSize: 512} "
            "to train one on the job's data.",
        ),
        CelRule(
            "spec",
            "!has(self.models.tokenizer.train) || !has(self.models.actor.source) "
            "|| has(self.models.actor.source.scratch)",
            "spec.models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; "
            "remove it to use the actor's own tokenizer.",
        ),
    ]


def _data() -> list[CelRule]:
    rules = []
    for name in _DATA:
        item = f"spec.data.{name}[]"
        rules += [
            *_one_of(item, "", ("huggingFace", "path", "synthetic")),
            CelRule(
                item,
                "!has(self.subset) || has(self.huggingFace)",
                "subset belongs to huggingFace; remove it or give huggingFace.",
            ),
            CelRule(
                item,
                "!has(self.revision) || has(self.huggingFace)",
                "revision belongs to huggingFace; remove it or give huggingFace.",
            ),
            CelRule(
                item,
                "has(self.huggingFace) || self.split == 'train'",
                "split belongs to huggingFace; remove it, for files and synthetic data are used whole.",
            ),
        ]
    needs = (
        ("demonstrations", "!('sft' in self.stages)", "the sft stage"),
        ("preferences", f"!({_TRAINS_REWARD})", "the reward stage"),
        ("prompts", "!('ppo' in self.stages)", "the ppo stage"),
    )
    rules += [
        CelRule(
            "spec",
            f"{unless} || size(self.data.{name}) > 0",
            f"spec.data.{name} is empty, but {who} needs it; add a source or drop the stage from spec.stages.",
        )
        for name, unless, who in needs
    ]
    shares = (
        ("sft", "!('sft' in self.stages)"),
        ("reward", f"!({_TRAINS_REWARD})"),
        ("ppo", "!('ppo' in self.stages)"),
    )
    rules += [
        CelRule(
            "spec",
            f"{unless} || self.data.split.{stage} > 0.0",
            f"spec.data.split.{stage} is 0, but spec.stages has {stage}; give it a share above 0.",
        )
        for stage, unless in shares
    ]
    return [
        *rules,
        CelRule(
            "spec",
            f"{_PPO}self.ppo.ptxCoef == 0.0 || size(self.data.demonstrations) > 0",
            "spec.ppo.ptxCoef is above 0, but spec.data.demonstrations is empty; add a source or set ptxCoef to 0.",
        ),
        CelRule(
            "spec",
            "self.data.heldOut < 1.0",
            "spec.data.heldOut is 1, which leaves nothing to train on; use less, such as 0.1.",
        ),
    ]


def _ppo() -> list[CelRule]:
    batch = "spec.ppo.globalBatchSize is {self.ppo.globalBatchSize}, which spec.ppo."
    return [
        *(
            CelRule(
                "spec",
                f"{_PPO}self.ppo.globalBatchSize % self.ppo.{part} == 0",
                f"{batch}{part} ({{self.ppo.{part}}}) does not divide; make it a multiple of {{self.ppo.{part}}}.",
            )
            for part in ("samplesPerPrompt", "miniBatchSize")
        ),
        _divides("ppo.miniBatchSize", "ppo.microBatchSize", "ppo", "actor"),
        _divides("sft.batchSize", "sft.microBatchSize", "sft", "actor"),
        _divides("reward.batchSize", "reward.microBatchSize", "reward", "reward"),
        CelRule(
            "spec",
            f"{_PPO}self.ppo.advantage == 'gae' || self.ppo.samplesPerPrompt >= 2",
            "spec.ppo.samplesPerPrompt is {self.ppo.samplesPerPrompt}, but {self.ppo.advantage} compares samples of "
            "the same prompt; set it to 2 or more.",
        ),
        CelRule(
            "spec",
            f"{_PPO}self.ppo.advantage == 'gae' || self.ppo.criticWarmupIterations == 0",
            "spec.ppo.criticWarmupIterations is {self.ppo.criticWarmupIterations}, but {self.ppo.advantage} has no "
            "critic; remove it.",
        ),
        CelRule(
            "spec",
            f"{_PPO}self.ppo.criticWarmupIterations < self.ppo.iterations",
            "spec.ppo.criticWarmupIterations ({self.ppo.criticWarmupIterations}) leaves no iteration that trains the "
            "actor; make it less than spec.ppo.iterations ({self.ppo.iterations}).",
        ),
        CelRule(
            "spec",
            f"{_PPO}!(self.ppo.kl.estimator in ['k2', 'k3']) || {_KL_IN_LOSS}",
            "spec.ppo.kl.estimator is {self.ppo.kl.estimator}, which in the reward lowers another quantity than the "
            "KL; use k1, or set spec.ppo.kl.in to Loss.",
        ),
        CelRule(
            "spec",
            f"{_PPO}self.ppo.kl.estimator != 'k1' || !{_KL_IN_LOSS}",
            "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0 on average; use k2 or k3, or set "
            "spec.ppo.kl.in to Reward.",
        ),
        CelRule(
            "spec",
            f"{_PPO}!{_KL_IN_LOSS} || self.ppo.advantage != 'gae' || !self.ppo.whitenAdvantages "
            "|| has(self.ppo.advantageFunction)",
            "spec.ppo.kl.in is Loss, but spec.ppo.whitenAdvantages divides by the advantages' deviation, beside which "
            "the penalty has no fixed weight; set whitenAdvantages to false, or kl.in to Reward.",
        ),
        CelRule(
            "spec",
            f"{_PPO}self.ppo.normalizeStd || self.ppo.advantage == 'grpo'",
            "spec.ppo.normalizeStd is false, but {self.ppo.advantage} does not divide by a group's deviation; "
            "remove it.",
        ),
        CelRule(
            "spec",
            f"{_PPO}!self.ppo.whitenRewards || self.ppo.advantage != 'grpo' || !self.ppo.normalizeStd",
            "spec.ppo.whitenRewards has no effect with grpo, which divides by each group's own deviation; remove it, "
            "or set spec.ppo.normalizeStd to false.",
        ),
        CelRule(
            "spec",
            f"{_PPO}!has(self.ppo.kl.target) || self.ppo.kl.coef > 0.0",
            "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move; start above 0 or drop target.",
        ),
        CelRule(
            "spec",
            "self.generation.minTokens <= self.generation.maxTokens",
            "spec.generation.minTokens ({self.generation.minTokens}) is above spec.generation.maxTokens "
            "({self.generation.maxTokens}); lower it.",
        ),
    ]


def _shared_body() -> list[CelRule]:
    apart = f"{_PPO}self.ppo.advantage != 'gae' || !self.models.critic.shareActorBody || "
    return [CelRule("spec", f"{apart}({r.kept})", r.message) for r in SHARED_BODY_RULES if r.kept is not None]


def _groups() -> list[CelRule]:
    low = "{has(self.minReplicas) ? self.minReplicas : 1}"
    high = "{has(self.maxReplicas) ? ' to ' : ' up'}{has(self.maxReplicas) ? string(self.maxReplicas) : ''}"
    return [
        CelRule(
            "spec.groups",
            "self.exists(g, 'trainer' in g.roles)",
            "spec.groups has no group with the role trainer; add `trainer` to the roles of one.",
        ),
        CelRule(
            "spec",
            f"{_PPO}self.groups.exists(g, 'rollout' in g.roles)",
            "spec.groups has no group with the role rollout, but the ppo stage generates; add `rollout` to one.",
        ),
        CelRule(
            "spec.groups",
            "!(self.exists(g, 'trainer' in g.roles && has(g.gpu.product)) "
            "&& self.exists(g, 'trainer' in g.roles && !has(g.gpu.product)))",
            "spec.groups mixes trainer groups with and without GPUs; "
            "all trainer ranks work in step, so give all of them GPUs or none.",
        ),
        CelRule(
            "spec.groups[]",
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas ({self.minReplicas}) is above maxReplicas ({self.maxReplicas}); lower it.",
        ),
        CelRule(
            "spec.groups[]",
            "!has(self.replicas) || (has(self.minReplicas) && has(self.maxReplicas) "
            "&& self.minReplicas > self.maxReplicas) || ((!has(self.minReplicas) || self.minReplicas <= self.replicas) "
            "&& (!has(self.maxReplicas) || self.replicas <= self.maxReplicas))",
            f"replicas ({{self.replicas}}) must be within minReplicas and maxReplicas (from {low}{high}).",
        ),
        CelRule(
            "spec.groups[]",
            "!('trainer' in self.roles) || ((!has(self.minReplicas) || (has(self.replicas) && self.minReplicas == "
            "self.replicas)) && (!has(self.maxReplicas) || (has(self.replicas) && self.maxReplicas == self.replicas)))",
            "has the role trainer, whose number of pods is fixed; set replicas and remove minReplicas and maxReplicas.",
        ),
        CelRule(
            "spec.groups[]",
            "has(self.gpu.product) || self.gpu.perPod <= 1",
            "gpu.perPod is {self.gpu.perPod} without gpu.product; name the product or remove perPod.",
        ),
        CelRule(
            "spec.groups[]",
            "!has(self.gpu.product) || self.gpu.perPod > 0",
            "gpu.perPod is 0, but gpu.product names a GPU; set perPod to 1 or more, or remove product.",
        ),
        CelRule(
            "spec.groups[]",
            "'rollout' in self.roles || size(self.vllmArgs) == 0",
            "vllmArgs has no effect without the role rollout; remove it.",
        ),
        CelRule(
            "spec.groups[].vllmArgs[]", f"!({_OPTION} in {_RESERVED})", f"{{{_OPTION}}} is set by Dovetail; remove it."
        ),
        CelRule(
            "spec.groups[]",
            "!('rollout' in self.roles) || !(self.name in ['trainer', 'coordinator'])",
            "name '{self.name}' is the name of other processes; choose another, such as `rollouts`.",
        ),
        CelRule(
            "spec.groups[]",
            "!('rollout' in self.roles) || self.dtype != 'bfloat16' || !has(self.gpu.product) "
            "|| !self.gpu.product.contains('V100')",
            "dtype is bfloat16, which {self.gpu.product} does not have; use float16 or float32.",
        ),
    ]


CEL_RULES: tuple[CelRule, ...] = (
    CelRule(
        "spec.stages",
        "self.all(s, self.exists_one(t, t == s))",
        "spec.stages names a stage twice; name each once.",
    ),
    CelRule(
        "spec.stages",
        "!self.all(s, self.exists_one(t, t == s)) || self == ['sft', 'reward', 'ppo'].filter(s, s in self)",
        f"spec.stages must be in the order sft, reward, ppo; write [{_listed(_IN_STAGES, ', ')}].",
    ),
    *_models(),
    *_reward(),
    *_tokenizer(),
    *_data(),
    *_ppo(),
    *_shared_body(),
    *_groups(),
)
