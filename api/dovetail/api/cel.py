"""The rules between fields again, in CEL, so that the API server refuses what `dovetail.api.rules` refuses.

Only rules that a cluster user meets often and that CEL can say cheaply; the operator runs all of `rules.check`.
The API server tries a rule also on the default of its object, before the fields inside have theirs: rules that read
defaulted fields of an object with a default belong to `spec`, which has none.
`function` is a reserved word in CEL, which Kubernetes escapes as `__function__`."""

from __future__ import annotations

from typing import NamedTuple


class CelRule(NamedTuple):
    """`self` in `rule` is the object at `path`, dotted below the root; `[]` enters a list's items."""

    path: str
    rule: str
    message: str


def _exactly_one(path: str, names: tuple[str, ...]) -> CelRule:
    given = ", ".join(f"has(self.{name})" for name in names)
    return CelRule(path, f"[{given}].exists_one(x, x)", f"give exactly one of {', '.join(names)}")


_MODELS = ("actor", "critic", "reward", "reference")
_PPO = "!('ppo' in self.stages) || "

CEL_RULES: tuple[CelRule, ...] = (
    CelRule(
        "spec.stages",
        "self == ['sft', 'reward', 'ppo'].filter(s, s in self)",
        "stages must be in the order sft, reward, ppo, each at most once",
    ),
    *(_exactly_one(f"spec.models.{name}.source", ("huggingFace", "path", "pvc", "scratch")) for name in _MODELS),
    *(
        CelRule(
            f"spec.models.{name}.source",
            "!has(self.revision) || has(self.huggingFace)",
            "revision belongs to huggingFace; remove it or give huggingFace",
        )
        for name in _MODELS
    ),
    *(
        CelRule(
            "spec",
            f"self.models.{name}.dtype != 'float16'",
            f"models.{name}.dtype: float16 cannot be trained in; use bfloat16 or float32",
        )
        for name in ("actor", "critic", "reward")
    ),
    CelRule("spec", "has(self.models.actor.source)", "models.actor.source is required"),
    CelRule(
        "spec.models.reward",
        "!has(self.__function__) || (!has(self.source) && !has(self.lora))",
        "models.reward.function replaces the reward model; remove it, or source and lora",
    ),
    CelRule("spec.models.reference", "!has(self.lora)", "the reference is not trained; remove models.reference.lora"),
    CelRule(
        "spec.models.tokenizer",
        "!(has(self.path) && has(self.train))",
        "models.tokenizer: give path or train, not both",
    ),
    CelRule(
        "spec",
        "!has(self.models.actor.source) || !has(self.models.actor.source.scratch) "
        "|| has(self.models.tokenizer.path) || has(self.models.tokenizer.train)",
        "models.tokenizer is required for an actor from scratch: give path or train",
    ),
    CelRule(
        "spec",
        "!has(self.models.tokenizer.train) || !has(self.models.actor.source) || has(self.models.actor.source.scratch)",
        "models.tokenizer.train makes a new vocabulary, which a pretrained actor does not know; remove it",
    ),
    *(
        _exactly_one(f"spec.data.{name}[]", ("huggingFace", "path", "synthetic"))
        for name in ("demonstrations", "preferences", "prompts")
    ),
    *(
        CelRule(
            f"spec.data.{name}[]",
            "has(self.huggingFace) || (!has(self.subset) && self.split == 'train')",
            "subset and split belong to huggingFace; remove them",
        )
        for name in ("demonstrations", "preferences", "prompts")
    ),
    CelRule("spec", "self.data.heldOut < 1.0", "data.heldOut 1 leaves nothing to train on; use less, such as 0.1"),
    CelRule(
        "spec",
        "!('sft' in self.stages) || size(self.data.demonstrations) > 0",
        "the sft stage needs data.demonstrations",
    ),
    CelRule(
        "spec",
        "!('reward' in self.stages) || has(self.models.reward.__function__) || size(self.data.preferences) > 0",
        "the reward stage needs data.preferences",
    ),
    CelRule("spec", f"{_PPO}size(self.data.prompts) > 0", "the ppo stage needs data.prompts"),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.ptxCoef == 0.0 || size(self.data.demonstrations) > 0",
        "ppo.ptxCoef above 0 needs data.demonstrations",
    ),
    CelRule(
        "spec",
        f"{_PPO}'reward' in self.stages || has(self.models.reward.source) || has(self.models.reward.__function__)",
        "ppo without the reward stage needs models.reward.source or models.reward.function",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.globalBatchSize % self.ppo.samplesPerPrompt == 0",
        "ppo.globalBatchSize must be a multiple of ppo.samplesPerPrompt",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.globalBatchSize % self.ppo.miniBatchSize == 0",
        "ppo.globalBatchSize must be a multiple of ppo.miniBatchSize",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.miniBatchSize % self.ppo.microBatchSize == 0",
        "ppo.miniBatchSize must be a multiple of ppo.microBatchSize",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.advantage == 'gae' || self.ppo.samplesPerPrompt >= 2",
        "grpo and rloo compare samples of a prompt; set ppo.samplesPerPrompt to 2 or more",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.criticWarmupIterations < self.ppo.iterations",
        "ppo.criticWarmupIterations must be less than ppo.iterations",
    ),
    CelRule(
        "spec",
        f"{_PPO}self.ppo.advantage == 'gae' || self.ppo.criticWarmupIterations == 0",
        "ppo.criticWarmupIterations: grpo and rloo have no critic; remove it",
    ),
    CelRule(
        "spec",
        f"{_PPO}!has(self.ppo.kl.target) || self.ppo.kl.coef > 0.0",
        "ppo.kl.coef must be above 0 when ppo.kl.target is given",
    ),
    *(
        CelRule(
            "spec",
            f"!('{stage}' in self.stages) || self.{stage}.batchSize % self.{stage}.microBatchSize == 0",
            f"{stage}.batchSize must be a multiple of {stage}.microBatchSize",
        )
        for stage in ("sft", "reward")
    ),
    CelRule(
        "spec",
        "self.generation.minTokens <= self.generation.maxTokens",
        "generation.minTokens must not be above generation.maxTokens",
    ),
    CelRule("spec.groups", "self.exists(g, 'trainer' in g.roles)", "no group has the role trainer; add it to one"),
    CelRule(
        "spec",
        f"{_PPO}self.groups.exists(g, 'rollout' in g.roles)",
        "no group has the role rollout, but the ppo stage generates; add it to one",
    ),
    CelRule(
        "spec.groups[]",
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must not be above maxReplicas",
    ),
    CelRule(
        "spec.groups[]",
        "!has(self.replicas) || ((!has(self.minReplicas) || self.minReplicas <= self.replicas) && "
        "(!has(self.maxReplicas) || self.replicas <= self.maxReplicas))",
        "replicas must be within minReplicas and maxReplicas",
    ),
    CelRule(
        "spec.groups[]",
        "!('trainer' in self.roles) || ((!has(self.minReplicas) || (has(self.replicas) && self.minReplicas == "
        "self.replicas)) && (!has(self.maxReplicas) || (has(self.replicas) && self.maxReplicas == self.replicas)))",
        "the number of trainer pods is fixed; set replicas and remove minReplicas and maxReplicas",
    ),
    CelRule(
        "spec.groups[]",
        "has(self.gpu.product) ? self.gpu.perPod > 0 : self.gpu.perPod <= 1",
        "gpu.perPod counts GPUs of gpu.product; give both or neither",
    ),
    CelRule(
        "spec.groups[]",
        "!('rollout' in self.roles) || !(self.name in ['trainer', 'coordinator'])",
        "trainer and coordinator are names of other processes; choose another name for a rollout group",
    ),
)
