"""Rules about batch sizes, PPO, generation, and a value head on the actor's body."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.manifest.checks.batching import (
    BatchRule,
    batch_rules,
    cannot_cut,
    longest_sample,
    micro_batch_tokens,
    pinned_layouts,
)
from dovetail.manifest.checks.rules.rule import CALLS, Rule, Value, ppo_rule, spec_rule
from dovetail.manifest.critic import shares_body
from dovetail.manifest.training_types import AUTO_LAG, Optimizer
from dovetail.manifest.types import PPO, Dtype, RLHFJobSpec, Stage

# ---------------------------------------------------------------- batch sizes


def _cut(stage: Stage, model: str, batch: str, micro: str, size: Callable[[RLHFJobSpec], tuple[int, int]]) -> Rule:
    """The rule that the micro-batch divides the batch. `size` returns batch and micro-batch. One data-parallel rank
    must be able to take the whole batch, because Auto may always choose one rank. The planner decides whether the ranks
    are enough."""

    def holds(spec: RLHFJobSpec) -> bool:
        whole, part = size(spec)
        by_rows = getattr(spec, stage.value).micro_batch_tokens is None
        return stage not in spec.stages or not by_rows or whole % part == 0

    return spec_rule(
        holds,
        f"!('{stage.value}' in self.stages) || has(self.{stage.value}.microBatchTokens) || "
        f"self.{batch} % self.{micro} == 0",
        cannot_cut(f"spec.{batch}", f"{{{batch}}}", f"spec.{micro}", f"{{{micro}}}", f"the {model}", f"{{{micro}}}")
        + ".",
    )


def _cut_on_ranks(stage: Stage, model: str, batch: str, micro: str, by_tokens: bool = False) -> Rule:
    """The same rule on the data-parallel ranks that spec.plan.parallelism pins. `by_tokens` says that micro-batches are
    divided by tokens. They then need the same number of rows on each rank."""

    def pinned(spec: RLHFJobSpec) -> tuple[BatchRule, int] | None:
        rule = next((rule for rule in batch_rules(spec) if (rule.stage, rule.model) == (stage, model)), None)
        layouts = pinned_layouts(spec)
        if rule is None or layouts is None or (model == "critic" and layouts["actor"][1].dp == layouts[model][1].dp):
            return None
        return None if (rule.tokens is not None) is not by_tokens else (rule, layouts[model][1].dp)

    def holds(spec: RLHFJobSpec) -> bool:
        found = pinned(spec)
        return found is None or found[1] == 1 or found[0].problem(found[1]) is None

    def of(value: Callable[[BatchRule, int], object]) -> Value:
        return Value(lambda spec: value(*found) if (found := pinned(spec)) else "")

    ranks = f"{{dp}} data-parallel ranks of the {model}"
    sentence = cannot_cut(f"spec.{batch}", f"{{{batch}}}", f"spec.{micro}", f"{{{micro}}}", ranks, "{multiple}")
    if by_tokens:
        sentence = f"spec.{batch} is {{{batch}}}, which {ranks} cannot share; make it a multiple of {{multiple}}"
    return spec_rule(
        holds,
        None,
        sentence + ".",
        {"dp": of(lambda rule, dp: dp), "multiple": of(lambda rule, dp: dp * rule.micro)},
    )


def _multiple_of(part: str, size: Callable[[RLHFJobSpec], int]) -> Rule:
    return ppo_rule(
        lambda spec: spec.ppo.global_batch_size % size(spec) == 0,
        f"self.ppo.globalBatchSize % self.ppo.{part} == 0",
        f"spec.ppo.globalBatchSize is {{ppo.globalBatchSize}}, which spec.ppo.{part} ({{ppo.{part}}}) does not divide; "
        f"make it a multiple of {{ppo.{part}}}.",
    )


def _budget(stage: Stage, what: str, fields: str) -> Rule:
    """The rule that a micro-batch of tokens has room for the longest sample."""

    def holds(spec: RLHFJobSpec) -> bool:
        tokens = micro_batch_tokens(spec, stage)
        return stage not in spec.stages or tokens is None or tokens >= longest_sample(spec, stage)

    return spec_rule(
        holds,
        None,
        f"spec.{stage.value}.microBatchTokens is {{{stage.value}.microBatchTokens}}, but {what} may have {{longest}} "
        f"tokens ({fields}); make it at least {{longest}}.",
        {"longest": Value(lambda spec: longest_sample(spec, stage))},
    )


_PPO_SIZES = ("ppo.miniBatchSize", "ppo.microBatchSize")
_SFT_SIZES = ("sft.batchSize", "sft.microBatchSize")
_REWARD_SIZES = ("reward.batchSize", "reward.microBatchSize")
_DPO_SIZES = ("dpo.batchSize", "dpo.microBatchSize")

BATCH_RULES = (
    _multiple_of("samplesPerPrompt", lambda spec: spec.ppo.samples_per_prompt),
    _multiple_of("miniBatchSize", lambda spec: spec.ppo.mini_batch_size),
    _cut(Stage.PPO, "actor", *_PPO_SIZES, lambda spec: (spec.ppo.mini_batch_size, spec.ppo.micro_batch_size)),
    _cut(Stage.SFT, "actor", *_SFT_SIZES, lambda spec: (spec.sft.batch_size, spec.sft.micro_batch_size)),
    _cut(Stage.REWARD, "reward", *_REWARD_SIZES, lambda spec: (spec.reward.batch_size, spec.reward.micro_batch_size)),
    _cut(Stage.DPO, "actor", *_DPO_SIZES, lambda spec: (spec.dpo.batch_size, spec.dpo.micro_batch_size)),
    _cut_on_ranks(Stage.PPO, "actor", *_PPO_SIZES),
    _cut_on_ranks(Stage.PPO, "critic", *_PPO_SIZES),
    _cut_on_ranks(Stage.SFT, "actor", *_SFT_SIZES),
    _cut_on_ranks(Stage.REWARD, "reward", *_REWARD_SIZES),
    _cut_on_ranks(Stage.DPO, "actor", *_DPO_SIZES),
    _cut_on_ranks(Stage.PPO, "actor", *_PPO_SIZES, by_tokens=True),
    _cut_on_ranks(Stage.PPO, "critic", *_PPO_SIZES, by_tokens=True),
    _cut_on_ranks(Stage.SFT, "actor", *_SFT_SIZES, by_tokens=True),
    _cut_on_ranks(Stage.REWARD, "reward", *_REWARD_SIZES, by_tokens=True),
    _cut_on_ranks(Stage.DPO, "actor", *_DPO_SIZES, by_tokens=True),
    _budget(Stage.PPO, "a prompt and its response", "data.maxPromptTokens and generation.maxTokens"),
    _budget(Stage.SFT, "a sequence", "data.maxTokens"),
    _budget(Stage.REWARD, "a pair of sequences", "twice data.maxTokens"),
    _budget(Stage.DPO, "a pair of sequences", "twice data.maxTokens"),
    ppo_rule(
        lambda spec: spec.ppo.micro_batch_tokens is None or spec.plan.intra_stage_fusion in ("Auto", "Serial"),
        "!has(self.ppo.microBatchTokens) || self.plan.intraStageFusion in ['Auto', 'Serial']",
        "spec.plan.intraStageFusion is {plan.intraStageFusion}, but spec.ppo.microBatchTokens makes as many "
        "micro-batches as a mini-batch needs, which only serial schedules can run; set it to Auto or Serial, or remove "
        "spec.ppo.microBatchTokens.",
    ),
)

# ---------------------------------------------------------------- PPO and generation

_KL_IN_LOSS = "(self.ppo.kl.__in__ == 'Loss' || (self.ppo.kl.__in__ == 'Auto' && self.ppo.advantage == 'grpo'))"


def _overlong_end(spec: RLHFJobSpec) -> int:
    assert spec.ppo.overlong is not None
    return spec.ppo.overlong.to_tokens or spec.generation.max_tokens


def _distils(spec: RLHFJobSpec) -> bool:
    return spec.ppo.advantage == "distillation" and spec.ppo.advantage_function is None


# What divides the scores by a deviation over the batch, which falls as the policy learns. A penalty in the loss is not
# divided, so its relative weight would fall to 0. Each has its condition in Python and in CEL, and the fix.
_BATCH_DEVIATIONS: tuple[tuple[Callable[[PPO], bool], str, str, str], ...] = (
    (
        lambda ppo: ppo.advantage == "gae" and ppo.whiten_advantages,
        "self.ppo.advantage == 'gae' && self.ppo.whitenAdvantages",
        "spec.ppo.whitenAdvantages",
        "whitenAdvantages to false, or kl.in to Reward",
    ),
    (
        lambda ppo: ppo.advantage in ("reinforce++", "reinforce++-baseline"),
        "self.ppo.advantage in ['reinforce++', 'reinforce++-baseline']",
        "spec.ppo.advantage {ppo.advantage}",
        "kl.in to Reward",
    ),
    (
        lambda ppo: ppo.whiten_rewards,
        "self.ppo.whitenRewards",
        "spec.ppo.whitenRewards",
        "whitenRewards to false, or kl.in to Reward",
    ),
)
_DISTILS = "(self.ppo.advantage == 'distillation' && !has(self.ppo.advantageFunction))"
_COMPARES = "(self.ppo.advantage in ['grpo', 'rloo', 'reinforce++-baseline'])"

PPO_RULES = (
    ppo_rule(
        lambda spec: not spec.ppo.compares_samples or spec.ppo.samples_per_prompt >= 2,
        f"!{_COMPARES} || self.ppo.samplesPerPrompt >= 2",
        "spec.ppo.samplesPerPrompt is {ppo.samplesPerPrompt}, but {ppo.advantage} compares samples of the same prompt; "
        "set it to 2 or more.",
    ),
    ppo_rule(
        lambda spec: (
            (spec.ppo.lam_value is None and spec.ppo.lam_alpha is None)
            or (spec.ppo.advantage == "gae" and spec.ppo.advantage_function is None)
        ),
        "(!has(self.ppo.lamValue) && !has(self.ppo.lamAlpha)) || "
        "(self.ppo.advantage == 'gae' && !has(self.ppo.advantageFunction))",
        "spec.ppo.lamValue and lamAlpha belong to generalised advantage estimation; remove them, or use advantage gae "
        "without an advantageFunction.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.advantage == "gae" or spec.ppo.critic_warmup_iterations == 0,
        "self.ppo.advantage == 'gae' || self.ppo.criticWarmupIterations == 0",
        "spec.ppo.criticWarmupIterations is {ppo.criticWarmupIterations}, but {ppo.advantage} has no critic; "
        "remove it.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.critic_warmup_iterations < spec.ppo.iterations,
        "self.ppo.criticWarmupIterations < self.ppo.iterations",
        "spec.ppo.criticWarmupIterations ({ppo.criticWarmupIterations}) leaves no iteration that trains the actor; "
        "make it less than spec.ppo.iterations ({ppo.iterations}).",
    ),
    ppo_rule(
        lambda spec: spec.ppo.kl.estimator not in ("k2", "k3") or spec.ppo.kl_in_loss,
        f"!(self.ppo.kl.estimator in ['k2', 'k3']) || {_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is {ppo.kl.estimator}, which in the reward lowers another quantity than the KL; "
        "use k1, or set spec.ppo.kl.in to Loss.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.kl.estimator != "k1" or not spec.ppo.kl_in_loss,
        f"self.ppo.kl.estimator != 'k1' || !{_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0 on average; use k2 or k3, or set "
        "spec.ppo.kl.in to Reward.",
    ),
    *(
        ppo_rule(
            lambda spec, divides=divides: (  # type: ignore[misc]
                not (spec.ppo.kl_in_loss and spec.ppo.kl.coef > 0 and divides(spec.ppo))
                or spec.ppo.advantage_function is not None
            ),
            f"!{_KL_IN_LOSS} || self.ppo.kl.coef == 0.0 || !({cel}) || has(self.ppo.advantageFunction)",
            f"spec.ppo.kl.in is Loss, but {what} divides by a deviation over the whole batch, beside which the penalty "
            f"has no fixed weight; set {fix}.",
        )
        for divides, cel, what, fix in _BATCH_DEVIATIONS
    ),
    ppo_rule(
        lambda spec: spec.ppo.normalize_std or spec.ppo.advantage == "grpo",
        "self.ppo.normalizeStd || self.ppo.advantage == 'grpo'",
        "spec.ppo.normalizeStd is false, but {ppo.advantage} does not divide by a group's deviation; remove it.",
    ),
    ppo_rule(
        lambda spec: not spec.ppo.whiten_rewards or spec.ppo.advantage != "grpo" or not spec.ppo.normalize_std,
        "!self.ppo.whitenRewards || self.ppo.advantage != 'grpo' || !self.ppo.normalizeStd",
        "spec.ppo.whitenRewards has no effect with grpo, which divides by each group's own deviation; remove it, "
        "or set spec.ppo.normalizeStd to false.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.loss != "gspo" or spec.ppo.loss_aggregation == "Sequence",
        "self.ppo.loss != 'gspo' || self.ppo.lossAggregation == 'Sequence'",
        "spec.ppo.loss is gspo, whose objective is a mean over samples, but spec.ppo.lossAggregation is "
        "{ppo.lossAggregation}; set it to Sequence.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.dual_clip is None or spec.ppo.loss not in ("gspo", "cispo"),
        "!has(self.ppo.dualClip) || !(self.ppo.loss in ['gspo', 'cispo'])",
        "spec.ppo.dualClip has no effect with loss {ppo.loss}; remove it.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.clip_low is None or spec.ppo.clip_low <= 1,
        "!has(self.ppo.clipLow) || self.ppo.clipLow <= 1.0",
        "spec.ppo.clipLow is above 1, but a ratio is never below 0; make it at most 1.",
    ),
    ppo_rule(
        lambda spec: (
            not spec.ppo.drop_equal_groups or (spec.ppo.compares_samples and spec.ppo.advantage_function is None)
        ),
        f"!self.ppo.dropEqualGroups || ({_COMPARES} && !has(self.ppo.advantageFunction))",
        "spec.ppo.dropEqualGroups is true, but the advantages do not compare the samples of one prompt; use grpo, rloo "
        "or reinforce++-baseline without an advantageFunction, or set it to false.",
    ),
    ppo_rule(
        lambda spec: not _distils(spec) or spec.models.reference.source is not None,
        f"!{_DISTILS} || has(self.models.reference.source)",
        "spec.ppo.advantage is distillation, whose teacher is spec.models.reference, but that has no source; name a "
        "model with the actor's tokenizer.",
    ),
    ppo_rule(
        lambda spec: not _distils(spec) or spec.ppo.kl.coef == 0,
        f"!{_DISTILS} || self.ppo.kl.coef == 0.0",
        "spec.ppo.kl.coef is not 0, but the advantage distillation is itself the KL to the reference; set it to 0.",
    ),
    ppo_rule(
        lambda spec: not _distils(spec) or bool(spec.models.reward.calls),
        f"!{_DISTILS} || {CALLS}",
        "spec.ppo.advantage is distillation, to which a reward model has nothing to say; name a function in "
        "spec.models.reward, which only measures, such as dovetail.coordinator.rewards.nothing:zero.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.dynamic_sampling == 0 or spec.ppo.samples_per_prompt >= 2,
        "self.ppo.dynamicSampling == 0 || self.ppo.samplesPerPrompt >= 2",
        "spec.ppo.dynamicSampling compares the rewards of one prompt's samples, but spec.ppo.samplesPerPrompt is "
        "{ppo.samplesPerPrompt}; set it to 2 or more.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.dynamic_sampling == 0 or spec.ppo.lag in (0, AUTO_LAG),
        "self.ppo.dynamicSampling == 0 || self.ppo.lag == 0 || self.ppo.lag == 'Auto'",
        "spec.ppo.lag is {ppo.lag}, but spec.ppo.dynamicSampling draws an iteration's further rounds when the earlier "
        "ones are scored, for which rollouts would have to keep older weights; set lag or dynamicSampling to 0.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.dynamic_sampling == 0 or not _distils(spec),
        f"self.ppo.dynamicSampling == 0 || !{_DISTILS}",
        "spec.ppo.dynamicSampling draws other prompts where all rewards of a prompt are equal, but with the advantage "
        "distillation rewards train nothing; set dynamicSampling to 0.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.right_coef == 0 or not _distils(spec),
        f"self.ppo.rightCoef == 0.0 || !{_DISTILS}",
        "spec.ppo.rightCoef learns responses that the reward calls right, but with the advantage distillation rewards "
        "train nothing; set rightCoef to 0.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.overlong is None or spec.ppo.overlong.from_tokens < _overlong_end(spec),
        "!has(self.ppo.overlong) || self.ppo.overlong.fromTokens < (has(self.ppo.overlong.toTokens) "
        "? self.ppo.overlong.toTokens : self.generation.maxTokens)",
        "spec.ppo.overlong.fromTokens is not below its toTokens, which is spec.generation.maxTokens unless given; "
        "lower it.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.lag in (0, AUTO_LAG) or spec.ppo.old_log_probs != "Rollout",
        "self.ppo.lag == 0 || self.ppo.lag == 'Auto' || self.ppo.oldLogProbs != 'Rollout'",
        "spec.ppo.oldLogProbs is Rollout, but with spec.ppo.lag {ppo.lag} the rollout's weights are older than those "
        "that the policy ratio starts from; use Recompute or Auto.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.import_path is None or spec.ppo.names_functions,
        "!has(self.ppo.importPath) || has(self.ppo.advantageFunction) || self.ppo.loss.contains(':')",
        "spec.ppo.importPath has no effect without advantageFunction or a loss as module:callable; remove it, or name "
        "the function.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.kl.target is None or spec.ppo.kl.coef > 0,
        "!has(self.ppo.kl.target) || self.ppo.kl.coef > 0.0",
        "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move; start above 0 or drop target.",
    ),
    ppo_rule(
        lambda spec: spec.ppo.lag in (0, AUTO_LAG) or not any(g.colocated for g in spec.groups),
        "self.ppo.lag == 0 || self.ppo.lag == 'Auto' || "
        "!self.groups.exists(g, 'trainer' in g.roles && 'rollout' in g.roles)",
        "spec.ppo.lag is {ppo.lag}, but a group of spec.groups has both roles, trainer and rollout, whose processes "
        "take turns on a GPU; give trainers and rollouts groups of their own, or set lag to 0.",
    ),
    ppo_rule(
        lambda spec: (
            not spec.ppo.routing_replay or not any("--no-enable-prefix-caching" in g.vllm_args for g in spec.groups)
        ),
        "!self.ppo.routingReplay || !self.groups.exists(g, '--no-enable-prefix-caching' in g.vllmArgs)",
        "spec.ppo.routingReplay needs vLLM's prefix cache, which --no-enable-prefix-caching turns off; remove it from "
        "the vllmArgs of spec.groups.",
    ),
    spec_rule(
        lambda spec: spec.generation.min_tokens <= spec.generation.max_tokens,
        "self.generation.minTokens <= self.generation.maxTokens",
        "spec.generation.minTokens ({generation.minTokens}) is above spec.generation.maxTokens "
        "({generation.maxTokens}); lower it.",
    ),
)

# ---------------------------------------------------------------- a value head on the actor's body

_SHARED = "cannot go with spec.models.critic.shareActorBody"
_OWN = "which leaves no critic model; remove one of them."
_OPTIMIZER = {
    name: repr(value) if isinstance(value, str) else str(value).lower()
    for name, value in Optimizer().model_dump(mode="json", by_alias=True).items()
}


def _shared(holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str) -> Rule:
    """A rule for a critic that is a head on the actor's body."""
    return ppo_rule(
        lambda spec: not shares_body(spec) or holds(spec),
        None if cel is None else f"self.ppo.advantage != 'gae' || !self.models.critic.shareActorBody || ({cel})",
        sentence,
    )


SHARED_BODY_RULES = (
    _shared(
        lambda spec: spec.models.critic.source is None,
        "!has(self.models.critic.source)",
        f"spec.models.critic.source {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.models.critic.lora is None,
        "!has(self.models.critic.lora)",
        f"spec.models.critic.lora {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.models.critic.dtype is Dtype.AUTO,
        "self.models.critic.dtype == 'Auto'",
        f"spec.models.critic.dtype {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.ppo.critic_optimizer == Optimizer(),
        " && ".join(f"self.ppo.criticOptimizer.{name} == {value}" for name, value in _OPTIMIZER.items()),
        f"spec.ppo.criticOptimizer {_SHARED}: spec.ppo.actorOptimizer steps both heads; remove it.",
    ),
    _shared(
        lambda spec: spec.ppo.critic_warmup_iterations == 0,
        "self.ppo.criticWarmupIterations == 0",
        f"spec.ppo.criticWarmupIterations {_SHARED}: the value head does not train without the actor; remove it.",
    ),
    _shared(
        lambda spec: spec.plan.parallelism == "Auto" or spec.plan.parallelism.critic is None,
        None,
        f"spec.plan.parallelism.critic {_SHARED}, {_OWN}",
    ),
    _shared(
        lambda spec: spec.plan.intra_stage_fusion in ("Auto", "VShaped", "Serial"),
        "self.plan.intraStageFusion in ['Auto', 'VShaped', 'Serial']",
        f"spec.plan.intraStageFusion Fused, TimeSharing or Dedicated {_SHARED}, which leaves one model to train; set "
        "it to Auto, VShaped or Serial.",
    ),
)
