"""DPO, IPO and KTO: the actor learns from pairs of responses, against log-probabilities of a frozen reference.

The batch holds these log-probabilities, so no reference is in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.manifest.types import DPO
from dovetail.models.predictions import Predicted, Predictions
from dovetail.protocol.messages import Evaluate, Step
from dovetail.protocol.wire import Arrays
from dovetail.trainer.algorithms.preference_losses import kl_estimate, preference_loss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Packed, Sequences, moved, read, unpacked
from dovetail.trainer.steps.sft_step import predictions
from dovetail.trainer.steps.step_context import Context, Metrics, Run, balance, cut, digest, mean


@dataclass(frozen=True)
class Responses:
    """`mask` (N, T) bool: the positions that predict the response's tokens. `reference` (N,) float32: their summed
    log-probability under the reference; None before it is known."""

    sequences: Sequences
    mask: Tensor
    reference: Tensor | None

    @staticmethod
    def read(context: Context, arrays: Arrays, prefix: str = "") -> Responses:
        """Raises BadCommand."""
        sequences = Sequences.read(arrays, prefix)
        mask = read(arrays, f"{prefix}loss_mask", torch.uint8, tuple(sequences.tokens.shape))
        context.check_vocabulary(context.model("actor"), sequences)
        name = f"{prefix}reference"
        known = read(arrays, name, torch.float32, (len(sequences),)) if name in arrays else None
        return Responses(sequences, predictions(sequences, mask), known)

    def logprobs(self, context: Context, tokens: int | None = None) -> Tensor:
        """(N,) float32, on every rank: summed log-probabilities under the actor. A collective call."""

        def sums(said: Predicted, packed: Packed, rows: list[int]) -> Tensor:
            return unpacked(said.logprobs, self.mask[rows]).sum(dim=1, keepdim=True)

        micro = 2 * context.spec.dpo.micro_batch_size
        return context.per_sequence("actor", self.sequences, self.mask, micro, 1, sums, Predictions, tokens).squeeze(1)

    def ratios(self, logprobs: Tensor, config: DPO, rows: list[int] | None = None) -> Tensor:
        """Log-ratios from log-probabilities of these rows, None: of all; for IPO means over tokens."""
        assert self.reference is not None
        chosen = slice(None) if rows is None else rows
        ratios = logprobs - moved(self.reference[chosen], logprobs.device)
        if config.loss != "IPO":
            return ratios
        return ratios / moved(self.mask[chosen].sum(dim=1).clamp(min=1), logprobs.device)


@dataclass(frozen=True)
class PairBatch:
    """Pair i is rows i and i + pairs. `mismatched`: KTO's prompts with the responses of others."""

    responses: Responses
    mismatched: Responses | None

    @property
    def pairs(self) -> int:
        return len(self.responses.sequences) // 2

    def kl(self, context: Context, tokens: int | None = None) -> float:
        """KTO's estimate under the present weights, the same on every rank; 0 for other losses. A collective call."""
        if self.mismatched is None:
            return 0.0
        with context.timeline.phase("dpo kl"):
            found = self.mismatched.logprobs(context, tokens)
        return kl_estimate(self.mismatched.ratios(found, context.spec.dpo))


def load_batch(context: Context, key: str) -> PairBatch:
    """Raises BadCommand."""
    arrays = context.fetch(key)
    responses = Responses.read(context, arrays)
    mismatched = Responses.read(context, arrays, "kl_") if context.spec.dpo.loss == "KTO" else None
    if len(responses.sequences) % 2:
        raise BadCommand(f"batch {key} has {len(responses.sequences)} sequences, which are no pairs")
    return PairBatch(responses, mismatched)


def _checked(context: Context, key: str) -> PairBatch:
    """A batch with the reference's log-probabilities. Raises BadCommand."""
    batch = load_batch(context, key)
    if any(part is not None and part.reference is None for part in (batch.responses, batch.mismatched)):
        raise BadCommand(f"batch {key} has no log-probabilities of the reference")
    return batch


def _metrics(stats: dict[str, float]) -> Metrics:
    return {
        "loss": mean(stats, "loss", "pairs"),
        "accuracy": mean(stats, "correct", "pairs"),
        "margin": mean(stats, "margin", "pairs"),
        "rewards/chosen": mean(stats, "chosen", "pairs"),
        "rewards/rejected": mean(stats, "rejected", "pairs"),
        "pairs": stats["pairs"],
    }


def prepare_step(context: Context, step: Step) -> Run:
    """Check everything about the step that one rank can check alone. Raises BadCommand.

    A micro-batch of n pairs is one forward pass of 2n sequences."""
    model, config = context.model("actor"), context.spec.dpo
    batch = _checked(context, step.batch)
    responses, n = batch.responses, batch.pairs
    lengths = (responses.sequences.lengths[:n] + responses.sequences.lengths[n:]).tolist()
    tokens = step.micro_batch_tokens
    micro_batches = cut(lengths, model.dp_size, config.micro_batch_size, tokens)[model.dp_rank]
    actions = context.actions(step, {"actor": len(micro_batches)})
    schedule = digest(step.actions)

    def micro_batch(rows: list[int], kl: float) -> MicroBatch:
        both = [*rows, *(row + n for row in rows)]
        mask = responses.mask[both]

        def loss(said: Predicted) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs = unpacked(said.logprobs, mask).sum(dim=1)
            ratios = responses.ratios(logprobs, config, both)
            return preference_loss(ratios[: len(rows)], ratios[len(rows) :], config, normaliser=n, kl=kl)

        return MicroBatch(responses.sequences.pack(both, mask), loss, Predictions)

    def run() -> Metrics:
        kl = batch.kl(context, tokens)
        with context.timeline.phase("dpo step"):
            work = [micro_batch(rows, kl) for rows in micro_batches]
            stats = context.engine.run(actions, {"actor": work}, schedule=schedule)["actor"]
            applied = context.engine.optimizer_step("actor")
        estimate = {"kl": kl} if batch.mismatched is not None else {}
        return {**_metrics(stats), **estimate, **balance(stats), **applied}

    return run


def prepare_evaluate(context: Context, command: Evaluate) -> Run:
    """The metrics of a step over all pairs of the batches."""
    context.require("actor")
    batches = [_checked(context, key) for key in command.batches]
    config = context.spec.dpo

    def run() -> Metrics:
        totals = dict.fromkeys(("pairs", "loss", "correct", "margin", "chosen", "rejected"), 0.0)
        for batch in batches:
            kl = batch.kl(context)
            with context.timeline.phase("dpo evaluation"):
                found = batch.responses.logprobs(context)
            ratios = batch.responses.ratios(found, config)
            _, stats = preference_loss(ratios[: batch.pairs], ratios[batch.pairs :], config, normaliser=1.0, kl=kl)
            for name in totals:
                totals[name] += float(stats[name])
        return _metrics(totals)

    return run


def prepare_reference(context: Context, command: Evaluate, found: list[float]) -> Run:
    """Put into `found` the log-probabilities of the batches' responses under the present weights, on every rank."""
    context.require("actor")
    batches = [load_batch(context, key) for key in command.batches]

    def run() -> Metrics:
        with context.timeline.phase("dpo reference"):
            for batch in batches:
                for part in (batch.responses, batch.mismatched):
                    if part is not None:
                        found.extend(part.logprobs(context).double().tolist())
        return {}

    return run
