"""What every step needs: the job, the engine and the collection of per-sequence results over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.manifest.types import RLHFJobSpec
from dovetail.models.predictions import Predictions
from dovetail.protocol.messages import Action, ModelRef, Step
from dovetail.protocol.wire import Arrays
from dovetail.trainer.algorithms.policy import PolicyLoss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.engine import Engine, EngineModel
from dovetail.trainer.engine.executor import MicroBatch, check_actions
from dovetail.trainer.functions import UserAdvantages
from dovetail.trainer.groups import Groups, peer_errors
from dovetail.trainer.packed_batches import (
    Packed,
    Padded,
    Sequences,
    padded_tokens,
    split,
    split_padded,
    split_tokens,
)
from dovetail.trainer.spans import SpanRecorder

Metrics = dict[str, float]
# Second half of a command: the collective work. The first half (checks) has no collectives and changes nothing.
Run = Callable[[], Metrics]


@dataclass
class Context:
    """`fetch` gives a batch's arrays by key; raises BadCommand when there is none. `loss` is the policy's;
    `advantages` what `ppo.advantageFunction` names."""

    spec: RLHFJobSpec
    groups: Groups
    engine: Engine
    fetch: Callable[[str], Arrays]
    timeline: SpanRecorder
    loss: PolicyLoss
    advantages: UserAdvantages | None

    def model(self, name: str) -> EngineModel:
        """The model, which this rank holds. Raises BadCommand if it is not loaded."""
        self.require(name)
        return self.engine.models[name]

    def require(self, name: str) -> ModelRef:
        """The reference of a model that some ranks hold. Raises BadCommand if no rank holds it."""
        if name not in self.engine.loaded:
            held = ", ".join(sorted(self.engine.loaded)) or "no model"
            raise BadCommand(f"model {name!r} is not loaded (the ranks hold {held}); send `load` first")
        return self.engine.loaded[name]

    def actions(self, step: Step, micro_batches: dict[str, int]) -> list[Action]:
        """This rank's list, of the models in `micro_batches` (of one mini-batch) alone; where micro-batches are cut by
        tokens, of so many of them. Raises BadCommand when the lists do not fit."""
        actions, mini_batches = step.actions, step.mini_batches
        if len(actions) != self.groups.world_size:
            raise BadCommand(
                f"the command has schedules for {len(actions)} ranks, the trainers are {self.groups.world_size}"
            )
        mine = [action for action in actions[self.groups.rank] if action.model in micro_batches]
        if step.micro_batch_tokens is not None:
            if mini_batches > 1:
                raise BadCommand("micro-batches are cut by tokens, which a schedule of several mini-batches cannot run")
            # What is left of a serial schedule of more micro-batches is the serial schedule of these.
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
        """Raises BadCommand for token ids that the model has no embedding for (an index error deep inside)."""
        size = int(getattr(model.config, "vocab_size", 0))
        largest = int(sequences.tokens.max())
        if size and largest >= size:
            raise BadCommand(f"the batch holds token id {largest}, model {model.name!r} has a vocabulary of {size}")

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
        """Forward passes without gradients over all sequences, shared out over dp; on every rank (N, width) float32.

        `read` maps the last stage's output at the positions that `wanted` (N, T) bool marks, and the micro-batch and
        its rows, to (rows, width); `asks` is the micro-batches'. Micro-batches have `micro` rows, or with `tokens` at
        most so many tokens. A collective call."""
        n = len(sequences)
        model = self.engine.models.get(name)
        mine: list[Padded] = []
        if model is not None and tokens is not None:
            mine = padded_tokens(sequences.lengths.tolist(), model.dp_size, tokens)[model.dp_rank]
        elif model is not None:
            mine = split_padded(n, model.dp_size, micro)[model.dp_rank]
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
        if model is not None and model.groups.pp_rank == 0 and model.groups.tp_rank == 0 and parts:
            values = torch.cat(parts).cpu()
            rows = torch.tensor([row for part in mine for row in part.rows])
            real = torch.cat([part.weights for part in mine]).bool()
            table[rows[real]] = values[real]
        return self.sum(table)

    def sum(self, table: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks, on every rank. A collective call."""
        if self.groups.world_size > 1:
            with peer_errors("summing over the trainer ranks"):
                dist.all_reduce(table, group=self.groups.control)
        return table


def cut(
    lengths: Sequence[int], dp: int, rows: int, tokens: int | None, count: int | None = None
) -> list[list[list[int]]]:
    """Rows of each micro-batch of each data-parallel rank: `rows` of them, or, with `tokens`, at most so many tokens in
    at least `count` micro-batches. Raises BadCommand."""
    return split(lengths, dp, rows) if tokens is None else split_tokens(lengths, dp, tokens, count)


def digest(actions: Sequence[Sequence[Action]]) -> str:
    """Hash of all ranks' lists: what the ranks compare before they run them."""
    text = ";".join(",".join(f"{a.model} {a.kind}{a.micro_batch}.{a.chunk}" for a in mine) for mine in actions)
    return hashlib.sha256(text.encode()).hexdigest()


def mean(stats: Mapping[str, float], name: str, count: str) -> float:
    """stats[name] / stats[count], 0 when nothing was counted."""
    return stats.get(name, 0.0) / stats[count] if stats.get(count) else 0.0


def balance(stats: Mapping[str, float], prefix: str = "") -> Metrics:
    """The mean load-balancing loss of layers with experts, if it was computed."""
    if not stats.get(f"{prefix}router_passes"):
        return {}
    return {f"{prefix}router_aux_loss": mean(stats, f"{prefix}router_aux_loss", f"{prefix}router_passes")}


def variance(x: Tensor) -> float:
    """Population variance of a flat tensor in float64; 0 when it is empty."""
    return float(x.double().var(correction=0)) if x.numel() else 0.0
