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
from dovetail.manifest.checks.rules.rule import CALLS, Rule, Value, one_of, ppo_rule, spec_rule
from dovetail.manifest.sizes import shares_body
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJobSpec, Stage

# ---------------------------------------------------------------- batch sizes


def _cut(stage: Stage, model: str, batch: str, micro: str) -> Rule:
    """The rule that the micro-batch divides the batch. One data-parallel rank must be able to take the whole batch,
    because Auto may always choose one rank. The planner decides whether the ranks are enough."""

    return spec_rule(
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
        if (
            rule is None
            or layouts is None
            or (model == "critic" and layouts["actor"][1].batch_shares == layouts[model][1].batch_shares)
        ):
            return None
        return None if (rule.tokens is not None) is not by_tokens else (rule, layouts[model][1].batch_shares)

    def holds(spec: RLHFJobSpec) -> bool:
        found = pinned(spec)
        return found is None or found[1] == 1 or found[0].problem(found[1]) is None

    def of(value: Callable[[BatchRule, int], object]) -> Value:
        return lambda spec: value(*found) if (found := pinned(spec)) else ""

    ranks = f"{{dp}} data-parallel ranks of the {model}"
    sentence = cannot_cut(f"spec.{batch}", f"{{{batch}}}", f"spec.{micro}", f"{{{micro}}}", ranks, "{multiple}")
    if by_tokens:
        sentence = f"spec.{batch} is {{{batch}}}, which {ranks} cannot share; make it a multiple of {{multiple}}"
    return spec_rule(
        holds,
        sentence + ".",
        {"dp": of(lambda rule, dp: dp), "multiple": of(lambda rule, dp: dp * rule.micro)},
    )


def _multiple_of(part: str) -> Rule:
    return ppo_rule(
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
        f"spec.{stage.value}.microBatchTokens is {{{stage.value}.microBatchTokens}}, but {what} may have {{longest}} "
        f"tokens ({fields}); make it at least {{longest}}.",
        {"longest": lambda spec: longest_sample(spec, stage)},
    )


_SIZES: tuple[tuple[Stage, str, str, str], ...] = (
    (Stage.PPO, "actor", "ppo.miniBatchSize", "ppo.microBatchSize"),
    (Stage.PPO, "critic", "ppo.miniBatchSize", "ppo.microBatchSize"),
    (Stage.SFT, "actor", "sft.batchSize", "sft.microBatchSize"),
    (Stage.REWARD, "reward", "reward.batchSize", "reward.microBatchSize"),
    (Stage.DPO, "actor", "dpo.batchSize", "dpo.microBatchSize"),
)

BATCH_RULES = (
    _multiple_of("samplesPerPrompt"),
    _multiple_of("miniBatchSize"),
    *(_cut(*sizes) for sizes in _SIZES if sizes[1] != "critic"),
    *(_cut_on_ranks(*sizes) for sizes in _SIZES),
    *(_cut_on_ranks(*sizes, by_tokens=True) for sizes in _SIZES),
    _budget(Stage.PPO, "a prompt and its response", "data.maxPromptTokens and generation.maxTokens"),
    _budget(Stage.SFT, "a sequence", "data.maxTokens"),
    _budget(Stage.REWARD, "a pair of sequences", "twice data.maxTokens"),
    _budget(Stage.DPO, "a pair of sequences", "twice data.maxTokens"),
    ppo_rule(
        "!has(self.ppo.microBatchTokens) || self.plan.intraStageFusion in ['Auto', 'Serial']",
        "spec.plan.intraStageFusion is {plan.intraStageFusion}, but spec.ppo.microBatchTokens makes as many "
        "micro-batches as a mini-batch needs, which only serial schedules can run; set it to Auto or Serial, or remove "
        "spec.ppo.microBatchTokens.",
    ),
)

# ---------------------------------------------------------------- PPO and generation

_KL_IN_LOSS = "(self.ppo.kl.__in__ == 'Loss' || (self.ppo.kl.__in__ == 'Auto' && self.ppo.advantage == 'grpo'))"


# What divides the scores by a deviation over the batch, which falls as the policy learns, and the fix. A penalty in the
# loss is not divided, so its relative weight would fall to 0.
_BATCH_DEVIATIONS = (
    (
        "self.ppo.advantage == 'gae' && self.ppo.whitenAdvantages",
        "spec.ppo.whitenAdvantages",
        "whitenAdvantages to false, or kl.in to Reward",
    ),
    (
        "self.ppo.advantage in ['reinforce++', 'reinforce++-baseline']",
        "spec.ppo.advantage {ppo.advantage}",
        "kl.in to Reward",
    ),
    (
        "self.ppo.whitenRewards",
        "spec.ppo.whitenRewards",
        "whitenRewards to false, or kl.in to Reward",
    ),
)
_DISTILS = "(self.ppo.advantage == 'distillation' && !has(self.ppo.advantageFunction))"
_COMPARES = "(self.ppo.advantage in ['grpo', 'rloo', 'reinforce++-baseline'])"

PPO_RULES = (
    ppo_rule(
        f"!{_COMPARES} || self.ppo.samplesPerPrompt >= 2",
        "spec.ppo.samplesPerPrompt is {ppo.samplesPerPrompt}, but {ppo.advantage} compares samples of the same prompt; "
        "set it to 2 or more.",
    ),
    ppo_rule(
        "(!has(self.ppo.lamValue) && !has(self.ppo.lamAlpha)) || "
        "(self.ppo.advantage == 'gae' && !has(self.ppo.advantageFunction))",
        "spec.ppo.lamValue and lamAlpha belong to generalised advantage estimation; remove them, or use advantage gae "
        "without an advantageFunction.",
    ),
    ppo_rule(
        "self.ppo.advantage == 'gae' || self.ppo.criticWarmupIterations == 0",
        "spec.ppo.criticWarmupIterations is {ppo.criticWarmupIterations}, but {ppo.advantage} has no critic; "
        "remove it.",
    ),
    ppo_rule(
        "self.ppo.criticWarmupIterations < self.ppo.iterations",
        "spec.ppo.criticWarmupIterations ({ppo.criticWarmupIterations}) leaves no iteration that trains the actor; "
        "make it less than spec.ppo.iterations ({ppo.iterations}).",
    ),
    ppo_rule(
        f"!(self.ppo.kl.estimator in ['k2', 'k3']) || {_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is {ppo.kl.estimator}, which in the reward lowers another quantity than the KL; "
        "use k1, or set spec.ppo.kl.in to Loss.",
    ),
    ppo_rule(
        f"self.ppo.kl.estimator != 'k1' || !{_KL_IN_LOSS}",
        "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0 on average; use k2 or k3, or set "
        "spec.ppo.kl.in to Reward.",
    ),
    *(
        ppo_rule(
            f"!{_KL_IN_LOSS} || self.ppo.kl.coef == 0.0 || !({cel}) || has(self.ppo.advantageFunction)",
            f"spec.ppo.kl.in is Loss, but {what} divides by a deviation over the whole batch, beside which the penalty "
            f"has no fixed weight; set {fix}.",
        )
        for cel, what, fix in _BATCH_DEVIATIONS
    ),
    ppo_rule(
        "self.ppo.normalizeStd || self.ppo.advantage == 'grpo'",
        "spec.ppo.normalizeStd is false, but {ppo.advantage} does not divide by a group's deviation; remove it.",
    ),
    ppo_rule(
        "!self.ppo.whitenRewards || self.ppo.advantage != 'grpo' || !self.ppo.normalizeStd",
        "spec.ppo.whitenRewards has no effect with grpo, which divides by each group's own deviation; remove it, "
        "or set spec.ppo.normalizeStd to false.",
    ),
    ppo_rule(
        "self.ppo.loss != 'gspo' || self.ppo.lossAggregation == 'Sequence'",
        "spec.ppo.loss is gspo, whose objective is a mean over samples, but spec.ppo.lossAggregation is "
        "{ppo.lossAggregation}; set it to Sequence.",
    ),
    ppo_rule(
        "!has(self.ppo.dualClip) || !(self.ppo.loss in ['gspo', 'cispo'])",
        "spec.ppo.dualClip has no effect with loss {ppo.loss}; remove it.",
    ),
    ppo_rule(
        "!has(self.ppo.clipLow) || self.ppo.clipLow <= 1.0",
        "spec.ppo.clipLow is above 1, but a ratio is never below 0; make it at most 1.",
    ),
    ppo_rule(
        f"!self.ppo.dropEqualGroups || ({_COMPARES} && !has(self.ppo.advantageFunction))",
        "spec.ppo.dropEqualGroups is true, but the advantages do not compare the samples of one prompt; use grpo, rloo "
        "or reinforce++-baseline without an advantageFunction, or set it to false.",
    ),
    Rule(
        ("spec.ppo",),  # a stored job that has it may change elsewhere
        "!has(self.streaming) || self.streaming != 'Auto'",
        "spec.ppo.streaming is no longer there, because spec.ppo.lag gains more; remove it, which changes nothing but "
        "the last bits, and set spec.ppo.lag to Auto in a new run.",
    ),
    ppo_rule(
        f"!{_DISTILS} || has(self.models.reference.source)",
        "spec.ppo.advantage is distillation, whose teacher is spec.models.reference, but that has no source; name a "
        "model with the actor's tokenizer.",
    ),
    ppo_rule(
        f"!{_DISTILS} || self.ppo.kl.coef == 0.0",
        "spec.ppo.kl.coef is not 0, but the advantage distillation is itself the KL to the reference; set it to 0.",
    ),
    ppo_rule(
        f"!{_DISTILS} || {CALLS}",
        "spec.ppo.advantage is distillation, to which a reward model has nothing to say; name a function in "
        "spec.models.reward, which only measures, such as dovetail.coordinator.rewards.nothing:zero.",
    ),
    ppo_rule(
        "self.ppo.dynamicSampling == 0 || self.ppo.samplesPerPrompt >= 2",
        "spec.ppo.dynamicSampling compares the rewards of one prompt's samples, but spec.ppo.samplesPerPrompt is "
        "{ppo.samplesPerPrompt}; set it to 2 or more.",
    ),
    ppo_rule(
        "self.ppo.dynamicSampling == 0 || self.ppo.lag == 0 || self.ppo.lag == 'Auto'",
        "spec.ppo.lag is {ppo.lag}, but spec.ppo.dynamicSampling draws an iteration's further rounds when the earlier "
        "ones are scored, for which rollouts would have to keep older weights; set lag or dynamicSampling to 0.",
    ),
    ppo_rule(
        f"self.ppo.dynamicSampling == 0 || !{_DISTILS}",
        "spec.ppo.dynamicSampling draws other prompts where all rewards of a prompt are equal, but with the advantage "
        "distillation rewards train nothing; set dynamicSampling to 0.",
    ),
    ppo_rule(
        f"self.ppo.rightCoef == 0.0 || !{_DISTILS}",
        "spec.ppo.rightCoef learns responses that the reward calls right, but with the advantage distillation rewards "
        "train nothing; set rightCoef to 0.",
    ),
    ppo_rule(
        "!has(self.ppo.overlong) || self.ppo.overlong.fromTokens < (has(self.ppo.overlong.toTokens) "
        "? self.ppo.overlong.toTokens : self.generation.maxTokens)",
        "spec.ppo.overlong.fromTokens is not below its toTokens, which is spec.generation.maxTokens unless given; "
        "lower it.",
    ),
    ppo_rule(
        "self.ppo.lag == 0 || self.ppo.lag == 'Auto' || self.ppo.oldLogProbs != 'Rollout'",
        "spec.ppo.oldLogProbs is Rollout, but with spec.ppo.lag {ppo.lag} the rollout's weights are older than those "
        "that the policy ratio starts from; use Recompute or Auto.",
    ),
    ppo_rule(
        "!has(self.ppo.importPath) || has(self.ppo.advantageFunction) || self.ppo.loss.contains(':')",
        "spec.ppo.importPath has no effect without advantageFunction or a loss as module:callable; remove it, or name "
        "the function.",
    ),
    ppo_rule(
        "!has(self.ppo.kl.target) || self.ppo.kl.coef > 0.0",
        "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move; start above 0 or drop target.",
    ),
    ppo_rule(
        "self.ppo.lag == 0 || self.ppo.lag == 'Auto' || "
        "!self.groups.exists(g, 'trainer' in g.roles && 'rollout' in g.roles)",
        "spec.ppo.lag is {ppo.lag}, but a group of spec.groups has both roles, trainer and rollout, whose processes "
        "take turns on a GPU; give trainers and rollouts groups of their own, or set lag to 0.",
    ),
    ppo_rule(
        "!self.ppo.routingReplay || !self.groups.exists(g, has(g.vllmArgs) && "
        "'--no-enable-prefix-caching' in g.vllmArgs)",
        "spec.ppo.routingReplay needs vLLM's prefix cache, which --no-enable-prefix-caching turns off; remove it from "
        "the vllmArgs of spec.groups.",
    ),
    spec_rule(
        "self.generation.minTokens <= self.generation.maxTokens",
        "spec.generation.minTokens ({generation.minTokens}) is above spec.generation.maxTokens "
        "({generation.maxTokens}); lower it.",
    ),
)

# ---------------------------------------------------------------- sessions


def _session(holds: str, sentence: str) -> Rule:
    """A rule for a job whose samples are episodes."""
    return spec_rule(f"!has(self.sessions) || {holds}", sentence)


SESSION_RULES = (
    *one_of(("spec.sessions",), "environment", "agent"),
    *one_of(("spec.sessions.environment",), "function", "url"),
    *one_of(("spec.sessions.agent",), "command", "url"),
    Rule(
        ("spec.sessions",),
        "!has(self.agent) || self.effects == 'Auto'",
        "spec.sessions.effects has no effect with an agent, whose tools are its own; remove it.",
    ),
    Rule(
        ("spec.sessions",),
        "self.sandbox != 'Pod' || !((has(self.environment) && has(self.environment.url)) || "
        "(has(self.agent) && has(self.agent.url)))",
        "spec.sessions.sandbox is Pod, but what has a url runs elsewhere; remove it.",
    ),
    Rule(
        ("spec.sessions",),
        "self.sandbox == 'Pod' || self.sandboxPods == 1",
        "spec.sessions.sandboxPods has no effect without sandbox: Pod; remove it.",
    ),
    _session("'ppo' in self.stages", "spec.sessions has no effect without ppo in spec.stages; remove it."),
    _session(
        CALLS,
        "spec.sessions plays episodes, which no reward model scores; name a function in spec.models.reward, such as "
        "dovetail.coordinator.rewards.earned:earned, which returns what the environment's get_reward said.",
    ),
    _session(
        "self.generation.stop.size() == 0",
        "spec.generation.stop would end turns without the token that the chat template ends them with; remove it, or "
        "spec.sessions.",
    ),
    _session(
        "!self.ppo.routingReplay",
        "spec.ppo.routingReplay does not know the tokens that tools put into an episode; set it to false, or remove "
        "spec.sessions.",
    ),
    _session(
        "self.ppo.dynamicSampling == 0",
        "spec.ppo.dynamicSampling does not know which episodes of a prompt were discarded; set it to 0, or remove "
        "spec.sessions.",
    ),
)

# ---------------------------------------------------------------- a value head on the actor's body

_SHARED = "cannot go with spec.models.critic.shareActorBody"
_OWN = "which leaves no critic model; remove one of them."
_OPTIMIZER = {
    name: repr(value) if isinstance(value, str) else str(value).lower()
    for name, value in Optimizer().model_dump(mode="json", by_alias=True).items()
}


def _shared(holds: str, sentence: str) -> Rule:
    """A rule for a critic that is a head on the actor's body."""
    return ppo_rule(f"self.ppo.advantage != 'gae' || !self.models.critic.shareActorBody || ({holds})", sentence)


SHARED_BODY_RULES = (
    _shared(
        "!has(self.models.critic.source)",
        f"spec.models.critic.source {_SHARED}, {_OWN}",
    ),
    _shared(
        "!has(self.models.critic.lora)",
        f"spec.models.critic.lora {_SHARED}, {_OWN}",
    ),
    _shared(
        "self.models.critic.dtype == 'Auto'",
        f"spec.models.critic.dtype {_SHARED}, {_OWN}",
    ),
    _shared(
        " && ".join(f"self.ppo.criticOptimizer.{name} == {value}" for name, value in _OPTIMIZER.items()),
        f"spec.ppo.criticOptimizer {_SHARED}: spec.ppo.actorOptimizer steps both heads; remove it.",
    ),
    _shared(
        "self.ppo.criticWarmupIterations == 0",
        f"spec.ppo.criticWarmupIterations {_SHARED}: the value head does not train without the actor; remove it.",
    ),
    ppo_rule(
        lambda spec: not shares_body(spec) or spec.plan.parallelism == "Auto" or spec.plan.parallelism.critic is None,
        f"spec.plan.parallelism.critic {_SHARED}, {_OWN}",
    ),
    _shared(
        "self.plan.intraStageFusion in ['Auto', 'VShaped', 'Serial']",
        f"spec.plan.intraStageFusion Fused, TimeSharing or Dedicated {_SHARED}, which leaves one model to train; set "
        "it to Auto, VShaped or Serial.",
    ),
)
