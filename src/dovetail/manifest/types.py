"""The RLHFJob resource of `dovetail.dev`. It is the only source of the CRD, the JSON schema, `dovetail explain` and the
reference page. Field names are camelCase on the wire and snake_case in Python."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dovetail.manifest.base import (
    BUCKET_PATTERN,
    KEY_PATTERN,
    PREFIX_PATTERN,
    SERVER_PATTERN,
    WORD_PATTERN,
    Callable_,
    ControllerName,
    EvaluationMetric,
    Folder,
    Fraction,
    Model,
    Name,
    ObjectMeta,
    ObjectName,
    Path_,
    PositiveFloat,
    PositiveInt,
    Text,
)
from dovetail.manifest.field_policy import ANYTIME, WHEN_RESUMED, WHEN_SUSPENDED, NoEffect, OnCluster, fixed
from dovetail.manifest.model_families import MODEL_TYPES
from dovetail.manifest.status import RLHFJobStatus
from dovetail.manifest.training_types import (
    DPO,
    PPO,
    Generation,
    Sessions,
    Supervised,
)

# All versions have the same fields. The first is what we write for users. The API server stores the last, which every
# release serves, so programs ask for that one.
ApiVersion = Literal["dovetail.dev/v1beta1", "dovetail.dev/v1alpha1"]
API_VERSIONS: tuple[str, ...] = get_args(ApiVersion)
API_VERSION, STORED_API_VERSION = API_VERSIONS[0], API_VERSIONS[-1]
KIND = "RLHFJob"


class Stage(StrEnum):
    """The three steps of InstructGPT, and DPO, which learns from preferences in place of the last two."""

    SFT = "sft"
    REWARD = "reward"
    DPO = "dpo"
    PPO = "ppo"

    @property
    def model(self) -> Literal["actor", "reward"]:
        """The model that the stage trains. PPO may train the critic as well."""
        return "reward" if self is Stage.REWARD else "actor"

    @property
    def has_pairs(self) -> bool:
        """Whether the stage learns from pairs of responses, which stay together in a micro-batch."""
        return self in (Stage.REWARD, Stage.DPO)


class Dtype(StrEnum):
    """Number format of weights and activations."""

    AUTO = "Auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Role(StrEnum):
    """What a group's pods do."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


# ---------------------------------------------------------------- models


# A type checker does not accept a list that is made at run time.
if TYPE_CHECKING:
    Architecture = str
else:
    Architecture = Literal[MODEL_TYPES]


class ScratchModel(Model):
    """A model trained from random weights: a Hugging Face architecture and its configuration."""

    architecture: Architecture = Field(default="llama", description="Model family.")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the Hugging Face configuration class (hidden_size, num_hidden_layers, ...). "
        "vocab_size comes from the tokenizer.",
    )


class TokenizerTraining(Model):
    """Train a byte-level BPE tokenizer on the job's own data before the first stage."""

    vocab_size: int = Field(default=512, ge=260, le=1_000_000, description="Size of the vocabulary, tokens.")


class ModelSource(Model):
    """Where a model comes from: exactly one of the fields."""

    hugging_face: Text | None = Field(default=None, description="Repository on a Hugging Face hub, as owner/name.")
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit of the hub repository; default: main. A run keeps to the commit that it "
        "found first.",
    )
    path: Path_ | None = Field(default=None, description="Folder in Hugging Face format (safetensors weights).")
    pvc: Annotated[Path_ | None, OnCluster("use path or huggingFace; the run will fail")] = Field(
        default=None, description="claim/path: a folder on a PersistentVolumeClaim."
    )
    scratch: ScratchModel | None = Field(default=None, description="Random weights of the given configuration.")


class LoRA(Model):
    """Low-rank adapters (Hu et al. 2021) in place of full fine-tuning."""

    rank: int = Field(default=8, ge=1, le=1024, description="Inner dimension of the update.")
    alpha: float = Field(default=16.0, gt=0, description="Scale numerator: the update is alpha/rank * B A.")
    dropout: Fraction = Field(default=0.0, description="Dropout rate of the adapters' input.")
    target_modules: list[Text] = Field(
        default_factory=list,
        max_length=64,
        description="Module names; empty means every linear layer of a block. `experts.gate_up_proj` and "
        "`experts.down_proj` are those of all experts.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class TrainedModel(Model):
    """A model that the job trains."""

    source: ModelSource | None = Field(default=None, description="Starting weights; see each model for its default.")
    dtype: Dtype = Field(
        default=Dtype.AUTO,
        description="Auto: bfloat16 with float32 master weights on GPUs, float32 on CPUs and on GPUs that have no "
        "bfloat16 (V100, T4).",
    )
    lora: LoRA | None = Field(default=None, description="Train low-rank adapters in place of all weights.")
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Models with experts: weight of the load-balancing loss (Fedus et al. 2021), which keeps experts "
        "equally used; 0: off. Default: router_aux_loss_coef of the model's config.json if its output_router_logits is "
        "true, else off.",
    )
    trust_remote_code: bool = Field(default=False, description="Run the Python code that comes with the model.")


class CriticModel(TrainedModel):
    """The critic: a model of its own, or a value head on the actor's body."""

    share_actor_body: bool = Field(
        default=False,
        description="AC-share: there is no critic model. The actor's last stage has a value head beside its "
        "vocabulary projection, and one loss and one optimizer train both. It needs less memory and time; the "
        "policy may be worse.",
    )


RewardName = Annotated[str, Field(min_length=1, max_length=63, pattern=WORD_PATTERN)]


class RewardFunction(Model):
    """A Python function that scores responses; the score is the weighted sum over `functions`."""

    function: Callable_ = Field(description="module:callable, as in models.reward.function.")
    weight: float = Field(default=1.0, description="What its rewards count for in the score; below 0: a penalty.")
    name: RewardName | None = Field(
        default=None, description="Its name in metrics (reward/<name>); default: the callable's."
    )
    needs: Literal["Sample", "Group"] | None = Field(
        default=None,
        description="What one call gets: Sample, one response as soon as it is finished; Group, all of a prompt's. "
        "Default: what the function's attribute `needs` says, else Group.",
    )

    @property
    def title(self) -> str:
        """The function's name in metrics and messages."""
        return self.name or self.function.rpartition(":")[2]


class RewardCode(Model):
    """Where the code of reward functions is on a cluster: exactly one of the fields."""

    config_map: ObjectName | None = Field(
        default=None, description="ConfigMap whose keys are the files, such as grader.py."
    )
    pvc: Path_ | None = Field(default=None, description="claim/path: a folder on a PersistentVolumeClaim.")


class RewardModel(TrainedModel):
    """The reward: a trained model, or Python functions called in worker processes of the coordinator."""

    function: Callable_ | None = Field(
        default=None,
        description="module:callable, called with lists of prompts and responses (and each prompt record's other "
        "fields); returns one float per sample. Replaces the reward model.",
    )
    functions: list[RewardFunction] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Several functions in place of one. The score is their weighted sum, and each is reported.",
    )
    import_path: Annotated[Path_ | None, WHEN_RESUMED] = Field(
        default=None,
        description="Folder that functions are imported from; default: the manifest's, in pods the working directory. "
        "PYTHONPATH comes after it.",
    )
    code: Annotated[RewardCode | None, WHEN_RESUMED, OnCluster("functions are imported from importPath")] = Field(
        default=None, description="On a cluster, in place of importPath: a ConfigMap or a claim with the functions."
    )
    workers: Annotated[int, WHEN_RESUMED] = Field(
        default=2, ge=1, le=256, description="Largest number of processes that call functions."
    )
    timeout_seconds: Annotated[PositiveFloat, WHEN_RESUMED] = Field(
        default=120.0, description="Time limit of one call of a function. A process that exceeds it is replaced."
    )

    @property
    def calls(self) -> list[RewardFunction]:
        """The functions that replace the reward model. Empty if a model gives the rewards."""
        if self.function is not None:
            return [RewardFunction(function=self.function)]
        return list(self.functions or [])


class ReferenceModel(TrainedModel):
    """The reference, which is not trained."""

    dtype: Annotated[Dtype, NoEffect("scorers compute in float32 on CPUs and bfloat16 on GPUs")] = Field(
        default=Dtype.AUTO, description="Scorers compute in float32 on CPUs and in bfloat16 on GPUs, whatever it says."
    )


_USE_PATH = OnCluster("use path; the run will fail")


class Tokenizer(Model):
    """The tokenizer of every model of the job; by default the actor source's own."""

    path: Path_ | None = Field(default=None, description="Folder or hub name of a Hugging Face tokenizer.")
    pvc: Annotated[Path_ | None, _USE_PATH] = Field(
        default=None, description="claim/path: its folder on a PersistentVolumeClaim."
    )
    train: TokenizerTraining | None = Field(default=None, description="Train one on the job's data (scratch models).")


class Models(Model):
    """The four models of PPO and their tokenizer."""

    actor: TrainedModel = Field(default_factory=TrainedModel, description="The policy. A source is required.")
    critic: CriticModel = Field(
        default_factory=CriticModel,
        description="Default source: the reward model's weights, or the actor's with a reward function.",
    )
    reward: RewardModel = Field(default_factory=RewardModel, description="Default source: the actor's, after SFT.")
    reference: ReferenceModel = Field(
        default_factory=ReferenceModel, description="Default source: the actor at the start of PPO."
    )
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="Default: the actor source's own.")


# ---------------------------------------------------------------- data


class SyntheticData(Model):
    """The built-in dialogue language, generated from the job's seed: preferred replies can be told from rejected."""

    size: int = Field(default=2048, ge=8, le=10_000_000, description="Records to generate.")


# The formats that `dovetail.coordinator.data.formats` reads.
TemplateUse = Literal["Auto", "Never", "Always"]
DataFormat = Literal["Text", "PromptResponse", "ChosenRejected", "Labelled", "Completions", "Messages", "HH"]


class DataSource(Model):
    """One data set: exactly one of huggingFace, path, pvc and synthetic."""

    hugging_face: Text | None = Field(default=None, description="Data set on a Hugging Face hub, loaded by `datasets`.")
    subset: Text | None = Field(default=None, description="The hub data set's configuration name or data folder.")
    path: Path_ | None = Field(
        default=None,
        description="A .jsonl, .json, .csv, .tsv or .parquet file, or a folder of them; text files may end in .gz.",
    )
    pvc: Annotated[Path_ | None, _USE_PATH] = Field(
        default=None, description="claim/path: such a file or folder on a PersistentVolumeClaim."
    )
    synthetic: SyntheticData | None = Field(default=None, description="Generate the records.")
    revision: Text | None = Field(
        default=None, description="Branch, tag or commit of the hub data set; default: the newest."
    )
    split: Text = Field(default="train", description="Split of a hub data set, in `datasets` syntax.")
    weight: PositiveFloat = Field(
        default=1.0, description="Share in the blend, relative to the other sources of the list."
    )
    format: Literal["Auto", DataFormat] = Field(
        default="Auto", description="Shape of a record; Auto looks at the first one."
    )
    template: TemplateUse = Field(
        default="Auto",
        description="Whether a prompt that is a text becomes a user's message in the tokenizer's chat template. Auto: "
        "if it has one. Always: refuse tokenizers without one, and records without a prompt. Never: texts stay as they "
        "are.",
    )
    system_prompt: Text | None = Field(
        default=None,
        description="Opens each conversation that has no system message of its own.",
    )


class StageSplit(Model):
    """Shares of each data set that the three stages may use, disjointly (DeepSpeed-Chat's data_split)."""

    sft: float = Field(default=2.0, ge=0, description="Share of SFT.")
    reward: float = Field(default=4.0, ge=0, description="Share of reward-model training, or of DPO.")
    ppo: float = Field(default=4.0, ge=0, description="Share of PPO.")


class Data(Model):
    """What the stages learn from: each list is blended by weight and split disjointly across the stages."""

    demonstrations: list[DataSource] = Field(default_factory=list, max_length=64, description="For SFT (and ptx).")
    preferences: list[DataSource] = Field(
        default_factory=list, max_length=64, description="For the reward model, or DPO."
    )
    prompts: list[DataSource] = Field(default_factory=list, max_length=64, description="For PPO.")
    split: StageSplit = Field(
        default_factory=StageSplit, description="Shares of the stages in a data set that several of them use."
    )
    max_prompt_tokens: PositiveInt = Field(default=512, description="Longer prompts keep their last tokens.")
    max_tokens: PositiveInt = Field(
        default=1024, description="Longest sequence in SFT, reward training and DPO, tokens."
    )
    held_out: Fraction = Field(default=0.1, description="Share of each stage's data kept for evaluation.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the tokenizer's chat template, such as Qwen3's {enable_thinking: false}. All stages "
        "use them, and the chat templates of the trained models have them as defaults.",
    )


class Evaluation(Model):
    """Prompts that are never trained on, answered before PPO, during it and after it. Training reads nothing of it."""

    every_iterations: PositiveInt | None = Field(
        default=None,
        description="How often the prompts are answered during PPO. They are always answered before the first "
        "iteration and after the last one. null: only then.",
    )
    held_out: int = Field(
        default=64,
        ge=0,
        le=4096,
        description="How many of the prompts that data.heldOut keeps are answered, if there are no `prompts`. 0: none, "
        "so nothing is evaluated.",
    )
    prompts: list[DataSource] = Field(
        default_factory=list, max_length=16, description="Prompts for evaluation alone; at most 4,096 are answered."
    )
    samples_per_prompt: int = Field(default=1, ge=1, le=1024, description="Answers to each prompt.")
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Sampling temperature of the answers. 0: greedy, always the most likely token. null: "
        "generation.temperature.",
    )
    metrics: list[EvaluationMetric] = Field(
        default_factory=lambda: ["reward"],
        min_length=1,
        max_length=16,
        description="What is measured; more is better. reward: the job's reward model or functions, before rewardClip. "
        "exactMatch: 1 if the answer is the text of answerField, else 0. module:callable: a function like a reward "
        "function, imported from models.reward.importPath or code. With synthetic prompts quality is added.",
    )
    answer_field: Text = Field(
        default="answer", description="exactMatch: the field of a prompt's record with the right answer."
    )
    keep_best: bool = Field(
        default=False,
        description="Export the evaluated weights with the highest mean of the first metric as well, as actor-best.",
    )
    stop_after_no_gain: PositiveInt | None = Field(
        default=None,
        description="End PPO when so many evaluations in a row have not raised the highest mean of the first metric. "
        "null: never.",
    )

    def due(self, version: int) -> bool:
        """Whether the weights after iteration `version` are evaluated during PPO. 0 stands for the weights before the
        first iteration."""
        return version == 0 or (self.every_iterations is not None and version % self.every_iterations == 0)

    @property
    def functions(self) -> list[str]:
        """The user's own metrics, as module:callable."""
        return [metric for metric in self.metrics if ":" in metric]


def metric_name(metric: str) -> str:
    """A metric's name in figures. For module:callable it is the callable's name."""
    return metric.rpartition(":")[2]


# ---------------------------------------------------------------- placement


class GroupGPU(Model):
    """The accelerators of a group's pods."""

    product: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="Value of the nvidia.com/gpu.product node label; null: CPU."
    )
    per_pod: int = Field(
        default=1,
        ge=0,
        le=64,
        description="GPUs of a pod. On CPUs it has no effect, but `dovetail run` refuses a manifest that sets it.",
    )
    claim_template: ObjectName | None = Field(
        default=None,
        description="On a cluster: a ResourceClaimTemplate (dynamic resource allocation) through which a pod gets its "
        "perPod GPUs, in place of the resource nvidia.com/gpu and the product's node label.",
    )


PodCount = Annotated[int, Field(ge=1, le=4096)]
Degree = Annotated[int, Field(ge=1, le=4096)]


class Group(Model):
    """Pods of one kind. A trainer group's pod runs one rank for each GPU, a rollout group's pod one vLLM server."""

    name: Annotated[Name, WHEN_RESUMED] = Field(
        description="Lower-case letters, digits and dashes; part of process and pod names."
    )
    roles: Annotated[list[Role], WHEN_RESUMED] = Field(
        min_length=1,
        max_length=2,
        description="trainer, rollout, or both: the same pods take turns (colocated).",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    gpu: Annotated[GroupGPU, WHEN_RESUMED] = Field(
        default_factory=GroupGPU, description="Accelerators; default: none, a CPU group."
    )
    replicas: PodCount | None = Field(default=None, description="Pods; default: minReplicas, else 1.")
    min_replicas: PodCount | None = Field(
        default=None, description="Smallest number of rollout pods with which the job runs."
    )
    max_replicas: Annotated[
        PodCount | None,
        OnCluster("the group keeps the number of pods it starts with", lambda group: group.max_replicas > group.pods),
    ] = Field(
        default=None, description="Largest number of rollout pods. Those beyond minReplicas start when nodes have room."
    )
    dtype: Annotated[Dtype, WHEN_RESUMED] = Field(
        default=Dtype.AUTO,
        description="Data type of the rollouts' weights. Auto: bfloat16 on GPUs, float16 on GPUs that have no bfloat16 "
        "(V100, T4), float32 on CPUs.",
    )
    image: Annotated[Text | None, WHEN_SUSPENDED, OnCluster("processes run from this machine's Python")] = Field(
        default=None,
        description="Container image of the group's pods. Without it: the operator's, whose torch has kernels for "
        "compute capability 7.5 (T4) and later. A V100 needs an image of its own.",
    )
    preemptible: Annotated[bool, WHEN_SUSPENDED] = Field(
        default=False,
        description="The pods may run on nodes that the cloud takes back after a short notice (spot). They tolerate "
        "the taints of such nodes in GKE, EKS, AKS and Karpenter, prefer these nodes, and end within 25 s of a notice.",
    )
    vllm_args: Annotated[list[Text], WHEN_RESUMED] = Field(
        default_factory=list,
        max_length=64,
        description="Further arguments for the vLLM server. They take precedence over ours.",
    )
    pod_template: Annotated[dict[str, Any], WHEN_SUSPENDED, OnCluster("there are no pods to patch")] = Field(
        default_factory=dict, description="Strategic merge patch of the pod template."
    )

    @property
    def pods(self) -> int:
        """The number of pods that the group starts with."""
        return self.replicas or self.min_replicas or 1

    @property
    def colocated(self) -> bool:
        """Whether the pods train and generate. The processes take turns on their GPUs."""
        return {Role.TRAINER, Role.ROLLOUT} <= set(self.roles)

    @property
    def on_cpu(self) -> bool:
        """Whether the pods have no accelerator."""
        return self.gpu.product is None or self.gpu.per_pod == 0


_NO_POD = OnCluster("there is no pod of the coordinator")


class Coordinator(Model):
    """The pod that runs the job's loop, reads its data, downloads its models and calls its reward functions."""

    image: Annotated[Text | None, _NO_POD] = Field(
        default=None,
        description="Its container image; default: the operator's. An image of your own, made from that one, may hold "
        "reward functions and the packages that they need.",
    )
    pod_template: Annotated[dict[str, Any], _NO_POD] = Field(
        default_factory=dict, description="Strategic merge patch of the pod template."
    )


class SecretKey(Model):
    """One key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="The Secret's name.")
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=KEY_PATTERN)] = Field(
        default="token", description="The key whose value is used."
    )


_OWN_HUB = OnCluster("this machine's own token and cache are used")


class HubAccess(Model):
    """How models and data sets of a Hugging Face hub are fetched. HF_ENDPOINT names another hub than the public one."""

    token_secret: Annotated[SecretKey | None, _OWN_HUB] = Field(
        default=None,
        description="On a cluster: the access token for private and gated repositories. Only the coordinator's pod "
        "gets it. On one machine: log in with `hf auth login`, or set HF_TOKEN.",
    )
    cache_claim: Annotated[Name | None, _OWN_HUB] = Field(
        default=None,
        description="On a cluster: a PersistentVolumeClaim with a hub cache (HF_HUB_CACHE), which all pods read. What "
        "it lacks is downloaded to the job's volume.",
    )
    timeout_seconds: PositiveInt = Field(
        default=7200, description="Longest time that the download of one repository may take."
    )


class Parallelism(Model):
    """Pipeline, tensor and data parallel degrees; their product is the number of ranks."""

    pp: Degree = Field(default=1, description="Pipeline stages.")
    tp: Degree = Field(default=1, description="Ranks that share each layer (tensor parallel).")
    dp: Degree = Field(default=1, description="Ranks, or groups of them, that share the batch (data parallel).")
    cp: Degree = Field(
        default=1,
        description="Of the dp ranks, so many that follow each other share the tokens of each sequence, for long ones "
        "(context parallel, DeepSpeed-Ulysses). dp / cp groups of them share the batch.",
    )
    ep: Degree = Field(
        default=1,
        description="Of the dp ranks, so many that follow each other divide the experts of each layer (expert "
        "parallel). Each sends its tokens to the ranks that hold their experts.",
    )

    @property
    def batch_shares(self) -> int:
        """The number of parts into which a batch is divided."""
        return max(1, self.dp // self.cp)  # a rule refuses a larger cp

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that earlier releases do not know if they are not set, so that these can read the layout."""
        written: dict[str, Any] = write(self)
        unset = (("cp", 1), ("ep", 1), ("loop", False))
        return {name: value for name, value in written.items() if (name, value) not in unset}


class ParallelismByModel(Model):
    """A layout for each trained model; the reward model uses the critic's."""

    actor: Parallelism = Field(description="Layout of the actor's training, in SFT and PPO.")
    critic: Parallelism | None = Field(default=None, description="Default: the actor's.")


_SUM_ORDER = fixed("it says in which order gradients are added up")


class PlanPins(Model):
    """Decisions of the planner that a manifest can pin. The default of each is Auto."""

    placement: Literal["Auto", "Flattening", "Interleaving", "Separation"] = Field(
        default="Auto", description="Which models share which GPUs."
    )
    inter_stage_fusion: Literal["Auto", "Off"] | Fraction = Field(
        default="Auto",
        description="Start inference while generation still runs: Auto, Off, or the share of samples left at which the "
        'remaining ones migrate. Quote "Off": YAML 1.1 reads it as false.',
    )
    intra_stage_fusion: Literal["Auto", "Fused", "TimeSharing", "VShaped", "Dedicated", "Serial"] = Field(
        default="Auto",
        description="How actor and critic training share the pipeline, and in what order a model that trains alone "
        "runs on it. Auto: in the fastest way that ranks can run. VShaped: each rank holds two stages of each model, "
        "which follow the ranks to the last one and back. Dedicated: each model on trainer ranks of its own, both at "
        "once. Serial: 1F1B of one model after the other.",
    )
    activation_memory: PositiveFloat | None = Field(
        default=None,
        description="Limit in GiB of the activations of actor and critic on a trainer rank. Schedules keep to it. "
        "Default: on GPUs what serial 1F1B needs, on CPUs no limit.",
    )
    parallelism: Literal["Auto"] | ParallelismByModel = Field(
        default="Auto", description="Layouts of the trained models over the trainer ranks."
    )
    recompute: Literal["Auto", "Always", "Never"] = Field(
        default="Auto",
        description="Activation checkpointing: training keeps only each layer's input, and computes the layer's "
        "other activations again in the backward pass. The weights are the same, with less memory and a third more "
        "time. Auto: only where training does not fit otherwise.",
    )
    zero3: Annotated[Literal["Auto", "Always", "Never"], _SUM_ORDER] = Field(
        default="Auto",
        description="ZeRO-3: data-parallel ranks gather each layer's weights when a pass comes to it, and share the "
        "sum of gradients between micro-batches too. It needs less memory than gathering them once a step, and more "
        "messages. Auto: on GPUs, where an iteration is faster by 5% or nothing else fits.",
    )
    sharding: Literal["Auto", "Always"] = Field(
        default="Auto",
        description="Data-parallel ranks share a stage's weights, gradients and optimizer state (FSDP2). Auto: yes, "
        "except on CPUs if these have less than 1 GiB. Then each rank holds all of them, and only gradients are sent.",
    )

    @property
    def chunks(self) -> int:
        """The number of stages of a model on each rank of a pipeline of PPO."""
        return 2 if self.intra_stage_fusion == "VShaped" else 1


class Trainer(Model):
    """How trainer ranks compute on GPUs. On CPUs none of this changes anything."""

    compile: Literal["Auto", "Never"] = Field(
        default="Auto",
        description="torch.compile makes fewer and larger kernels of each layer. The first steps take longer. Auto: on "
        "GPUs, where the image has a C compiler, for models without adapters, tensor parallelism and activation "
        "checkpointing, and where the schedule splits no backward pass.",
    )
    deterministic: bool = Field(
        default=True,
        description="A step that is repeated, after a failure or by dovetail debug replay, gives the same bits. An "
        "operation of a loss of your own that has no deterministic form fails. false: faster kernels may add up "
        "numbers in another order each time.",
    )


class Checkpoint(Model):
    """When to save everything, and where."""

    every_steps: Annotated[PositiveInt, ANYTIME] = Field(
        default=1, description="PPO iterations (and tens of SFT and reward steps) between checkpoints."
    )
    keep: Annotated[PositiveInt, ANYTIME] = Field(default=2, description="Checkpoints to keep of a stage.")
    volume: Annotated[
        Name | None, fixed("the run's files are there"), OnCluster("checkpoints go to the run directory")
    ] = Field(default=None, description="PersistentVolumeClaim for the job's files on a cluster.")


class Storage(Model):
    """What becomes of the job's files on a cluster."""

    retain: Literal["Keep", "Delete"] = Field(
        default="Keep",
        description="What happens to the claim <job>-files, which a job gets that names none in checkpoint.volume, "
        "when the job is deleted. Keep: it stays, with the models and checkpoints in it. Delete: it is deleted as "
        "well.",
    )
    folder: Annotated[Folder | None, WHEN_RESUMED] = Field(
        default=None,
        description="Folder of the claim that the job writes to. If an earlier job left a run there, this job goes on "
        "with it; another folder starts anew. null: a new folder, named after the job and its uid, also on "
        "a claim <job>-files that was kept of an earlier job.",
    )


class ObjectStorage(Model):
    """A bucket that speaks the S3 protocol."""

    bucket: Annotated[str, Field(min_length=3, max_length=63, pattern=BUCKET_PATTERN)] = Field(
        description="The bucket's name. It must exist."
    )
    prefix: Annotated[str, Field(max_length=512, pattern=PREFIX_PATTERN)] = Field(
        default="", description="What the names of all objects begin with, such as models/chat-7b."
    )
    endpoint: Annotated[str, Field(max_length=512, pattern=SERVER_PATTERN)] | None = Field(
        default=None, description="URL of the server; default: Amazon's of the region."
    )
    region: Text | None = Field(default=None, description="The bucket's region, if the server has regions.")
    credentials_secret: ObjectName | None = Field(
        default=None,
        description="On a cluster: a Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if needed, "
        "AWS_SESSION_TOKEN. Only the coordinator's pod gets it. On one machine, or without a Secret: these environment "
        "variables, or what else the AWS SDK finds.",
    )


# All models that a job may have trained, in the order in which they are made.
TRAINED_MODELS = ("sft", "reward", "actor", "actor-best", "actor-ema", "critic")


class Output(Model):
    """Where the trained models are copied when the job is done: exactly one of path, pvc and s3. Each model gets a
    folder of its own: sft, reward, actor, actor-best, actor-ema or critic."""

    path: Path_ | None = Field(
        default=None,
        description="A folder. A model that this run has copied there is replaced, and nothing else.",
    )
    pvc: Annotated[Path_ | None, OnCluster("use path or s3; nothing is copied")] = Field(
        default=None, description="claim/path: a folder on a PersistentVolumeClaim, which the coordinator's pod mounts."
    )
    s3: ObjectStorage | None = Field(default=None, description="Object storage.")

    @property
    def place(self) -> str:
        """The place of the models in words, for people."""
        if self.s3 is not None:
            return "/".join(part for part in (f"s3://{self.s3.bucket}", self.s3.prefix.strip("/")) if part)
        return str(self.pvc or self.path)


class FailurePolicy(Model):
    """Which failures the job survives."""

    max_restarts: int = Field(
        default=10,
        ge=0,
        description="Restarts within an hour that the job survives, of all processes together (on a cluster: of all "
        "pods that the job cannot run without). One more fails the job. On a cluster a change counts for pods at "
        "once. For the restarts of a server inside a rollout's pod it counts when the job resumes or is tried again.",
    )
    reward_retries: int = Field(
        default=3,
        ge=0,
        description="How often a failed call of a reward function is tried again. A call fails if it raises, "
        "crashes or takes too long.",
    )
    peer_timeout_seconds: PositiveInt = Field(
        default=120,
        description="A worker that is silent for this long counts as dead. A process that is stopped for this long "
        "is killed and started again.",
    )
    on_unhealthy: Literal["Warn", "Stop"] = Field(
        default="Warn",
        description="What happens after an unhealthy PPO iteration (docs/health.md): a warning, or the end of the "
        "run. If rollouts and trainers disagree about log-probabilities, the run always ends.",
    )
    start_timeout_seconds: Annotated[PositiveInt | None, OnCluster("processes start at once or fail")] = Field(
        default=None,
        description="On a cluster: the job fails when a pod that it cannot start without waits longer than this for "
        "a node or an image, or may not be made. Until the job has run, the time counts from when it wants pods. "
        "null: as long as the chart's jobs.startTimeoutSeconds says, by default for ever.",
    )


class SampleLog(Model):
    """Which of the model's responses can be read afterwards."""

    keep_megabytes: int = Field(
        default=256,
        ge=0,
        description="Size of the folder with all samples of PPO iterations (dovetail samples). The oldest iterations "
        "are deleted first. 0: no text is kept or shown.",
    )
    show_every_iterations: int = Field(
        default=5,
        ge=0,
        description="How often the log shows the response with the highest and the one with the lowest reward of an "
        "iteration. 0: never.",
    )


class Tracker(Model):
    """Where the run's metrics are sent while it runs. A tracker that is down or missing never stops or slows a run."""

    kind: Literal["wandb", "mlflow", "trackio", "otlp"] = Field(
        description="wandb, mlflow, trackio: metrics, by their own clients, which are optional packages. otlp: "
        "the timelines of iterations, as OpenTelemetry spans over HTTP."
    )
    project: Text = Field(
        default="dovetail",
        description="The W&B or Trackio project, the MLflow experiment, the spans' service.namespace.",
    )
    name: Text | None = Field(default=None, description="The run's name there. Default: the run directory's.")
    url: Text | None = Field(
        default=None,
        description="The server: W&B's, MLflow's tracking URI, Trackio's, or the collector's (http://host:4318). "
        "Default: what the client takes from its environment variables.",
    )
    secret: Annotated[ObjectName | None, OnCluster("set its environment variables yourself")] = Field(
        default=None,
        description="On a cluster: a Secret whose keys become environment variables of the coordinator's pod, such as "
        "WANDB_API_KEY. On one machine: set them yourself.",
    )


_COUNTED = fixed("the stage's steps and batches are counted in it")


class RLHFJobSpec(Model):
    """The stages, models, data and pods of a job."""

    suspend: Annotated[bool, ANYTIME, OnCluster("the job starts all the same")] = Field(
        default=False, description="True: none of the job's pods run. Queues such as Kueue set this field."
    )
    retry: Annotated[int, ANYTIME] = Field(
        default=0,
        ge=0,
        le=2**31 - 1,
        description="On a cluster: raise this number to start a failed job again, from its last checkpoint. It means "
        "nothing while a job has not failed.",
    )
    managed_by: Annotated[ControllerName | None, WHEN_RESUMED] = Field(
        default=None,
        description="The controller that runs the job, such as kueue.x-k8s.io/multikueue. The operator leaves a job of "
        "another controller alone, and its status is what that controller writes. Default: dovetail.dev/operator.",
    )
    job_class: Annotated[
        Name | None, WHEN_SUSPENDED, OnCluster("there are no pods to which a class gives anything")
    ] = Field(
        default=None,
        alias="class",
        description="The RLHFJobClass from which the pods get images, podTemplates and a queue, and which says what "
        "this job may name. null: none.",
    )
    seed: Annotated[int, fixed("everything random in the run so far came from it")] = Field(
        default=0, ge=0, le=2**31 - 1, description="Seed of all random numbers of the job."
    )
    stages: Annotated[list[Stage], fixed("each stage began from the result of the one before")] = Field(
        default_factory=lambda: [Stage.SFT, Stage.REWARD, Stage.PPO],
        min_length=1,
        max_length=4,
        description="Any of sft, reward, ppo, in this order, or dpo alone or after sft; each stage's result feeds the "
        "next.",
    )
    models: Annotated[Models, fixed("the weights so far belong to these models")] = Field(
        default_factory=Models, description="Actor, critic, reward, reference and tokenizer."
    )
    data: Annotated[Data, fixed("the records of each step were drawn from this data")] = Field(
        default_factory=Data, description="Demonstrations, preferences and prompts."
    )
    sft: Annotated[Supervised, _COUNTED] = Field(default_factory=Supervised, description="Supervised fine-tuning.")
    reward: Annotated[Supervised, _COUNTED] = Field(default_factory=Supervised, description="Reward-model training.")
    dpo: Annotated[DPO, _COUNTED] = Field(
        default_factory=DPO, description="Learning from preferences without a reward model."
    )
    ppo: PPO = Field(default_factory=PPO, description="Reinforcement learning.")
    generation: Annotated[Generation, fixed("samples under way were begun with it")] = Field(
        default_factory=Generation, description="How rollouts generate responses."
    )
    sessions: Annotated[Sessions | None, fixed("episodes under way were begun with it")] = Field(
        default=None,
        description="Set: samples are episodes of several turns, with the tools of an environment or with an agent.",
    )
    evaluation: Annotated[Evaluation, WHEN_RESUMED] = Field(
        default_factory=Evaluation, description="How the policy is measured on prompts that it does not train on."
    )
    groups: Annotated[list[Group], ANYTIME] = Field(
        min_length=1,
        max_length=32,
        description="The pods, by kind of hardware.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    coordinator: Annotated[Coordinator, WHEN_SUSPENDED] = Field(
        default_factory=Coordinator, description="The coordinator's pod on a cluster."
    )
    hub: Annotated[HubAccess, WHEN_SUSPENDED] = Field(
        default_factory=HubAccess, description="How models and data sets of a hub are fetched."
    )
    plan: Annotated[PlanPins, WHEN_RESUMED] = Field(
        default_factory=PlanPins, description="Decisions that the planner must not change."
    )
    trainer: Trainer = Field(default_factory=Trainer, description="How trainer ranks compute on GPUs.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When to save, and where.")
    storage: Annotated[Storage, ANYTIME, OnCluster("the run directory is kept; --resume goes on with it")] = Field(
        default_factory=Storage, description="What becomes of the job's files on a cluster."
    )
    output: Annotated[Output | None, WHEN_RESUMED] = Field(
        default=None, description="Where the trained models are copied when the job is done. null: nowhere."
    )
    failure_policy: Annotated[FailurePolicy, ANYTIME] = Field(
        default_factory=FailurePolicy, description="Which failures the job survives."
    )
    samples: Annotated[SampleLog, ANYTIME] = Field(
        default_factory=SampleLog, description="Which responses are kept and shown as text."
    )
    trackers: Annotated[list[Tracker], WHEN_SUSPENDED] = Field(
        default_factory=list,
        max_length=8,
        description="Where the run's metrics are sent, beside the TensorBoard files of every run.",
    )
    active_deadline_seconds: Annotated[PositiveInt | None, ANYTIME] = Field(
        default=None,
        description="The job fails when it has run for this many seconds, restarts included. On one machine all "
        "resumes count.",
    )
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0)] | None, ANYTIME, OnCluster("the run directory is kept")
    ] = Field(default=None, description="Delete the job this long after it finished.")

    def supervised(self, stage: Stage) -> Supervised:
        """The settings of a stage other than PPO."""
        found: Supervised = getattr(self, stage.value)
        return found


class RLHFJob(Model):
    """An RLHF training job: SFT, reward model and PPO, or SFT and DPO, from one manifest."""

    api_version: ApiVersion = Field(description="The version of the API. Both have the same fields.")
    kind: Literal["RLHFJob"] = Field(description="RLHFJob")
    metadata: ObjectMeta = Field(description="Standard object metadata.")
    spec: RLHFJobSpec = Field(description="What to train, on what, with what.")
    status: RLHFJobStatus | None = Field(default=None, description="The observed state. Only the operator writes it.")
