"""The plan. The planner writes it, and every process of a job reads it as plan.json. The convention for ranks is
defined only here: see `coordinates`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dovetail.manifest.base import Model
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, Stage
from dovetail.protocol.prediction import PodMemory, PredictedStage, Prediction

Task = Literal[
    "sft",
    "reward_training",
    "dpo",
    "actor_training",
    "critic_training",
    "generation",
    "reference",
    "reward",
    "critic",
]
Scored = Literal["reference", "reward", "critic"]
"""The models that scorers run."""


class Coordinates(NamedTuple):
    """A rank's position in one model's layout. Each number counts from 0."""

    pp: int
    dp: int
    tp: int


class Layout(Parallelism):
    """A layout, and the place of its stages among the ranks of a schedule that two models share.

    There are N = pp * pipelines positions of D = dp / pipelines * tp ranks each. N and D are the same for both models.
    Pipeline k has the positions [k * pp, (k + 1) * pp). If `reverse` is true, its first stage is at the last of them.
    If each model has ranks of its own, `first` is the first rank of this model. With several `chunks` each rank holds
    that many of the chunks * pp shorter stages. The stages go along the pipeline and back (`stage_path`), so two chunks
    make a V. With `loop` they go along the pipeline again and again, as in interleaved 1F1B."""

    pipelines: int = Field(default=1, ge=1, description="Pipelines side by side (the fusion factor K).")
    reverse: bool = Field(default=False, description="Stages run from the last position to the first.")
    first: int = Field(default=0, ge=0, description="First trainer rank that holds a part of the model.")
    chunks: int = Field(default=1, ge=1, description="Stages of the model on each of its ranks.")
    loop: bool = Field(default=False, description="Each chunk's stages run from the first rank to the last.")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.dp % self.pipelines:
            raise ValueError(f"dp {self.dp} is not a multiple of the {self.pipelines} pipelines")
        if self.dp // self.pipelines % self.cp:
            raise ValueError(f"cp {self.cp} does not divide the {self.dp // self.pipelines} dp ranks of a pipeline")
        if self.dp // self.pipelines % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the {self.dp // self.pipelines} dp ranks of a pipeline")
        return self


def coordinates(rank: int, layout: Parallelism) -> Coordinates:
    """The place of trainer rank `rank` in `layout`: rank = (pp * layout.dp + dp) * layout.tp + tp. The ranks of a
    tensor-parallel group are neighbours, because they communicate most. Pipeline stages are furthest from each other.
    In a `Layout` of several pipelines, rank = (position * D + d) * tp + t and dp = pipeline * D + d. Raises ValueError
    for a rank outside the layout."""
    pipelines, reverse, first = _placed(layout)
    if not holds(rank, layout):
        raise ValueError(f"rank {rank} is outside a layout of {world_size(layout)} ranks from rank {first} on")
    rest, tp = divmod(rank - first, layout.tp)
    position, d = divmod(rest, layout.dp // pipelines)
    pipeline, pp = divmod(position, layout.pp)
    return Coordinates(layout.pp - 1 - pp if reverse else pp, pipeline * (layout.dp // pipelines) + d, tp)


def rank_at(place: Coordinates, layout: Parallelism) -> int:
    """The inverse of `coordinates`."""
    pipelines, reverse, first = _placed(layout)
    copies = layout.dp // pipelines
    pipeline, d = divmod(place.dp, copies)
    pp = layout.pp - 1 - place.pp if reverse else place.pp
    return first + ((pipeline * layout.pp + pp) * copies + d) * layout.tp + place.tp


def chunks_of(layout: Parallelism) -> int:
    """The number of stages of the model on each of its ranks."""
    return layout.chunks if isinstance(layout, Layout) else 1


def loops(layout: Parallelism) -> bool:
    """Whether each chunk's stages run from the first rank to the last."""
    return isinstance(layout, Layout) and layout.loop


# It is cached, because the search of a placement asks for it ten thousand times.
@lru_cache(maxsize=4096)
def stage_path(pp: int, chunks: int = 1, loop: bool = False) -> tuple[int, ...]:
    """The place in a pipeline (`Coordinates.pp`) of every stage. The first chunk goes from 0 to pp - 1, the second one
    goes back from pp - 1 to 0, and so on. With `loop` each chunk goes from 0 to pp - 1."""
    there = range(pp)
    return tuple(place for chunk in range(chunks) for place in (there[::-1] if chunk % 2 and not loop else there))


def stages_at(place: int, pp: int, chunks: int = 1, loop: bool = False) -> list[int]:
    """The stages at a place of a pipeline. There is one of each chunk."""
    return [stage for stage, each in enumerate(stage_path(pp, chunks, loop)) if each == place]


def holds(rank: int, layout: Parallelism) -> bool:
    """Whether trainer rank `rank` holds a part of a model with this layout."""
    return 0 <= rank - _placed(layout)[2] < world_size(layout)


def _placed(layout: Parallelism) -> tuple[int, bool, int]:
    return (layout.pipelines, layout.reverse, layout.first) if isinstance(layout, Layout) else (1, False, 0)


class TaskPlacement(Model):
    """The GPUs of a task."""

    task: Task
    groups: list[str] = Field(description="Names of the pod groups; trainers of several groups form one world.")


class TrainerRank(Model):
    """One trainer process."""

    name: str = Field(description="trainer-<rank>")
    rank: int
    group: str


class Rollout(Model):
    """One vLLM server and the scorer beside it."""

    name: str = Field(description="<group>-<index>")
    group: str
    scores: list[Scored] = Field(
        default_factory=lambda: list(get_args(Scored)), description="Models that its scorer may hold."
    )
    pp: int = Field(default=1, ge=1, description="Pipeline stages of the server. Each has tp = GPUs / pp.")
    split: dict[Scored, Annotated[int, Field(ge=2)]] = Field(
        default_factory=dict,
        description="GPUs of the pod, from the first on, over which its scorer splits a model by layers; models "
        "that are not named are whole, on the first.",
    )
    memory: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of each GPU's memory that the server takes and leaves the scorer the rest; null: vLLM's own "
        "default.",
    )


class Batching(Model):
    """How one model's batch is divided in one stage. Sizes count sequences, or pairs in reward training."""

    stage: Stage
    model: str
    mini_batch_size: int = Field(description="Sequences per optimizer step, all data-parallel ranks together.")
    micro_batch_size: int = Field(description="Sequences per forward pass of one rank; 1 with micro_batch_tokens.")
    micro_batch_tokens: int | None = Field(
        default=None, description="The most tokens of a forward pass of one rank, if micro-batches are cut by tokens."
    )
    micro_batches: int = Field(
        description="Micro-batches of one data-parallel rank in an optimizer step; cut by tokens: if all sequences are "
        "as long as they may be."
    )
    recompute: bool = Field(default=False, description="Activation checkpointing: layers run again in backwards.")
    zero3: bool = Field(
        default=False, description="ZeRO-3: data-parallel ranks gather the weights layer by layer in each pass."
    )

    chunks: int = Field(
        default=1,
        ge=1,
        description="The most stages of the model that a trainer rank can hold in a stage before PPO, or in DPO.",
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that are not set, so that earlier releases, which do not know them, can read the plan."""
        written: dict[str, Any] = write(self)
        unset = [] if self.micro_batch_tokens is not None else ["micro_batch_tokens", "microBatchTokens"]
        unset += [] if self.zero3 else ["zero3"]
        unset += [] if self.chunks > 1 else ["chunks"]
        return {name: value for name, value in written.items() if name not in unset}


class Plan(Model):
    """Says which process runs where, and how. The planner writes it once, and every process reads it."""

    version: Literal[1] = 1
    world_size: int = Field(description="Trainer ranks.")
    parallelism: dict[str, Parallelism] = Field(
        description="The layout of each trained model (actor, critic, reward) on all trainer ranks."
    )
    batching: list[Batching]
    schedule: Literal["Auto", "Fused", "TimeSharing", "VShaped", "Dedicated", "Serial"] = Field(
        default="Auto",
        description="Families that the schedule of actor and critic is chosen from. Serial where there is no choice. "
        "Where the manifest leaves it open: Serial or TimeSharing if GPUs have no room for the others.",
    )
    # Pods of an earlier release refuse a plan with another name of the field.
    dedicated: dict[str, Layout] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("dedicated", "apart"),
        serialization_alias="apart",
        description="The layouts of actor and critic in PPO if the planner gave each model its own trainer ranks. "
        "Otherwise empty.",
    )
    chunks: int = Field(
        default=1,
        ge=1,
        description="The most stages of each of actor and critic that a trainer rank can hold in PPO, where their "
        "schedule may put several there: they have the layers, and what ranks then hold fits.",
    )
    activation_bytes: dict[str, list[int]] = Field(
        default_factory=dict,
        description="Of actor and critic, by stage: what one micro-batch of the longest sequences holds between its "
        "passes, by the memory model; empty where the models are not known or have no pipeline. If the manifest asks "
        "for several stages a rank, of each of these.",
    )
    lag: int = Field(
        default=0, ge=0, description="spec.ppo.lag, or the planner's choice if that is Auto. A run keeps it."
    )
    lag_reason: str = Field(default="", description="Why the planner chose it. It is empty if the manifest sets it.")
    tasks: list[TaskPlacement]
    trainers: list[TrainerRank]
    rollouts: list[Rollout]
    warnings: list[str] = Field(default_factory=list, description="Sentences for the user.")
    prediction: Prediction | None = Field(
        default=None, description="Of a PPO iteration, where the job's models and GPUs are known."
    )
    stages: list[PredictedStage] = Field(
        default_factory=list, description="The stages before PPO, and DPO, where the job's models and GPUs are known."
    )
    memory: list[PodMemory] = Field(
        default_factory=list, description="Of PPO's pods where all are on CPUs and the job's models are known."
    )

    @model_serializer(mode="wrap")
    def _without_later_fields(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that the job does not use, so that earlier releases, which do not know them, can read the
        plan."""
        written: dict[str, Any] = write(self)
        unset = {
            each
            for name in ("chunks", "stages")
            if getattr(self, name) == (field := type(self).model_fields[name]).get_default(call_default_factory=True)
            for each in (name, field.alias)
        }
        return {name: value for name, value in written.items() if name not in unset}

    def layout(self, stage: Stage, model: str) -> Parallelism:
        """The layout of a trained model in a stage."""
        return self.dedicated.get(model, self.parallelism[model]) if stage is Stage.PPO else self.parallelism[model]

    def recomputed(self, stage: Stage) -> list[str]:
        """The models with activation checkpointing in the stage."""
        return [row.model for row in self.batching if row.stage is stage and row.recompute]

    def gathered_by_layer(self, stage: Stage) -> list[str]:
        """The models that train under ZeRO-3 in the stage."""
        return [row.model for row in self.batching if row.stage is stage and row.zero3]


def divisions(layouts: Mapping[str, Parallelism], micro_batches: int) -> list[dict[str, Layout]]:
    """The divisions of the trainer ranks. The first ranks are for the actor alone, the others for the critic.

    A model keeps its data-parallel size if it can, and has fewer pipeline stages instead. Then its micro-batches, and
    with them its gradients, are the same bits as on all ranks. Only the divisions that change the fewest data-parallel
    sizes are returned.

    `layouts`: the layouts on all ranks. `micro_batches`: those of a mini-batch, which data-parallel ranks share evenly.
    A model never has more pipeline stages than in `layouts`. The list is empty if the ranks cannot be divided."""
    world, tp = world_size(layouts["actor"]), layouts["actor"].tp
    found: list[tuple[int, dict[str, Layout]]] = []
    for ranks in range(tp, world, tp):
        actor = _part(layouts["actor"], ranks // tp, micro_batches)
        critic = _part(layouts["critic"], (world - ranks) // tp, micro_batches)
        if actor is None or critic is None:
            continue
        changed = (actor.dp != layouts["actor"].dp) + (critic.dp != layouts["critic"].dp)
        found.append((changed, {"actor": actor, "critic": critic.model_copy(update={"first": ranks})}))
    if not found:
        return []
    found.sort(key=lambda each: each[0])
    _, best = next(groupby(found, key=lambda each: each[0]))
    return [each for _, each in best]


def same_batches(layouts: Mapping[str, Parallelism], division: Mapping[str, Layout]) -> bool:
    """Whether every data-parallel rank has the same micro-batches as in `layouts`."""
    return all(division[name].dp == layouts[name].dp for name in ("actor", "critic"))


def _part(whole: Parallelism, ranks: int, micro_batches: int) -> Layout | None:
    """The layout of a model on `ranks` tensor-parallel groups of its own. It keeps the dp of `whole` if it can;
    otherwise it has as few stages as possible."""
    cp, ep, stages = whole.cp, whole.ep, range(1, min(whole.pp, ranks) + 1)
    fits = [pp for pp in stages if ranks % (pp * cp) == 0 and ranks % (pp * ep) == 0]
    found = [(pp, ranks // pp) for pp in fits if micro_batches % (ranks // pp // cp) == 0]
    best = min(found, key=lambda each: each[1] != whole.dp, default=None)
    return None if best is None else Layout(pp=best[0], dp=best[1], tp=whole.tp, cp=cp, ep=ep)
