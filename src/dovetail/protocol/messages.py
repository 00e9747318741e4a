"""The messages between a job's processes. They are JSON over HTTP; `dovetail.protocol.wire` encodes arrays.

Every request carries `Authorization: Bearer <token of the job>`. docs/architecture.md shows the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.manifest.model_shape import Head
from dovetail.manifest.types import ScratchModel, Stage
from dovetail.protocol.plan import Layout

Kind = Literal["F", "B", "I", "W"]
"""F is a forward pass and B a backward pass. A split backward is I (input gradient) and later W (weight gradient)."""


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Span(Message):
    """One bar of the timeline, on track `process`/`lane`. `start` and `end` are seconds since the Unix epoch."""

    name: str
    process: str
    lane: str = "main"
    start: float
    end: float
    iteration: int | None = None
    args: dict[str, Any] = Field(default_factory=dict)


# ---------------------------------------------------------------- trainer ranks -> coordinator


class JoinRequest(Message):
    """POST /v1/trainer/join: a rank offers itself. This is a long poll: the answer comes when all ranks have joined."""

    name: str
    rank: int
    world_size: int
    incarnation: str
    host: str
    port: int = Field(description="A free port on host. That of rank 0 becomes the rendezvous.")
    meeting: str = Field(
        default="", description="On one machine, rank 0's file that becomes the rendezvous in place of the port."
    )
    nccl_version: str | None = None


class JoinReply(Message):
    """`generation` is null if the poll timed out. The rank then asks again."""

    generation: int | None = None
    world_size: int = 0
    master_host: str = ""
    master_port: int = 0
    meeting: str = ""


class ModelRef(Message):
    """The source from which a trainer or scorer gets a model. The head `lm` gives vocabulary logits, `value` gives one
    scalar per token, and `lm+value` gives both."""

    head: Head
    path: str | None = Field(
        default=None, description="Hugging Face folder. A value head that it lacks starts at zero."
    )
    scratch: ScratchModel | None = Field(
        default=None, description="It is set instead of `path` for random weights, which are drawn from `seed`."
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer folder, for the vocabulary size of scratch models and exports."
    )
    seed: int = 0
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder of the weights, if they are not random."""
        return None if self.path is None else Path(self.path)


class Action(Message):
    """One entry of a rank's schedule. Micro-batches are counted through all mini-batches of the schedule. `chunk` is
    the index of the stage among the rank's stages of the model."""

    model: str
    micro_batch: int
    kind: Kind
    chunk: int = 0


class Load(Message):
    """Build models and optimizers for a stage, from sources or a checkpoint. A rank first drops all it holds."""

    kind: Literal["load"] = "load"
    id: str
    stage: Stage
    models: dict[str, ModelRef] = Field(
        description="SFT: actor. Reward: reward. PPO: actor and critic (critic only with gae)."
    )
    total_steps: int = Field(description="Optimizer steps of the stage, for the learning-rate schedule.")
    checkpoint: str | None = None
    run: str = Field(default="", description="Id of the run that the checkpoint must belong to. Empty allows any run.")
    layouts: dict[str, Layout] = Field(
        default_factory=dict, description="Layouts of models whose stages are elsewhere than the plan puts them."
    )
    recompute: list[str] = Field(
        default_factory=list, description="Models that are trained with activation checkpointing."
    )
    zero3: list[str] = Field(
        default_factory=list,
        description="Models whose data-parallel ranks gather the weights layer by layer in each pass (ZeRO-3).",
    )
    keep_versions: int = Field(
        default=0,
        ge=0,
        description="How many versions of the weights, the newest included, each rank keeps in host memory, to be sent "
        "while it trains. 0: none; weights are then sent between steps.",
    )


class BatchPart(Message):
    """POST /v1/batches/{batch}: the part of a batch that a rank needs. Of the arrays without padding, those in `some`
    come with these rows only, those in `whole` completely, and others not at all. All other arrays are always there."""

    rows: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    some: list[str] = Field(default_factory=list)
    whole: list[str] = Field(default_factory=list)


class Step(Message):
    """One optimizer step of SFT or reward training, or one PPO iteration's training (epochs x mini-batches)."""

    kind: Literal["step"] = "step"
    id: str
    stage: Stage
    step: int = Field(description="1 for the first step after `load` without a checkpoint.")
    batch: str = Field(description="GET /v1/batches/{batch}")
    actions: list[list[Action]] = Field(
        description="One list per rank. In PPO it covers `mini_batches` mini-batches, and is repeated for the others."
    )
    mini_batches: int = Field(
        default=1, ge=1, description="PPO: optimizer steps of each model in one run of the actions."
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Set: a micro-batch has at most so many tokens, and every data-parallel rank makes as few as that "
        "allows, all as many. The actions are then of one row each, and those beyond are left out.",
    )
    kl_coef: float = 0.0
    train_actor: bool = True
    learning_rates: dict[str, float] = Field(
        default_factory=dict,
        description="By model: learning rates that the run has changed. They replace the manifest's.",
    )
    total_steps: int | None = Field(
        default=None, description="Set where a run has been extended. It replaces `load`'s."
    )
    warmup_total: int | None = Field(
        default=None, description="Set likewise: the number of steps of which warm-up is a share."
    )


class Evaluate(Message):
    """Evaluate on whole batches, without gradients. The result's metrics are, for SFT, `loss` and `tokens`. For DPO
    they are those of its step. For the reward model they are `accuracy`, `pairs`, `correct`, `loss`, `chosen` and
    `rejected` of `batches`, and `demonstrations` and `demonstration_score` of `demonstrations`."""

    kind: Literal["evaluate"] = "evaluate"
    id: str
    stage: Stage
    batches: list[str]
    demonstrations: list[str] = Field(default_factory=list, description="Reward: batches in the layout of SFT batches.")
    reference: bool = Field(
        default=False,
        description="DPO: the log-probabilities of the batches' responses are asked for, and no metrics. It is sent "
        "while the ranks have the stage's first weights, so they are the reference's.",
    )


class Save(Message):
    """Write a checkpoint folder atomically: it is written under a temporary name and then renamed."""

    kind: Literal["save"] = "save"
    id: str
    path: str
    run: str = Field(default="", description="Id of the run. It is written into the checkpoint.")


class Export(Message):
    """Write a Hugging Face folder atomically. The model `ema` exists only with ppo.ema."""

    kind: Literal["export"] = "export"
    id: str
    model: Literal["actor", "critic", "reward", "ema"]
    path: str
    subtract: float = Field(
        default=0.0,
        allow_inf_nan=False,
        description="This is subtracted from every value of a model with a value head, from now on.",
    )
    run: str = Field(default="", description="Id of the run. It is written into the folder.")


class Receiver(Message):
    """One process that takes part in a weight transfer."""

    name: str
    kind: Literal["rollout", "scorer"]
    models: list[str] = Field(description="Models that it takes. Rollouts take the actor, scorers the critic.")
    rank_offset: int = Field(description="Its first rank in every communicator. The sender is rank 0.")
    world: int = 1
    dtype: str | None = Field(default=None, description="The dtype in which it holds them, if it says so.")


class Publish(Message):
    """Send weights to receivers. Rank 0 posts to /v1/weights/offer, then the senders broadcast. The result follows."""

    kind: Literal["publish"] = "publish"
    id: str
    version: int
    epoch: int = Field(description="It changes when the set of receivers changes. Communicators are then made anew.")
    receivers: list[Receiver]
    deadline_seconds: float = 120.0


class Stop(Message):
    kind: Literal["stop"] = "stop"
    id: str


Command = Annotated[Load | Step | Evaluate | Save | Export | Publish | Stop, Field(discriminator="kind")]


class StageTimes(Message):
    """The times that one rank measured for one stage of a model in a step."""

    rank: int
    model: str
    chunk: int = Field(default=0, ge=0, description="The index of the stage among the model's stages on the rank.")
    seconds: dict[Kind, list[float]] = Field(
        description="Compute time without waits: for each micro-batch of a mini-batch, the median over mini-batches."
    )
    activation: list[float] = Field(
        description="Bytes that each micro-batch holds from its forward to its backward pass, as medians likewise."
    )
    transfer: float | None = Field(
        default=None,
        description="Seconds that a message to the next rank of the pipeline takes. null at the last one, if not "
        "measured, and with a rank's later stages.",
    )


class Probe(Message):
    """Log-probabilities under the weights of a version. A server must compute the same log-probabilities before it may
    serve these weights."""

    version: int
    tokens: list[int]
    logprobs: list[float] = Field(
        description="The log-probabilities of tokens[1:], each given all tokens before it, at the served temperature."
    )
    dtype: str = Field(description="The dtype in which the trainers computed.")


class CommandResult(Message):
    id: str
    ok: bool
    error: str | None = Field(default=None, description="One sentence. The traceback is in the rank's log.")
    damaged: bool = Field(default=False, description="Load: the checkpoint's files differ from what was saved.")
    logprobs: list[float] = Field(
        default_factory=list,
        description="Evaluate with `reference`: of each response of each batch, nats; then of the batch's `kl_` rows.",
    )
    metrics: dict[str, float] = Field(default_factory=dict)
    spans: list[Span] = Field(default_factory=list)
    times: list[StageTimes] = Field(default_factory=list, description="PPO step: times of every rank and model.")
    probe: Probe | None = Field(
        default=None, description="Publish to rollouts: the probe of the weights that were sent."
    )


# The threads of rank 0 that ask for commands: its main thread, and the one that sends kept weights.
RankThread = Literal["main", "weights"]


class NextRequest(Message):
    """POST /v1/trainer/next, by rank 0 only. This is a long poll of at most 20 s. Status 409 says that the generation
    is over. Then the rank joins again."""

    generation: int
    result: CommandResult | None = None
    stage: Stage | None = Field(
        default=None, description="The stage that the ranks hold. `step` is the last step that they applied."
    )
    step: int = 0
    versions: list[int] = Field(default_factory=list, description="The versions that they keep for sending.")
    thread: RankThread = Field(
        default="main",
        description="weights: the thread that sends kept versions asks. It gets publishes alone, while the main thread "
        "trains.",
    )


class NextReply(Message):
    command: Command | None = None


class Heartbeat(Message):
    """POST /v1/heartbeat. Every rank sends it every 2 s, from a thread of its own."""

    name: str
    rank: int
    incarnation: str
    generation: int | None = None
    at: str = Field(
        default="", description="Where the main thread stands in the code. Empty while the rank makes progress."
    )
    waits: str = Field(
        default="", description="The collective that it waits in, and its number. Empty while the rank makes progress."
    )


class HeartbeatReply(Message):
    generation: int | None = Field(
        default=None,
        description="The current generation. A rank that sees a newer one than its own leaves its collectives.",
    )
    reason: str = Field(default="", description="Why the generation before it ended: it names the rank that was lost.")
    cancelled: str | None = Field(
        default=None, description="Id of a publish to give up, because a receiver that it waits for has failed."
    )
    running: str | None = Field(
        default=None,
        description="Id of the command that the coordinator waits for. It is empty if it waits for none. A publish "
        "with another id comes from a coordinator that died, and is given up. null says nothing.",
    )
    sending: str = Field(default="", description="The same of the publish that runs beside it, of a kept version.")


# ---------------------------------------------------------------- weight transfer

CALLED_OFF = "the transfer was called off"
"""The error of a rank contains this text if it gave up because another rank had failed or the sender was told to."""


class Bucket(Message):
    """Tensors, or one sender's parts of them, packed one after the other into one buffer of `nbytes`. Each starts at a
    multiple of 16 bytes."""

    names: list[str]
    dtypes: list[str] = Field(description="torch's names without the prefix, such as float32 and bfloat16.")
    shapes: list[list[int]] = Field(description="Shapes of the whole tensors.")
    boxes: list[list[tuple[int, int]]] | None = Field(
        default=None,
        description="The part of its tensor that each entry is: [start, end) by dimension. null means all of it.",
    )
    offsets: list[int]
    nbytes: int


class Segment(Message):
    """The buckets of one sender in order, each followed by its checksum. `host` and `port` are its rendezvous. The
    segments of one (model, index) have the same number of buckets. Together their n-th buckets make up the same
    tensors. The n-th bucket of part 0 names all of them."""

    index: int = Field(description="Pipeline stage.")
    part: int = Field(default=0, description="Number of the sender among those of the stage.")
    model: str
    host: str
    port: int
    secret: str = Field(description="Each rank of the transfer signs with it what it writes to the rendezvous.")
    buckets: list[Bucket]


class Offer(Message):
    """POST /v1/weights/offer: the senders are listening. The coordinator now tells the receivers."""

    version: int
    epoch: int
    backend: Literal["gloo", "nccl"] = Field(
        description="gloo: tensors are in host memory. nccl: on GPUs, and each receiver gets the link that it can use."
    )
    segments: list[Segment]
    deadline_seconds: float = Field(default=120.0, description="It includes the time that the bytes take.")


class Receive(Message):
    """POST /v1/weights on a scorer, and the `update_info` of our weight transfer engine in vLLM. The receiver takes all
    segments or none."""

    offer: Offer
    rank_offset: int
    world_size: int = Field(description="Ranks in each communicator: the sender and all receivers of that model.")


class SendOn(Message):
    """POST /dovetail/send_weights on a rollout server: send its present version to another server. The answer is an
    `Offer`. After that a thread of the server waits for the receiver."""

    version: int
    epoch: int
    world_size: int = Field(description="Ranks in each communicator: the sender and the workers of the receiver.")
    deadline_seconds: float = Field(description="It does not include the time that the bytes take.")


# ---------------------------------------------------------------- rollout and scorer processes -> coordinator


class Register(Message):
    """POST /v1/instances, at start and every 2 s. A new incarnation is a restarted process, which holds no weights."""

    name: str
    kind: Literal["rollout", "scorer"]
    group: str
    url: str
    incarnation: str
    ready: bool
    weight_version: int | None = None
    asleep: bool = Field(default=False, description="Whether the server was put to sleep and was not woken.")
    abilities: dict[str, Any] = Field(
        default_factory=dict,
        description="vllm_version, sampler (counter|native), weight_engine, kv_connector, max_model_len, sends_weights",
    )

    def as_json(self) -> str:
        """The report to send. A coordinator of an earlier release refuses `asleep`, so it is there only if it is
        true."""
        return self.model_dump_json(exclude=None if self.asleep else {"asleep"})


# Keys of vLLM's kv_transfer_params.
HOLD, PULL = "dovetail_hold", "dovetail_pull"
# A server keeps the blocks of an aborted request so long for the server that takes the request over.
HOLD_SECONDS = 30.0


class KVAbility(Message):
    """`Register.abilities["kv"]`: this rollout can hand a sample's KV cache to another rollout with the same layout."""

    transport: Literal["tcp", "nixl"]
    host: str = ""
    ports: list[int] = Field(default_factory=list, description="One for each tensor-parallel rank; tcp only.")
    layout: str = Field(description="Dtype and ranks; workers compare more.")
    token_bytes: int = Field(description="Bytes of one token's KV cache over all ranks.")
    block_tokens: int = 1


class KVHold(Message):
    """kv_transfer_params `dovetail_hold`: keep the KV blocks of this request for a while if it is aborted."""

    key: str
    weights: int = Field(description="The weight version that the request runs on.")
    min_tokens: int = Field(default=0, description="With fewer tokens computing them anew is cheaper: don't keep them.")


class KVPull(Message):
    """kv_transfer_params `dovetail_pull`: fetch the KV blocks of this prompt. If that fails, compute them."""

    key: str
    host: str
    ports: list[int]
    weights: int


PROBE_HEADER = "X-Dovetail-Probe"
"""A server answers a request that has this header even before it may serve. The value is the version that it holds."""
