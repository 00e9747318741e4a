"""The RLHFJob resource, `dovetail.dev/v1alpha1`: the one source of the CRD, the JSON schema, `dovetail explain`
and the reference page. Field names are camelCase on the wire and snake_case in Python."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

API_VERSION = "dovetail.dev/v1alpha1"
KIND = "RLHFJob"

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Model(BaseModel):
    """Base of every API object: camelCase aliases, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Stage(StrEnum):
    SFT = "sft"
    REWARD = "reward"
    PPO = "ppo"


class Dtype(StrEnum):
    AUTO = "Auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Role(StrEnum):
    TRAINER = "trainer"
    ROLLOUT = "rollout"


# ---------------------------------------------------------------- models


class ScratchModel(Model):
    """A model trained from random weights: a Hugging Face architecture and its configuration."""

    architecture: Literal["llama", "qwen2", "qwen3", "opt"] = Field("llama", description="Model family.")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the Hugging Face configuration class (hidden_size, num_hidden_layers, ...). "
        "vocab_size comes from the tokenizer.",
    )


class TokenizerTraining(Model):
    """Train a byte-level BPE tokenizer on the job's own data before the first stage."""

    vocab_size: int = Field(512, ge=260, le=1_000_000, description="Size of the vocabulary, tokens.")


class ModelSource(Model):
    """Where a model comes from: exactly one of the fields."""

    hugging_face: str | None = Field(None, description="Repository on a Hugging Face hub, as owner/name.")
    revision: str | None = Field(None, description="Branch, tag or commit of the hub repository.")
    path: str | None = Field(None, description="Folder in Hugging Face format (safetensors weights).")
    pvc: str | None = Field(None, description="claim/path: a folder on a PersistentVolumeClaim.")
    scratch: ScratchModel | None = Field(None, description="Random weights of the given configuration.")


class LoRA(Model):
    """Low-rank adapters (Hu et al. 2021) in place of full fine-tuning."""

    rank: int = Field(8, ge=1, le=1024)
    alpha: float = Field(16.0, gt=0, description="Scale numerator: the update is alpha/rank * B A.")
    dropout: Fraction = 0.0
    target_modules: list[str] = Field(
        default_factory=list, max_length=64, description="Module names; empty means every linear layer of a block."
    )


class TrainedModel(Model):
    """A model that the job trains."""

    source: ModelSource | None = Field(None, description="Starting weights; see each model for its default.")
    dtype: Dtype = Field(Dtype.AUTO, description="Auto: bfloat16 with float32 master weights on GPUs, float32 on CPUs.")
    lora: LoRA | None = None
    trust_remote_code: bool = Field(False, description="Let the model's own Python code run. Off unless you say so.")


class RewardModel(TrainedModel):
    """The reward: a trained model, or a Python function called in the coordinator."""

    function: str | None = Field(
        None,
        description="module:callable, called with lists of prompts and responses (and each prompt record's other fields); "
        "returns one float per sample. Replaces the reward model.",
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
    )


class Tokenizer(Model):
    """The tokenizer of every model of the job; by default the actor source's own."""

    path: str | None = Field(None, description="Folder or hub name of a Hugging Face tokenizer.")
    train: TokenizerTraining | None = Field(None, description="Train one on the job's data (scratch models).")


class Models(Model):
    actor: TrainedModel = Field(default_factory=TrainedModel, description="The policy. A source is required.")
    critic: TrainedModel = Field(default_factory=TrainedModel, description="Default source: the reward model's weights.")
    reward: RewardModel = Field(default_factory=RewardModel, description="Default source: the actor's, after SFT.")
    reference: TrainedModel = Field(default_factory=TrainedModel, description="Default source: the actor at the start of PPO.")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)


# ---------------------------------------------------------------- data


class SyntheticData(Model):
    """The built-in dialogue language, generated from the job's seed: preferred replies can be told from rejected ones."""

    size: int = Field(2048, ge=8, le=10_000_000, description="Records to generate.")


class DataSource(Model):
    """One data set: exactly one of huggingFace, path and synthetic."""

    hugging_face: str | None = Field(None, description="Data set on a Hugging Face hub, loaded by `datasets`.")
    subset: str | None = Field(None, description="The hub data set's configuration name or data folder.")
    path: str | None = Field(None, description="A .jsonl, .jsonl.gz or .parquet file, or a folder of them.")
    synthetic: SyntheticData | None = None
    split: str = Field("train", description="Split of a hub data set, in `datasets` syntax.")
    weight: PositiveFloat = Field(1.0, description="Share in the blend, relative to the other sources of the list.")
    format: Literal["Auto", "Text", "PromptResponse", "ChosenRejected", "Messages", "HH"] = Field(
        "Auto", description="Shape of a record; Auto looks at the first one."
    )


class StageSplit(Model):
    """Shares of each data set that the three stages may use, disjointly (DeepSpeed-Chat's data_split)."""

    sft: float = Field(2.0, ge=0)
    reward: float = Field(4.0, ge=0)
    ppo: float = Field(4.0, ge=0)


class Data(Model):
    demonstrations: list[DataSource] = Field(default_factory=list, max_length=64, description="For SFT (and ptx).")
    preferences: list[DataSource] = Field(default_factory=list, max_length=64, description="For the reward model.")
    prompts: list[DataSource] = Field(default_factory=list, max_length=64, description="For PPO.")
    split: StageSplit = Field(default_factory=StageSplit)
    max_prompt_tokens: PositiveInt = Field(512, description="Longer prompts keep their last tokens.")
    max_tokens: PositiveInt = Field(1024, description="Longest sequence in SFT and reward training, tokens.")
    held_out: Fraction = Field(0.1, description="Share of each stage's data kept for evaluation.")


# ---------------------------------------------------------------- training


class Optimizer(Model):
    learning_rate: PositiveFloat = 1e-5
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: PositiveFloat = Field(1.0, description="Global gradient norm above which gradients are scaled down.")
    schedule: Literal["Constant", "Linear", "Cosine"] = Field("Cosine", description="Decay after warm-up.")
    warmup_fraction: Fraction = 0.03
    offload: bool = Field(False, description="Keep optimizer state in host memory between steps.")


class Supervised(Model):
    """SFT or reward-model training."""

    steps: int | None = Field(None, ge=1, description="Optimizer steps; default: one pass over the data times epochs.")
    epochs: PositiveInt = 1
    batch_size: PositiveInt = Field(32, description="Sequences (or pairs) per optimizer step, all ranks together.")
    micro_batch_size: PositiveInt = Field(8, description="Sequences (or pairs) per forward pass of one rank.")
    optimizer: Optimizer = Field(default_factory=Optimizer)


class KL(Model):
    """KL penalty against the reference, in the reward."""

    coef: float = Field(0.05, ge=0, description="Coefficient, or its start value when a target is given.")
    target: float | None = Field(None, gt=0, description="Per-sample KL, nats, that the adaptive controller aims for.")
    horizon: PositiveInt = Field(10_000, description="Samples over which the adaptive controller corrects.")
    estimator: Literal["k1", "k2", "k3"] = "k1"


class ImportanceSampling(Model):
    """Correction of the gap between the rollout's and the trainer's log-probabilities."""

    mode: Literal["Truncated", "Off"] = "Truncated"
    cap: float = Field(2.0, gt=0, description="Upper bound of the per-token weight.")


class PPO(Model):
    iterations: PositiveInt = 100
    global_batch_size: PositiveInt = Field(64, description="Samples per iteration: prompts times samplesPerPrompt.")
    samples_per_prompt: PositiveInt = 1
    mini_batch_size: PositiveInt = Field(64, description="Samples per optimizer step, all ranks together.")
    micro_batch_size: PositiveInt = Field(8, description="Samples per forward pass of one rank.")
    epochs: PositiveInt = Field(1, description="Passes over an iteration's samples.")
    advantage: Literal["gae", "grpo", "rloo"] = "gae"
    advantage_function: str | None = Field(
        None, description="module:callable replacing `advantage`; see docs/custom.md.", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
    )
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    clip: PositiveFloat = Field(0.2, description="Policy ratio clip range.")
    dual_clip: float | None = Field(None, gt=1, description="Bound on the ratio for negative advantages (Ye et al. 2020).")
    value_clip: PositiveFloat | None = Field(0.2, description="Clip range of values; null: no clipping.")
    value_coef: PositiveFloat = Field(1.0, description="Factor of the critic's loss.")
    entropy_coef: float = Field(0.0, ge=0)
    whiten_advantages: bool = True
    whiten_rewards: bool = False
    reward_clip: PositiveFloat | None = Field(5.0, description="Scores are clipped to +-this; null: not.")
    missing_eos_penalty: float | None = Field(None, ge=0, description="Subtracted from samples without an end token.")
    kl: KL = Field(default_factory=KL)
    old_log_probs: Literal["Auto", "Rollout", "Recompute"] = Field(
        "Auto",
        description="Denominator of the policy ratio: the rollout's own log-probabilities, or a forward pass of the trainer. "
        "Auto: Rollout for float32 at temperature 1 without top-k or top-p, else Recompute.",
    )
    importance_sampling: ImportanceSampling = Field(default_factory=ImportanceSampling)
    ema: float | None = Field(None, gt=0, lt=1, description="Decay of the averaged actor; null: none.")
    ptx_coef: float = Field(0.0, ge=0, description="Weight of the language-model loss on demonstrations (mixture training).")
    critic_warmup_iterations: int = Field(0, ge=0, description="Iterations that train the critic alone first.")
    actor_optimizer: Optimizer = Field(default_factory=Optimizer)
    critic_optimizer: Optimizer = Field(default_factory=Optimizer)


class Generation(Model):
    max_tokens: PositiveInt = Field(512, description="Longest response, tokens.")
    min_tokens: int = Field(0, ge=0)
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off.")
    stop: list[str] = Field(default_factory=list, max_length=16, description="Strings that end a response.")
    max_concurrent: PositiveInt = Field(256, description="Most requests in flight on one server.")


# ---------------------------------------------------------------- placement


class GPU(Model):
    product: str | None = Field(None, max_length=63, description="Value of the nvidia.com/gpu.product node label; null: CPU.")
    per_pod: int = Field(1, ge=0, le=64)


class Group(Model):
    """Pods of one kind. A pod of a trainer group runs one rank a GPU, of a rollout group one vLLM server."""

    name: Name
    roles: list[Role] = Field(min_length=1, max_length=2)
    gpu: GPU = Field(default_factory=GPU)
    replicas: int | None = Field(None, ge=1, le=4096)
    min_replicas: int | None = Field(None, ge=1, le=4096)
    max_replicas: int | None = Field(None, ge=1, le=4096)
    dtype: Dtype = Dtype.AUTO
    image: str | None = None
    vllm_args: list[str] = Field(default_factory=list, max_length=64, description="More arguments for the vLLM server.")
    pod_template: dict[str, Any] = Field(default_factory=dict, description="Strategic merge patch of the pod template.")


class Parallelism(Model):
    """Pipeline, tensor and data parallel degrees; their product is the number of ranks."""

    pp: PositiveInt = 1
    tp: PositiveInt = 1
    dp: PositiveInt = 1


class ParallelismByModel(Model):
    actor: Parallelism
    critic: Parallelism | None = Field(None, description="Default: the actor's.")


class PlanPins(Model):
    placement: Literal["Auto", "Flattening", "Interleaving", "Separation"] = "Auto"
    inter_stage_fusion: Literal["Auto", "Off"] | Fraction = Field("Auto", description="A number pins the threshold.")
    intra_stage_fusion: Literal["Auto", "Fused", "TimeSharing", "Serial"] = "Auto"
    parallelism: Literal["Auto"] | ParallelismByModel = "Auto"


class Checkpoint(Model):
    every_steps: PositiveInt = Field(1, description="PPO iterations (and tens of SFT and reward steps) between checkpoints.")
    keep: PositiveInt = 2
    volume: str | None = Field(None, description="PersistentVolumeClaim for the job's files on a cluster.")


class FailurePolicy(Model):
    max_restarts: int = Field(10, ge=0, description="Process restarts before the job fails, all processes together.")
    peer_timeout_seconds: PositiveInt = Field(120, description="Silence after which a worker counts as dead.")


class RLHFJobSpec(Model):
    suspend: bool = False
    seed: int = Field(0, ge=0, le=2**31 - 1)
    stages: list[Stage] = Field(default_factory=lambda: list(Stage), min_length=1, max_length=3)
    models: Models = Field(default_factory=Models)
    data: Data = Field(default_factory=Data)
    sft: Supervised = Field(default_factory=Supervised)
    reward: Supervised = Field(default_factory=Supervised)
    ppo: PPO = Field(default_factory=PPO)
    generation: Generation = Field(default_factory=Generation)
    groups: list[Group] = Field(min_length=1, max_length=32)
    plan: PlanPins = Field(default_factory=PlanPins)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    active_deadline_seconds: PositiveInt | None = None
    ttl_seconds_after_finished: int | None = Field(None, ge=0)


class ObjectMeta(BaseModel):
    """The parts of Kubernetes metadata that Dovetail reads; others are kept as they are."""

    model_config = ConfigDict(extra="allow")
    name: Name
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class RLHFJob(Model):
    api_version: Literal["dovetail.dev/v1alpha1"]
    kind: Literal["RLHFJob"]
    metadata: ObjectMeta
    spec: RLHFJobSpec
    status: dict[str, Any] | None = None
