"""Defines what the planner chooses between: which task runs on which GPUs, and in which layout.

Every placement has the same form. Each task has shares, and each share is a range of GPUs of one pool. Tasks whose
ranges overlap take turns on those GPUs. Tasks whose ranges do not overlap can run at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Literal, get_args

from dovetail.manifest.hashing import hashed_once
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.plan import Scored

# The tasks of dovetail.protocol.plan.Task, without those of supervised stages. `critic` is the critic's inference.
Task = Literal["generation", "reference", "reward", "critic", "actor_training", "critic_training"]
TASKS: tuple[Task, ...] = ("generation", "reference", "reward", "critic", "actor_training", "critic_training")
TRAINING: tuple[Task, ...] = ("actor_training", "critic_training")
INFERENCE: tuple[Task, ...] = ("reference", "reward", "critic")
Schedule = Literal["Serial", "TimeSharing", "Fused", "VShaped", "Dedicated"]


class Placement(StrEnum):
    """The placements of APP section V-A. FLATTENING: every task runs on every GPU. INTERLEAVING: reference and reward
    run on halves of the GPUs, and generation on all. Actor and critic training may be on halves too. SEPARATION:
    training has GPUs of its own."""

    FLATTENING = "Flattening"
    INTERLEAVING = "Interleaving"
    SEPARATION = "Separation"


@hashed_once
@dataclass(frozen=True)
class Share:
    """A task on GPUs [first, first + pp * tp * dp) of a pool. Among them tp changes fastest, then dp, then pp.

    Generation has dp vLLM servers of pp x tp GPUs each. Inference has dp copies of the model, each on pp x tp GPUs.
    `micro_batch`: the sequences of one forward pass of a data-parallel rank, in inference and training. `fsdp`: the
    ZeRO stage over the dp ranks. With 0 each rank has whole copies. With 1 they share the optimizer state, with 2 also
    gradients, and with 3 also weights. Inference and generation have 0 or 3, where 3 gathers each layer when it is
    used. `recompute`: activation checkpointing in training. `offload`: memory of the task is on the host while it does
    not run. For training these are the optimizer's moments, for inference the weights, and for generation weights and
    KV cache (vLLM sleeps). `pipelines`: the pipelines of a trained model that are side by side in a schedule that
    another model shares (`side_by_side`). `cp`: so many of a trained model's dp ranks share the tokens of a pass. `ep`:
    so many of them divide the experts of a layer."""

    pool: str
    first: int = 0
    pp: int = 1
    tp: int = 1
    dp: int = 1
    micro_batch: int = 1
    fsdp: Literal[0, 1, 2, 3] = 0
    recompute: bool = False
    offload: bool = False
    pipelines: int = 1
    cp: int = 1
    ep: int = field(default=1, repr=False)  # not in the text, which golden decisions hash

    @property
    def batch_shares(self) -> int:
        """The number of parts into which training divides a batch (`Parallelism.cp`)."""
        return self.dp // self.cp

    @property
    def shards(self) -> int:
        """The number of data-parallel ranks that `fsdp` shards over. Ranks of other pipelines run their passes in other
        orders, so they cannot gather weights together."""
        return self.dp // self.pipelines

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered layer by layer when they are used."""
        return self.fsdp == 3 and self.shards > 1

    @property
    def gpus(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def range(self) -> range:
        """The GPUs of the pool, by index."""
        return range(self.first, self.first + self.gpus)

    def at(self, first: int) -> Share:
        """The same share, but from GPU `first` on."""
        return self if first == self.first else replace(self, first=first)

    def cut(self, at: int) -> tuple[Share, Share]:
        """Divides GPUs without a layout into the first `at` and the rest."""
        return Share(self.pool, self.first, dp=at), Share(self.pool, self.first + at, dp=self.gpus - at)

    def overlaps(self, other: Share) -> bool:
        """Whether both shares need the same GPU."""
        return (
            self.pool == other.pool and self.first < other.first + other.gpus and other.first < self.first + self.gpus
        )

    def same_ranks(self, other: Share) -> bool:
        """Whether two models that train in these shares have the same ranks in the same tensor-parallel groups."""
        return (self.pool, self.range, self.tp) == (other.pool, other.range, other.tp)

    def __str__(self) -> str:
        shared = "".join(f" {name}{count}" for name, count in (("cp", self.cp), ("ep", self.ep)) if count > 1)
        return f"{self.pool}[{self.first}:{self.first + self.gpus}] pp{self.pp} tp{self.tp} dp{self.dp}{shared}"


def pipelines(pp: int, other: int, dp: int) -> int:
    """The number of pipelines of a model that are side by side in a schedule that two models share on the same ranks.
    The model has `pp` stages and `dp` data-parallel ranks, and the other model has `other` stages. It is 1 if they
    cannot share a schedule."""
    found = math.lcm(pp, other) // pp
    return found if dp % found == 0 else 1


def side_by_side(actor: Share, critic: Share) -> tuple[Share, Share]:
    """The shares of actor and critic with the pipelines that they have in a schedule that both share. Shares that are
    not on the same GPUs stay as they are."""
    if actor.pp == critic.pp or not actor.same_ranks(critic):
        return actor, critic
    mine, other = pipelines(actor.pp, critic.pp, actor.dp), pipelines(critic.pp, actor.pp, critic.dp)
    return replace(actor, pipelines=mine), replace(critic, pipelines=other)


@hashed_once
@dataclass(frozen=True)
class Candidate:
    """One possible plan. A task with several shares divides its samples among them by their speeds. Training has one
    share. An empty tuple means that the job has no such task (no critic, or a reward function).

    `schedule`: how actor and critic training share their GPUs. With Dedicated each has GPUs of its own. `migration`:
    the fraction of the samples left at which generation's tail gathers and inference begins on freed instances
    (inter-stage fusion). None: inference waits for the last sample. `folded`: the old log-probabilities are those of
    the rollouts or of the iteration's only step, so the actor needs no forward pass before training (APP section
    V-A1). `beside`: each copy of an inference share is in the scorer of one vLLM server, on the first GPUs of that
    server. `note`: what else a user should know about the placement.

    Before layouts are chosen it is a *structure*. A share then stands for `dp` GPUs, however the task will use them."""

    placement: Placement
    generation: tuple[Share, ...]
    actor_training: tuple[Share, ...]
    critic_training: tuple[Share, ...] = ()
    reference: tuple[Share, ...] = ()
    reward: tuple[Share, ...] = ()
    critic: tuple[Share, ...] = ()
    schedule: Schedule = "Serial"
    migration: float | None = None
    folded: bool = True
    beside: bool = False
    note: str = field(default="", compare=False, repr=False)

    @property
    def kind(self) -> tuple[Placement, str]:
        """The placement and the note, which distinguish the alternatives of a plan."""
        return self.placement, self.note

    def shares(self, task: Task) -> tuple[Share, ...]:
        """The shares of a task."""
        found: tuple[Share, ...] = getattr(self, task)
        return found

    @property
    def trained(self) -> tuple[Share, ...]:
        """The shares that train."""
        return (*self.actor_training, *self.critic_training)

    @property
    def dedicated(self) -> bool:
        """Whether actor and critic train on GPUs of their own. It is also known of a structure."""
        return bool(self.critic_training) and self.critic_training != self.actor_training

    @property
    def gathers(self) -> bool:
        """Whether a model trains under ZeRO-3."""
        return any(share.gathers for share in self.trained)

    @property
    def unsplit(self) -> bool:
        """Whether schedules must run whole backward passes, because a model has activation checkpointing or ZeRO-3."""
        return self.gathers or any(share.recompute for share in self.trained)

    @property
    def placed(self) -> Iterator[tuple[Task, Share]]:
        """Every task with each of its shares, in the order of TASKS."""
        return ((task, share) for task in TASKS for share in self.shares(task))


def cells(spans: Sequence[range]) -> Iterator[tuple[range, tuple[int, ...]]]:
    """The pieces into which ranges of GPUs cut each other, each with the indices of the ranges that cover it."""
    for start, stop in pairwise(sorted({edge for span in spans for edge in (span.start, span.stop)})):
        if on := tuple(i for i, span in enumerate(spans) if span.start <= start and stop <= span.stop):
            yield range(start, stop), on


def scorer_models(spec: RLHFJobSpec, scorers: int, interleaved: bool = False) -> list[list[Scored]]:
    """The models that each of the `scorers` scorers holds, of those whose outputs PPO needs.

    With Interleaving, which is pinned or chosen (`interleaved`), and two scorers or more, the first half of them holds
    the reference. The second half holds the other models, which have no vocabulary projection. So each scorer holds
    fewer models, and their passes run side by side. Otherwise every scorer holds all models."""
    needs = {
        "reference": spec.ppo.reads_reference,
        "reward": not spec.models.reward.calls,
        "critic": has_critic(spec),
    }
    models: list[Scored] = [model for model in get_args(Scored) if needs[model]]
    halves = interleaved or spec.plan.placement == "Interleaving"
    if not halves or scorers < 2 or len(models) < 2 or "reference" not in models:
        return [list(models) for _ in range(scorers)]
    half = scorers // 2
    return [["reference"] if index < half else models[1:] for index in range(scorers)]
