"""Gives every step the job, the engine, and functions that collect per-sequence results over ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.manifest.types import RLHFJobSpec
from dovetail.models.layers.predictions import Predictions
from dovetail.protocol.messages import Action, BatchPart, ModelRef, Span, Step
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.protocol.wire import Arrays
from dovetail.trainer.algorithms.policy import PolicyLoss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.communication.groups import Groups, peer_errors
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.engine_model import EngineModel
from dovetail.trainer.engine.executor import MicroBatch, check_actions
from dovetail.trainer.functions import UserAdvantages
from dovetail.trainer.packed_batches import (
    Packed,
    Padded,
    Sequences,
    padded_tokens,
    split,
    split_padded,
    split_tokens,
)

# An iteration of a large job has thousands of actions. A result must stay small, and the first spans are enough.
MAX_SPANS = 2000


class SpanRecorder:
    """Collects spans of this rank's work, for the timeline of an iteration, until `take`."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: list[Span] = []

    def record(self, name: str, start: float, end: float, lane: str = "actions") -> None:
        """Add one span from `start` to `end` (seconds since the epoch). Spans beyond the limit are dropped."""
        PROGRESS.made()
        if len(self._spans) < MAX_SPANS:
            self._spans.append(Span(name=name, process=self._process, lane=lane, start=start, end=end))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a span around a block, on the lane `phases`."""
        start = time.time()
        try:
            yield
        finally:
            self.record(name, start, time.time(), "phases")

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


Metrics = dict[str, float]
# See Context.fetch. The function is None if all of the batch is wanted.
Fetch = Callable[[str, Callable[[Arrays], BatchPart] | None], Arrays]
# The second half of a command, with the collective work. The first half only checks and changes nothing.
Run = Callable[[], Metrics]


@dataclass
class Context:
    """The parts of a rank that a step uses. `fetch` gives a batch's arrays by key, and raises BadCommand if there is no
    such batch. With a function it gives the part of the batch that this returns for the arrays without tokens. `loss`
    is the policy's loss. `advantages` is the function of `ppo.advantageFunction`."""

    spec: RLHFJobSpec
    groups: Groups
    engine: Engine
    fetch: Fetch
    timeline: SpanRecorder
    loss: PolicyLoss
    advantages: UserAdvantages | None

    def model(self, name: str) -> EngineModel:
        """The model, which must be on this rank. Raises BadCommand if it is not loaded."""
        self.require(name)
        return self.engine.models[name]

    def require(self, name: str) -> ModelRef:
        """The source of a model that some ranks hold. Raises BadCommand if no rank holds it."""
        if name not in self.engine.loaded:
            held = ", ".join(sorted(self.engine.loaded)) or "no model"
            raise BadCommand(f"model {name!r} is not loaded (the ranks hold {held}); send `load` first")
        return self.engine.loaded[name]

    def actions(self, step: Step, micro_batches: dict[str, int]) -> list[Action]:
        """This rank's actions, for the models in `micro_batches` only. `micro_batches` counts those of one mini-batch.
        If they are cut by tokens, actions beyond these counts are dropped. Raises BadCommand if the actions do not
        fit."""
        actions, mini_batches = step.actions, step.mini_batches
        if len(actions) != self.groups.world_size:
            raise BadCommand(
                f"the command has schedules for {len(actions)} ranks, the trainers are {self.groups.world_size}"
            )
        mine = [action for action in actions[self.groups.rank] if action.model in micro_batches]
        if step.micro_batch_tokens is not None:
            if mini_batches > 1:
                raise BadCommand("micro-batches are cut by tokens, which a schedule of several mini-batches cannot run")
            # If the other micro-batches are dropped from a serial schedule, it is the serial schedule of the rest.
            mine = [action for action in mine if action.micro_batch < micro_batches[action.model]]
        for model, count in micro_batches.items():
            forwards = sum(a.model == model and a.kind == "F" and not a.chunk for a in mine)
            if forwards != count * mini_batches:
                raise BadCommand(
                    f"the schedule of rank {self.groups.rank} runs {forwards} F of {model}, the batch makes "
                    f"{count * mini_batches} micro-batches; check batch size, microBatchSize and dp"
                )
        try:
            chunks = {name: self.engine.models[name].groups.chunks for name in micro_batches}
            check_actions(mine, {m: n * mini_batches for m, n in micro_batches.items()}, True, mini_batches, chunks)
        except ValueError as error:
            raise BadCommand(f"rank {self.groups.rank}: {error}") from error
        return mine

    def check_vocabulary(self, model: EngineModel, sequences: Sequences) -> None:
        """Raises BadCommand for token ids without an embedding, which would give an index error in the model."""
        size = int(getattr(model.config, "vocab_size", 0))
        largest = int(sequences.tokens.max())
        if size and largest >= size:
            raise BadCommand(f"the batch holds token id {largest}, model {model.name!r} has a vocabulary of {size}")

    def passes(self, name: str, lengths: list[int], micro: int, tokens: int | None) -> list[Padded]:
        """The micro-batches of `per_sequence` on this rank."""
        model = self.engine.models.get(name)
        if model is None:
            return []
        if tokens is not None:
            return padded_tokens(lengths, model.dp_size, tokens, model.packs)[model.dp_rank]
        return split_padded(len(lengths), model.dp_size, micro)[model.dp_rank]

    def per_sequence(
        self,
        name: str,
        sequences: Sequences,
        wanted: Tensor,
        micro: int,
        width: int,
        read: Callable[[Any, Packed, list[int]], Tensor],
        asks: Callable[[Tensor], Predictions] | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        """Run forward passes without gradients over all sequences, divided over dp. Returns (N, width) float32, on
        every rank.

        `wanted` (N, T) bool marks positions. `read` takes the last stage's output there, the micro-batch and its rows,
        and returns (rows, width). `asks`: see `MicroBatch`. Micro-batches have `micro` rows, or with `tokens` at most
        this many tokens. This is a collective call. Raises PeerLost."""
        n = len(sequences)
        model = self.engine.models.get(name)
        mine = self.passes(name, sequences.lengths.tolist(), micro, tokens)
        by_tokens: dict[int, Padded] = {}
        work = []
        for part in mine:
            batch = MicroBatch(sequences.pack(part.rows, wanted[part.rows]), asks=asks)
            by_tokens[id(batch)] = part
            work.append(batch)
        parts = self.engine.forward(
            name, work, lambda output, batch: read(output, batch.packed, by_tokens[id(batch)].rows).float()
        )
        table = torch.zeros(n, width)
        if model is not None and model.groups.pp_rank == 0 and model.groups.speaks and parts:
            values = torch.cat(parts).cpu()
            rows = torch.tensor([row for part in mine for row in part.rows])
            real = torch.cat([part.weights for part in mine]).bool()
            table[rows[real]] = values[real]
        return self.sum(table)

    def sum(self, table: Tensor) -> Tensor:
        """The sum of a CPU tensor over all ranks, on every rank. The tensor is changed. This is a collective call."""
        if self.groups.world_size > 1:
            with peer_errors("summing over the trainer ranks"):
                dist.all_reduce(table, group=self.groups.control)
        return table


def cut(
    model: EngineModel, lengths: Sequence[int], rows: int, tokens: int | None, count: int | None = None
) -> list[list[int]]:
    """The rows of each micro-batch of `model` on this rank. Micro-batches have `rows` rows. With `tokens` they have at
    most this many tokens, and there are at least `count`. Raises BadCommand."""
    if tokens is None:
        return split(lengths, model.dp_size, rows, model.packs)[model.dp_rank]
    return split_tokens(lengths, model.dp_size, tokens, count, model.packs)[model.dp_rank]


def digest(actions: Sequence[Sequence[Action]]) -> str:
    """A hash of all ranks' actions. The ranks compare it before they run them."""
    text = ";".join(",".join(f"{a.model} {a.kind}{a.micro_batch}.{a.chunk}" for a in mine) for mine in actions)
    return hashlib.sha256(text.encode()).hexdigest()


def mean(stats: Mapping[str, float], name: str, count: str) -> float:
    """stats[name] / stats[count], or 0 if nothing was counted."""
    return stats.get(name, 0.0) / stats[count] if stats.get(count) else 0.0


def balance(stats: Mapping[str, float], prefix: str = "") -> Metrics:
    """The mean load-balancing loss of layers with experts, or nothing if it was not computed."""
    if not stats.get(f"{prefix}router_passes"):
        return {}
    return {f"{prefix}router_aux_loss": mean(stats, f"{prefix}router_aux_loss", f"{prefix}router_passes")}


def variance(x: Tensor) -> float:
    """The population variance of a flat tensor, computed in float64. It is 0 if the tensor is empty."""
    return float(x.double().var(correction=0)) if x.numel() else 0.0
