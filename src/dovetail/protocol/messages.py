"""What passes between a job's processes, as JSON over HTTP (arrays: `dovetail.protocol.wire`).

Every request carries `Authorization: Bearer <token of the job>`. docs/architecture.md has the sequence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.manifest.types import ScratchModel, Stage
from dovetail.protocol.plan import Layout

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward; or the backward in two: input gradient, and later weight gradient."""


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Span(Message):
    """One bar of the timeline: [start, end) in seconds since the epoch, on track `process`/`lane`."""

    name: str
    process: str
    lane: str = "main"
    start: float
    end: float
    iteration: int | None = None
    args: dict[str, Any] = Field(default_factory=dict)


# ---------------------------------------------------------------- trainer ranks -> coordinator


class JoinRequest(Message):
    """POST /v1/trainer/join: a rank offers itself; answered once all ranks of the world have joined (long poll)."""

    name: str
    rank: int
    world_size: int
    incarnation: str
    host: str
    port: int = Field(description="A free port on host; rank 0's becomes the rendezvous.")
    nccl_version: str | None = None


class JoinReply(Message):
    """`generation` is null when the poll timed out: ask again."""

    generation: int | None = None
    world_size: int = 0
    master_host: str = ""
    master_port: int = 0


class ModelRef(Message):
    """Where a trainer or scorer gets a model from. head `lm`: vocabulary logits; `value`: one scalar per token;
    `lm+value`: both."""

    head: Literal["lm", "value", "lm+value"]
    path: str | None = Field(default=None, description="Hugging Face folder. A value head absent there starts at zero.")
    scratch: ScratchModel | None = Field(default=None, description="Or: random weights from `seed`.")
    tokenizer: str | None = Field(
        default=None, description="Tokenizer folder, for the vocabulary size of scratch models and exports."
    )
    seed: int = 0
    trust_remote_code: bool = False


class Action(Message):
    """One entry of a rank's schedule; micro-batches count through all mini-batches of the schedule."""

    model: str
    micro_batch: int
    kind: Kind


class Load(Message):
    """Build models and optimizers for a stage, from sources or a checkpoint. Everything held before is dropped."""

    kind: Literal["load"] = "load"
    id: str
    stage: Stage
    models: dict[str, ModelRef] = Field(
        description="SFT: actor. Reward: reward. PPO: actor and critic (critic only with gae)."
    )
    total_steps: int = Field(description="Optimizer steps of the stage, for the learning-rate schedule.")
    checkpoint: str | None = None
    run: str = Field(default="", description="Id of the run that the checkpoint must be of; empty: any.")
    layouts: dict[str, Layout] = Field(
        default_factory=dict, description="Where a model's stages are, if not where the plan's layout puts them."
    )
    recompute: list[str] = Field(
        default_factory=list, description="Models that are trained with activation checkpointing."
    )


class Step(Message):
    """One optimizer step of SFT or reward training, or one PPO iteration's training (epochs x mini-batches)."""

    kind: Literal["step"] = "step"
    id: str
    stage: Stage
    step: int = Field(description="1 for the first step after `load` without a checkpoint.")
    batch: str = Field(description="GET /v1/batches/{batch}")
    actions: list[list[Action]] = Field(description="Per rank; PPO: of `mini_batches` of them, repeated for the rest.")
    mini_batches: int = Field(
        default=1, ge=1, description="PPO: optimizer steps of each model within one run of the actions."
    )
    kl_coef: float = 0.0
    train_actor: bool = True
    learning_rates: dict[str, float] = Field(
        default_factory=dict, description="By model, in place of the manifest's, where a run has changed them."
    )
    total_steps: int | None = Field(default=None, description="In place of `load`'s, where a run has been extended.")
    warmup_total: int | None = Field(default=None, description="The total that warm-up is a share of, likewise.")


class Evaluate(Message):
    """SFT: {'loss', 'tokens'}. Reward: {'accuracy', 'pairs', 'correct', 'loss', 'chosen', 'rejected'} of `batches`, and
    {'demonstrations', 'demonstration_score'} of `demonstrations`. Whole batches, no gradients."""

    kind: Literal["evaluate"] = "evaluate"
    id: str
    stage: Stage
    batches: list[str]
    demonstrations: list[str] = Field(default_factory=list, description="Reward: batches laid out as SFT's.")


class Save(Message):
    """Write a checkpoint folder, atomically (a temporary name, then a rename)."""

    kind: Literal["save"] = "save"
    id: str
    path: str
    run: str = Field(default="", description="Id of the run, to be written into the checkpoint.")


class Export(Message):
    """Write a Hugging Face folder, atomically. `ema` needs ppo.ema."""

    kind: Literal["export"] = "export"
    id: str
    model: Literal["actor", "critic", "reward", "ema"]
    path: str
    subtract: float = Field(
        default=0.0, allow_inf_nan=False, description="From every value of a model with a value head, from now on."
    )
    run: str = Field(default="", description="Id of the run, to be written into the folder.")


class Receiver(Message):
    """One process that takes part in a weight transfer."""

    name: str
    kind: Literal["rollout", "scorer"]
    models: list[str] = Field(description="Which models it takes: rollouts actor, scorers critic.")
    rank_offset: int = Field(description="Its first rank in every communicator; the sender is rank 0.")
    world: int = 1


class Publish(Message):
    """Send weights to receivers: first POST /v1/weights/offer (rank 0), then broadcast, then the result."""

    kind: Literal["publish"] = "publish"
    id: str
    version: int
    epoch: int = Field(description="Changes whenever the set of receivers does: communicators are then made anew.")
    receivers: list[Receiver]
    deadline_seconds: float = 120.0


class Stop(Message):
    kind: Literal["stop"] = "stop"
    id: str


Command = Annotated[Load | Step | Evaluate | Save | Export | Publish | Stop, Field(discriminator="kind")]


class StageTimes(Message):
    """What one rank measured of one model's stage during a step."""

    rank: int
    model: str
    seconds: dict[Kind, list[float]] = Field(
        description="Of compute, waits left out: by micro-batch of a mini-batch, the median over mini-batches."
    )
    activation: list[float] = Field(description="Bytes that a micro-batch holds from forward to backward, likewise.")
    transfer: float | None = Field(
        default=None, description="Seconds of a message to the next stage; null at the last one or where not measured."
    )


class Probe(Message):
    """What the weights of a version say: servers are judged by it before they serve them."""

    version: int
    tokens: list[int]
    logprobs: list[float] = Field(description="Of tokens[1:], each after all before it, at temperature 1.")
    dtype: str = Field(description="In which the trainers computed: float32 or bfloat16.")


class CommandResult(Message):
    id: str
    ok: bool
    error: str | None = Field(default=None, description="One sentence; the traceback is in the rank's log.")
    damaged: bool = Field(default=False, description="Load: the checkpoint's files are not what was saved.")
    metrics: dict[str, float] = Field(default_factory=dict)
    spans: list[Span] = Field(default_factory=list)
    times: list[StageTimes] = Field(default_factory=list, description="PPO step: of every rank and model.")
    probe: Probe | None = Field(default=None, description="Publish to rollouts: of the weights that were sent.")


class NextRequest(Message):
    """POST /v1/trainer/next, rank 0 only (long poll, at most 20 s). 409: the generation is over, join again."""

    generation: int
    result: CommandResult | None = None
    stage: Stage | None = Field(default=None, description="What the ranks hold now: stage and last applied step.")
    step: int = 0


class NextReply(Message):
    command: Command | None = None


class Heartbeat(Message):
    """POST /v1/heartbeat, every rank, from a thread of its own, every 2 s."""

    name: str
    rank: int
    incarnation: str
    generation: int | None = None


class HeartbeatReply(Message):
    generation: int | None = Field(
        default=None, description="The current one; a rank that sees a newer one leaves its collectives."
    )
    cancelled: str | None = Field(
        default=None, description="Id of a publish to give up: a receiver that it waits for has failed."
    )
    running: str | None = Field(
        default=None,
        description="Id of the command that the coordinator waits for, empty: of none. A publish with another id comes "
        "from a coordinator that died, and is given up. null: not said.",
    )


# ---------------------------------------------------------------- weight transfer


class Bucket(Message):
    """Tensors, or one sender's parts of them, packed back to back into one buffer of `nbytes` (each start aligned to 16
    bytes)."""

    names: list[str]
    dtypes: list[str] = Field(description="torch names without the prefix: float32, bfloat16, ...")
    shapes: list[list[int]] = Field(description="Of the whole tensors.")
    boxes: list[list[tuple[int, int]]] | None = Field(
        default=None, description="Which elements of its tensor each entry is: [start, end) by dimension. null: all."
    )
    offsets: list[int]
    nbytes: int


class Segment(Message):
    """What one sender sends: its rendezvous and its buckets, in order, each followed by its checksum.

    Buckets of the same number of all segments of one (model, index) make up the same tensors; part 0's names all of
    them."""

    index: int = Field(description="Pipeline stage.")
    part: int = Field(default=0, description="Which of the stage's senders.")
    model: str
    host: str
    port: int
    buckets: list[Bucket]


class Offer(Message):
    """POST /v1/weights/offer: the senders listen; the coordinator now tells the receivers."""

    version: int
    epoch: int
    backend: Literal["gloo", "nccl"]
    segments: list[Segment]
    deadline_seconds: float = 120.0


class Receive(Message):
    """POST /v1/weights on a scorer; the update_info of our vLLM engine: take these segments, whole or not at all."""

    offer: Offer
    rank_offset: int
    world_size: int = Field(description="Ranks in each communicator: sender and all receivers of that model.")


# ---------------------------------------------------------------- rollout and scorer processes -> coordinator


class Register(Message):
    """POST /v1/instances, on start and every 2 s. A new incarnation is a restarted process: it holds no weights."""

    name: str
    kind: Literal["rollout", "scorer"]
    group: str
    url: str
    incarnation: str
    ready: bool
    weight_version: int | None = None
    abilities: dict[str, Any] = Field(
        default_factory=dict,
        description="vllm_version, sampler (counter|native), weight_engine, kv_connector, max_model_len",
    )
