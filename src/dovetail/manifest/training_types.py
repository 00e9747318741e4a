"""The parts of RLHFJob's spec that say how to train and generate: optimizer, SFT and reward, PPO, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dovetail.manifest.base import URL_PATTERN, Callable_, Fraction, LossName, Model, Path_, PositiveFloat, PositiveInt
from dovetail.manifest.field_policy import WHEN_RESUMED, WHEN_SUSPENDED, Policy, fixed

# TRL uses this value, and so do shared-body setups after InstructGPT.
SHARED_VALUE_COEF = 0.1
# DeepSpeed-Chat uses this value, for scores whose mean is 0.
REWARD_CLIP = 5.0

MICRO_BATCH_TOKENS = (
    "Cuts micro-batches by tokens in place of microBatchSize: each forward pass of one rank takes {what} of at most so "
    "many tokens together, and every pass about as many. Shorter {what} then make fewer passes. Auto: {auto}"
)
_AS_MANY = "as many tokens as microBatchSize of the longest {what} have."


class Optimizer(Model):
    """AdamW and its learning-rate schedule."""

    learning_rate: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=1e-5, description="Peak learning rate, reached after warm-up."
    )
    beta1: Fraction = Field(default=0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(default=0.95, description="Decay of the second moment.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, of weight matrices only.")
    max_grad_norm: PositiveFloat = Field(
        default=1.0, description="Global gradient norm above which gradients are scaled down."
    )
    schedule: Literal["Constant", "Linear", "Cosine"] = Field(
        default="Cosine", description="Decay after warm-up, to 0."
    )
    warmup_fraction: Fraction = Field(
        default=0.03, description="Share of the stage's steps in which the rate rises from 0."
    )
    offload: bool = Field(default=False, description="Keep optimizer state in host memory between steps.")


_NOT_EXTENDED = fixed(
    "SFT, reward-model training and DPO cannot be extended (of the stages only ppo can, by spec.ppo.iterations)"
)


class Supervised(Model):
    """Training on batches of records: SFT, the reward model, DPO."""

    steps: Annotated[PositiveInt | None, _NOT_EXTENDED] = Field(
        default=None, description="Optimizer steps; default: one pass over the data times epochs."
    )
    epochs: Annotated[PositiveInt, _NOT_EXTENDED] = Field(
        default=1, description="Passes over the data when `steps` is not given."
    )
    batch_size: PositiveInt = Field(
        default=32,
        description="Sequences (or pairs) per optimizer step, all ranks together. A multiple of microBatchSize * dp.",
    )
    micro_batch_size: PositiveInt = Field(default=8, description="Sequences (or pairs) per forward pass of one rank.")
    micro_batch_tokens: Literal["Auto"] | PositiveInt | None = Field(
        default=None,
        description=MICRO_BATCH_TOKENS.format(what="sequences", auto=_AS_MANY.format(what="sequences")),
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Optimizer and learning rate.")


class DPOOptimizer(Optimizer):
    """AdamW with the learning rate that TRL takes for DPO."""

    learning_rate: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=1e-6, description="Peak learning rate, reached after warm-up."
    )


class DPO(Supervised):
    """Learning from preferences without a reward model. The reference is the actor as the stage begins with it."""

    loss: Literal["DPO", "IPO", "KTO"] = Field(
        default="DPO",
        description="DPO: the logistic loss of a pair (Rafailov et al. 2023). IPO: the squared distance to a margin, "
        "with token means (Azar et al. 2023). KTO: each response by itself, against a KL estimate of the batch "
        "(Ethayarajh et al. 2024).",
    )
    beta: PositiveFloat = Field(
        default=0.1, description="How strongly the reference holds the actor: the larger, the closer they stay."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="DPO: the share of pairs that may be the wrong way round (conservative DPO); 0: none.",
    )
    desirable_weight: PositiveFloat = Field(default=1.0, description="KTO: weight of the loss of chosen responses.")
    undesirable_weight: PositiveFloat = Field(default=1.0, description="KTO: weight of the loss of rejected responses.")
    optimizer: DPOOptimizer = Field(default_factory=DPOOptimizer, description="Optimizer and learning rate.")


_NOT_FROM_0 = Policy(True, "never", "with 0 no reference has scored the run's samples", not_from=0)


class KL(Model):
    """KL penalty against the reference."""

    coef: Annotated[float, _NOT_FROM_0] = Field(
        default=0.05,
        ge=0,
        description="Coefficient, or its start value when a target is given. With 0 no reference is loaded and no KL "
        "is measured, unless the advantage is distillation, or a function of your own may read them.",
    )
    place: Literal["Auto", "Reward", "Loss"] = Field(
        default="Auto",
        alias="in",
        description="Reward: subtracted from each token's reward. Loss: a term of the policy's loss. Auto: Loss with "
        "grpo, which divides rewards by their deviation, else Reward.",
    )
    target: Annotated[PositiveFloat | None, WHEN_RESUMED] = Field(
        default=None,
        description="Per-sample KL, nats, that the adaptive controller aims for (Ziegler et al. 2019); null: fixed.",
    )
    horizon: Annotated[PositiveInt, WHEN_RESUMED] = Field(
        default=10_000, description="Samples over which the adaptive controller corrects."
    )
    estimator: Literal["Auto", "k1", "k2", "k3"] = Field(
        default="Auto",
        description="Per-token estimator (Schulman 2020): k1 in the reward, k2 or k3 in the loss (k3 with the gradient "
        "of k2); others optimise something else and are refused. Auto: k1, or k3 in the loss.",
    )


class ImportanceSampling(Model):
    """Correction of the gap between the rollout's and the trainer's log-probabilities, and with ppo.lag of the gap
    between the weights that sampled and those that are trained."""

    mode: Literal["Truncated", "Off"] = Field(
        default="Truncated", description="Truncated: weigh tokens by the capped ratio."
    )
    cap: PositiveFloat = Field(default=2.0, description="Upper bound of the per-token weight.")


class Overlong(Model):
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13)."""

    from_tokens: int = Field(ge=0, description="Responses of up to this many tokens are not penalised.")
    to_tokens: PositiveInt | None = Field(
        default=None,
        description="From here on the penalty is whole; in between it grows linearly. Default: generation.maxTokens.",
    )
    penalty: PositiveFloat = Field(default=1.0, description="Subtracted from the score of the longest responses.")


# The trainers keep this many versions in memory, and one more.
MOST_LAG = 16
# `lag: Auto` stays until the planner has chosen a lag (`dovetail.manifest.resolve.with_lag`).
AUTO_LAG: Any = "Auto"
if TYPE_CHECKING:
    # For all code except the planner it is a number.
    Lag = int
else:
    Lag = Literal["Auto"] | Annotated[int, Field(ge=0, le=MOST_LAG)]


def kept_versions(lag: int) -> int:
    """The number of versions of the weights that trainers keep to send them. Without a lag it is 0, because they send
    the present weights."""
    return lag + 1 if lag else 0


class PPO(Model):
    """Reinforcement learning: batch sizes, advantages, losses and optimizers."""

    iterations: Annotated[PositiveInt, WHEN_SUSPENDED] = Field(
        default=100, description="Iterations: generate, score, train, publish weights."
    )
    global_batch_size: Annotated[PositiveInt, fixed("stored batches have this size")] = Field(
        default=64, description="Samples per iteration: prompts times samplesPerPrompt."
    )
    samples_per_prompt: PositiveInt = Field(
        default=1, description="Responses to each prompt; at least 2 for grpo and rloo."
    )
    mini_batch_size: PositiveInt = Field(default=64, description="Samples per optimizer step, all ranks together.")
    micro_batch_size: PositiveInt = Field(default=8, description="Samples per forward pass of one rank.")
    micro_batch_tokens: Literal["Auto"] | PositiveInt | None = Field(
        default=None,
        description=MICRO_BATCH_TOKENS.format(
            what="samples",
            auto="the planner chooses, where it knows the GPUs' memory; else " + _AS_MANY.format(what="samples"),
        ),
    )
    epochs: PositiveInt = Field(default=1, description="Passes over an iteration's samples.")
    lag: Annotated[Lag, fixed("samples under way were drawn with the weights that it names")] = Field(
        default=0,
        description="How many steps the weights that draw an iteration's samples lie behind. 0: generation and "
        "training take turns. L: generation of the next L iterations runs while the trainers learn; see docs/async.md. "
        "Auto: the planner takes the smallest of 0, 1 and 2 that is about as fast as the fastest, and 0 where it "
        "cannot predict iterations or the job cannot have a lag.",
    )
    # Jobs of earlier releases have Never, which says nothing.
    streaming: Annotated[
        Literal["Never", "Auto"] | None, AfterValidator(lambda value: None if value == "Never" else value)
    ] = Field(default=None, description="No longer there; set lag, which gains more.")
    advantage: Literal["gae", "grpo", "rloo", "reinforce++", "reinforce++-baseline", "distillation"] = Field(
        default="gae",
        description="gae: critic and generalised advantage estimation (Schulman et al. 2016). The others have no "
        "critic. grpo, rloo: baselines from the samples of the same prompt. reinforce++ (Hu et al. 2025): "
        "discounted rewards, normalised over the batch; reinforce++-baseline: scores less their prompt's mean, "
        "normalised over the batch. distillation: the log-probability of the teacher, models.reference, less the "
        "policy's own, at each token (Agarwal et al. 2024); rewards train nothing.",
    )
    advantage_function: Callable_ | None = Field(
        default=None, description="module:callable replacing `advantage`; see docs/extending.md."
    )
    loss: LossName = Field(
        default="ppo",
        description="The policy's loss of a token. ppo: the clipped surrogate (Schulman et al. 2017). gspo: the same "
        "with the whole sample's ratio (Zheng et al. 2025). cispo: capped ratios as weights (MiniMax 2025). Or "
        "module:callable; see docs/extending.md. lossAggregation, importanceSampling, kl and entropyCoef apply to "
        "every loss.",
    )
    import_path: Annotated[Path_ | None, WHEN_RESUMED] = Field(
        default=None,
        description="Folder that advantageFunction and loss are imported from; default: the manifest's, in pods the "
        "working directory. PYTHONPATH comes after it.",
    )
    timeout_seconds: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=600.0,
        description="Time limit of one call of advantageFunction, or of a loss that is a function, in trainers, and of "
        "their import. The job ends if one takes longer.",
    )
    normalize_std: bool = Field(
        default=True,
        description="grpo: divide by the deviation of the group's scores (Shao et al. 2024); false: do not (Dr. GRPO, "
        "Liu et al. 2025).",
    )
    loss_aggregation: Literal["Token", "Sequence", "Constant"] = Field(
        default="Token",
        description="What the policy's loss of a mini-batch is. Token: mean over all its tokens (DAPO). Sequence: mean "
        "over samples of each one's token mean (GRPO's paper). Constant: sum over tokens by samples times "
        "generation.maxTokens (Dr. GRPO).",
    )
    gamma: Fraction = Field(default=1.0, description="Discount per token.")
    lam: Fraction = Field(default=0.95, description="Lambda of GAE.")
    lam_value: Fraction | None = Field(
        default=None,
        description="gae: lambda of the returns that the critic learns, if it is another than the policy's (VAPO: 1). "
        "Default: `lam`.",
    )
    lam_alpha: PositiveFloat | None = Field(
        default=None,
        description="gae: the policy's lambda grows with a response's length, 1 - 1 / (lamAlpha * tokens), and is at "
        "least 0 (VAPO: 0.05). null: `lam` for all.",
    )
    clip: PositiveFloat = Field(default=0.2, description="Policy ratio clip range, down and up.")
    clip_low: PositiveFloat | None = Field(
        default=None,
        description="The range below 1, if it is another than `clip`. Default: `clip`; with loss cispo none.",
    )
    clip_high: PositiveFloat | None = Field(
        default=None, description="The range above 1, if it is another than `clip` (DAPO's clip-higher: 0.28)."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="Bound on the ratio for negative advantages (Ye et al. 2020); null: none."
    )
    value_clip: PositiveFloat | None = Field(default=0.2, description="Clip range of values; null: no clipping.")
    value_coef: PositiveFloat | None = Field(
        default=None,
        description=f"Factor of the value loss. Default: 1; with models.critic.shareActorBody {SHARED_VALUE_COEF}, as "
        "it is added to the policy's loss there.",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    whiten_advantages: bool = Field(default=True, description="Give the batch's advantages mean 0 and variance 1.")
    whiten_rewards: bool = Field(default=False, description="Give the batch's rewards variance 1, keeping their mean.")
    reward_clip: Literal["Auto"] | PositiveFloat | None = Field(
        default="Auto",
        description=f"Scores are clipped to plus or minus this number; null: no clipping. Auto: {REWARD_CLIP} with a "
        "reward model that the job trains (its scores are centred), else no clipping.",
    )
    missing_eos_penalty: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Subtracted from the score of samples without an end token; null: none."
    )
    overlong: Overlong | None = Field(
        default=None, description="A penalty that grows as a response nears generation.maxTokens (DAPO); null: none."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Responses that were cut at generation.maxTokens train nothing in the policy's loss (DAPO's "
        "overlong filtering). The critic and the baselines of groups still see them.",
    )
    drop_equal_groups: bool = Field(
        default=False,
        description="Prompts whose samples all have the same score train nothing, and the policy's loss is a mean over "
        "the others alone.",
    )
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        le=64,
        description="DAPO's dynamic sampling: prompts whose samples all have the same reward are replaced by other "
        "prompts, in at most so many further rounds of generation. Such prompts of the last round stay. 0: off.",
    )
    kl: KL = Field(default_factory=KL, description="KL penalty against the reference.")
    old_log_probs: Literal["Auto", "Rollout", "Recompute"] = Field(
        default="Auto",
        description="Denominator of the policy ratio: the rollout's own log-probabilities, or the trainer's. Auto: "
        "Rollout for float32 without top-k or top-p, else Recompute. With a lag always the trainer's at the weights "
        "that the iteration begins with. They cost a forward pass, unless an iteration is a single step that can use "
        "its own.",
    )
    importance_sampling: ImportanceSampling = Field(
        default_factory=ImportanceSampling, description="Correction of the gap between rollout and trainer."
    )
    routing_replay: bool = Field(
        default=False,
        description="Actors with experts: the trainer uses the experts that the rollout chose for each token (routing "
        "replay, Ma et al. 2025), and reports which share it would have chosen otherwise.",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Decay of the averaged actor; null: none."
    )
    right_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the language-model loss on right responses, which is added to the policy's loss (VAPO: "
        "0.1); 0: off.",
    )
    right_score: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="rightCoef: a response is right if its score, before rewardClip and penalties, is at least this.",
    )
    ptx_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the language-model loss on demonstrations (InstructGPT's PPO-ptx); 0: off.",
    )
    critic_warmup_iterations: int = Field(
        default=0,
        ge=0,
        description="Iterations that train the critic alone first. The actor's learning-rate schedule and the adaptive "
        "KL coefficient begin after them.",
    )
    actor_optimizer: Optimizer = Field(default_factory=Optimizer, description="The actor's optimizer.")
    critic_optimizer: Optimizer = Field(default_factory=Optimizer, description="The critic's optimizer.")

    def weight_version(self, iteration: int) -> int:
        """The version of the weights that draw the samples of `iteration`, which counts from 1. These are the weights
        after step iteration - 1 - lag, or the first weights, which are version 0."""
        return max(0, iteration - 1 - self.lag)

    @property
    def steps_per_iteration(self) -> int:
        """The optimizer steps of each trained model in one iteration."""
        return self.epochs * (self.global_batch_size // self.mini_batch_size)

    @property
    def kept_versions(self) -> int:
        """The number of versions of the weights that each trainer rank keeps in host memory to send them while it
        trains."""
        return kept_versions(self.lag)

    def staleness(self, iteration: int) -> int:
        """The number of iterations of training that lie between the weights that drew the samples of `iteration`
        (1, 2, ...) and those with which the training of `iteration` begins."""
        return iteration - 1 - self.weight_version(iteration)

    @property
    def method(self) -> str:
        """The common name of the method, such as PPO, GRPO, Dr. GRPO, GSPO, CISPO, RLOO or REINFORCE++. It also names
        the user's own functions."""
        names = {
            "gae": "PPO",
            "reinforce++-baseline": "REINFORCE++ with a baseline",
            "distillation": "on-policy distillation",
        }
        name = names.get(self.advantage, self.advantage.upper())
        if self.loss in ("gspo", "cispo"):
            name = self.loss.upper()
        elif name == "GRPO" and not self.normalize_std and self.loss_aggregation == "Constant":
            name = "Dr. GRPO"
        own = [place for place in (self.loss if ":" in self.loss else None, self.advantage_function) if place]
        return " and ".join([name, *own]).replace(" and ", " with ", 1) if own else name

    @property
    def names_functions(self) -> bool:
        """Whether the manifest names functions of the user, which are imported from `importPath`."""
        return self.advantage_function is not None or ":" in self.loss

    @property
    def clip_range(self) -> tuple[float, float]:
        """The distances by which the policy ratio may lie below and above 1."""
        high = self.clip if self.clip_high is None else self.clip_high
        if self.clip_low is not None:
            return self.clip_low, high
        return (1.0 if self.loss == "cispo" else self.clip), high

    @property
    def compares_samples(self) -> bool:
        """Whether the advantages compare the samples of one prompt."""
        return self.advantage in ("grpo", "rloo", "reinforce++-baseline")

    @property
    def reads_reference(self) -> bool:
        """Whether something reads the reference's log-probabilities: the KL penalty, distillation, or the user's own
        advantage or loss."""
        return self.kl.coef > 0 or self.advantage == "distillation" or self.names_functions

    @property
    def kl_in_loss(self) -> bool:
        """Whether `kl.in` puts the penalty in the loss, and not in the reward."""
        return self.kl.place == "Loss" or (self.kl.place == "Auto" and self.advantage == "grpo")

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """`kl.estimator`, with Auto replaced by the estimator that it stands for."""
        if self.kl.estimator != "Auto":
            return self.kl.estimator
        return "k3" if self.kl_in_loss else "k1"


class SessionEnvironment(Model):
    """What an episode is played with: exactly one of function and url."""

    function: Callable_ | None = Field(
        default=None,
        description="module:Class. Its method reset begins an episode with the fields of a prompt's record. Its other "
        "public methods are the tools, and get_reward, if it has one, says what the episode earned. It is imported "
        "from models.reward.importPath.",
    )
    url: Annotated[str, Field(min_length=1, max_length=2048, pattern=URL_PATTERN)] | None = Field(
        default=None,
        description="Where a server has the environments, such as http://games:8000 (environments.md).",
    )
    workers: Annotated[int, WHEN_RESUMED] = Field(
        default=2, ge=1, le=256, description="Largest number of processes in which a function's environments live."
    )
    timeout_seconds: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=120.0, description="Time limit of one call. A process that exceeds it is replaced."
    )


class SessionAgent(Model):
    """A program that plays an episode: it asks for the model's turns, and has tools of its own. Give exactly one of
    command and url."""

    command: list[Annotated[str, Field(max_length=2048)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="The program and its arguments. It is started once for each episode, in models.reward.importPath "
        "or the folder of the job. It gets the prompt's record as JSON on its input, and asks at OPENAI_BASE_URL with "
        "OPENAI_API_KEY.",
    )
    url: Annotated[str, WHEN_RESUMED, Field(min_length=1, max_length=2048, pattern=URL_PATTERN)] | None = Field(
        default=None,
        description="Where a service has the agent, such as http://agents:8000. It is asked to play each episode, and "
        "gets the prompt's record and where to ask for turns (environments.md).",
    )
    timeout_seconds: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=600.0,
        description="Longest time from one turn of the model to the next that it asks for, and from the last to its "
        "end. Then it has failed.",
    )


class Sessions(Model):
    """Episodes in place of samples: the model and tools in turn. Give exactly one of environment and agent."""

    environment: SessionEnvironment | None = Field(
        default=None, description="The tools of the model, and what they work on."
    )
    agent: SessionAgent | None = Field(
        default=None, description="A program of your own that asks for the model's turns as from OpenAI's API."
    )
    max_turns: int = Field(default=8, ge=1, le=1000, description="Largest number of turns of the model in an episode.")
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="Most tokens that the model writes in a turn. generation.maxTokens limits what follows the "
        "episode's prompt, all turns and the tools' answers together; null: that is the only limit.",
    )
    effects: Literal["Auto", "Repeatable", "AtMostOnce"] = Field(
        default="Auto",
        description="What becomes of a call if the coordinator or the environment's process died meanwhile and nobody "
        "can say whether it was made. Repeatable: it is made again. AtMostOnce: the episode is given up and played "
        "again in a new environment. Auto: Repeatable for a function, whose state is its object, and AtMostOnce for a "
        "url.",
    )
    max_concurrent: Annotated[PositiveInt | None, WHEN_RESUMED] = Field(
        default=None,
        description="Most episodes that are played at once, of all iterations together. Results do not depend on it. "
        "null: 16 for each CPU core of the coordinator with an agent's command, which is a process for each episode; "
        "else all.",
    )
    on_failure: Literal["Discard", "Zero"] = Field(
        default="Zero",
        description="What becomes of an episode that the model failed: it called tools in its last turn too, wrote a "
        "call that cannot be read, or reached a limit of tokens. Zero: it earned 0. Discard: it is not trained. "
        "An episode that the environment or the agent failed is never trained.",
    )
    sandbox: Annotated[Literal["Bubblewrap", "Pod", "None"], WHEN_RESUMED] = Field(
        default="Bubblewrap",
        description="What is around the processes of the environment or the agent. Bubblewrap: no network, no files "
        "but the system's, Python's and those beside the code, and limits; bwrap must be installed. Pod, on a cluster "
        "with kubernetes-sigs/agent-sandbox: pods of their own, which reach the job's routes for them and nothing "
        "else. None: they may do what the job may.",
    )
    sandbox_pods: Annotated[int, WHEN_RESUMED] = Field(
        default=1, ge=1, le=64, description="Number of pods with sandbox: Pod. Each has many processes."
    )

    @property
    def repeatable(self) -> bool:
        """Whether a call may be made twice if nobody knows whether it was made."""
        return self.effects == "Repeatable" or (
            self.effects == "Auto" and self.environment is not None and self.environment.url is None
        )


class Generation(Model):
    """How rollouts generate responses."""

    max_tokens: PositiveInt = Field(default=512, description="Longest response, tokens.")
    min_tokens: int = Field(
        default=0,
        ge=0,
        description="No end token before this many. As with topK and topP, log-probabilities are those of the whole "
        "distribution, in which it is still possible.",
    )
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling: least probability mass to keep; 1: off."
    )
    top_k: int = Field(default=0, ge=0, description="Number of most likely tokens to keep; 0: off.")
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=16, description="Strings that end a response."
    )
    max_concurrent: PositiveInt = Field(default=256, description="Largest number of requests in flight on one server.")
    batch_invariant: bool = Field(
        default=False,
        description="On GPUs vLLM takes its batch-invariant kernels: a response does not depend on what is drawn "
        "beside it, so a killed server or a moved sample changes no bit, as on CPUs. It is slower, and needs GPUs of "
        "compute capability 8.0 or later.",
    )
