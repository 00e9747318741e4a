"""DPO, IPO and KTO. The actor learns from pairs of responses, or from responses with a label, against log-probabilities
of a frozen reference.

The batch holds these log-probabilities, so the reference is not in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.manifest.training_types import DPO
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import Evaluate, Step
from dovetail.protocol.wire import Arrays
from dovetail.trainer.algorithms.losses import kl_estimate, labelled_loss, preference_loss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Packed, Sequences, moved, pair_lengths, read, unpacked
from dovetail.trainer.steps.sft_step import predictions
from dovetail.trainer.steps.step_context import Context, Metrics, Run, balance, cut, digest, mean


@dataclass(frozen=True)
class Responses:
    """`mask` (N, T) bool marks the positions that predict the response's tokens. `reference` (N,) float32 is the sum of
    their log-probabilities (nats) under the reference, or None if it is not known yet."""

    sequences: Sequences
    mask: Tensor
    reference: Tensor | None

    @staticmethod
    def read(context: Context, arrays: Arrays, prefix: str = "") -> Responses:
        """The responses in a batch's arrays. Raises BadCommand."""
        sequences = Sequences.read(arrays, prefix)
        mask = read(arrays, f"{prefix}loss_mask", torch.uint8, tuple(sequences.tokens.shape))
        context.check_vocabulary(context.model("actor"), sequences)
        name = f"{prefix}reference"
        known = read(arrays, name, torch.float32, (len(sequences),)) if name in arrays else None
        return Responses(sequences, predictions(sequences, mask), known)

    def logprobs(self, context: Context, tokens: int | None = None) -> Tensor:
        """(N,) float32, on every rank: sums of log-probabilities (nats) under the actor. This is a collective call."""

        def sums(said: Predicted, packed: Packed, rows: list[int]) -> Tensor:
            return unpacked(said.logprobs, self.mask[rows]).sum(dim=1, keepdim=True)

        micro = 2 * context.spec.dpo.micro_batch_size
        return context.per_sequence("actor", self.sequences, self.mask, micro, 1, sums, Predictions, tokens).squeeze(1)

    def ratios(self, logprobs: Tensor, rows: list[int] | None = None) -> Tensor:
        """The log-ratios (rows,) of these rows, or of all rows if `rows` is None, from their log-probabilities."""
        assert self.reference is not None
        return logprobs - moved(self.reference[slice(None) if rows is None else rows], logprobs.device)


@dataclass(frozen=True)
class JudgedBatch:
    """Responses with judgements. Without `good`, pair i has the rows i and i + pairs. With `good` (N,) bool there are
    no pairs, and each response has this label. `mismatched` holds KTO's prompts with responses to other prompts."""

    responses: Responses
    mismatched: Responses | None
    good: Tensor | None

    @property
    def records(self) -> int:
        """The number of pairs, or of responses with a label."""
        rows = len(self.responses.sequences)
        return rows // 2 if self.good is None else rows

    def rows(self, records: list[int]) -> list[int]:
        """The rows of these records. For pairs the chosen rows come first, then the rejected ones."""
        return records if self.good is not None else [*records, *(row + self.records for row in records)]

    def lengths(self, packs: bool) -> list[int]:
        """The number of tokens of each record (`pair_lengths`)."""
        lengths = self.responses.sequences.lengths
        return pair_lengths(lengths, packs) if self.good is None else [int(length) for length in lengths]

    def loss(
        self, ratios: Tensor, config: DPO, records: list[int] | None = None, *, normaliser: float, kl: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of these records and its statistics. With `records` None it is over all. `ratios` are the log-ratios
        of their rows."""
        if self.good is not None:
            good = moved(self.good if records is None else self.good[records], ratios.device)
            return labelled_loss(ratios, good, config, normaliser=normaliser, kl=kl)
        half = len(ratios) // 2
        mask = self.responses.mask if records is None else self.responses.mask[self.rows(records)]
        tokens = moved(mask.sum(dim=1).clamp(min=1), ratios.device)
        counts = tokens[:half], tokens[half:]
        return preference_loss(ratios[:half], ratios[half:], config, normaliser=normaliser, kl=kl, tokens=counts)

    def kl(self, context: Context, tokens: int | None = None) -> float:
        """KTO's KL estimate under the current weights, in nats. It is the same on every rank, and 0 for other losses.
        This is a collective call."""
        if self.mismatched is None:
            return 0.0
        with context.timeline.phase("dpo kl"):
            found = self.mismatched.logprobs(context, tokens)
        return kl_estimate(self.mismatched.ratios(found))


def load_batch(context: Context, key: str) -> JudgedBatch:
    """The batch with this key. Raises BadCommand."""
    arrays = context.fetch(key, None)
    responses = Responses.read(context, arrays)
    mismatched = Responses.read(context, arrays, "kl_") if context.spec.dpo.loss == "KTO" else None
    if "good" in arrays:
        if mismatched is None:
            raise BadCommand(f"batch {key} has labels, which loss {context.spec.dpo.loss} cannot use")
        good = read(arrays, "good", torch.uint8, (len(responses.sequences),)).bool()
        return JudgedBatch(responses, mismatched, good)
    if len(responses.sequences) % 2:
        raise BadCommand(f"batch {key} has {len(responses.sequences)} sequences, which are no pairs")
    return JudgedBatch(responses, mismatched, None)


def _checked(context: Context, key: str) -> JudgedBatch:
    """A batch that has the reference's log-probabilities. Raises BadCommand."""
    batch = load_batch(context, key)
    if any(part is not None and part.reference is None for part in (batch.responses, batch.mismatched)):
        raise BadCommand(f"batch {key} has no log-probabilities of the reference")
    return batch


def _metrics(stats: dict[str, float]) -> Metrics:
    if "responses" in stats:
        bad = {"rejected": stats["rejected"], "bad": stats["responses"] - stats["good"]}
        chosen, rejected = mean(stats, "chosen", "good"), mean(bad, "rejected", "bad")
        return {
            "loss": mean(stats, "loss", "responses"),
            "accuracy": mean(stats, "correct", "responses"),
            "margin": chosen - rejected,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "responses": stats["responses"],
        }
    return {
        "loss": mean(stats, "loss", "pairs"),
        "accuracy": mean(stats, "correct", "pairs"),
        "margin": mean(stats, "margin", "pairs"),
        "rewards/chosen": mean(stats, "chosen", "pairs"),
        "rewards/rejected": mean(stats, "rejected", "pairs"),
        "pairs": stats.get("pairs", 0.0),
    }


def prepare_step(context: Context, step: Step) -> Run:
    """Check what one rank can check about the step, and return the rest of it. Raises BadCommand.

    A micro-batch of n pairs is one forward pass of 2n sequences. One of n responses with a label has n sequences."""
    model, config = context.model("actor"), context.spec.dpo
    batch = _checked(context, step.batch)
    responses, n = batch.responses, batch.records
    tokens = step.micro_batch_tokens
    micro_batches = cut(model, batch.lengths(model.packs), config.micro_batch_size, tokens)
    actions = context.actions(step, {"actor": len(micro_batches)})
    schedule = digest(step.actions)

    def micro_batch(records: list[int], kl: float) -> MicroBatch:
        rows = batch.rows(records)
        mask = responses.mask[rows]

        def loss(said: Predicted) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs = unpacked(said.logprobs, mask).sum(dim=1)
            ratios = responses.ratios(logprobs, rows)
            return batch.loss(ratios, config, records, normaliser=n, kl=kl)

        return MicroBatch(responses.sequences.pack(rows, mask), loss, Predictions)

    def run() -> Metrics:
        kl = batch.kl(context, tokens)
        with context.timeline.phase("dpo step"):
            work = [micro_batch(records, kl) for records in micro_batches]
            stats = context.engine.run(actions, {"actor": work}, schedule=schedule)["actor"]
            applied = context.engine.optimizer_step("actor")
        estimate = {"kl": kl} if batch.mismatched is not None else {}
        return {**_metrics(stats), **estimate, **balance(stats), **applied}

    return run


def prepare_evaluate(context: Context, command: Evaluate) -> Run:
    """Prepare to compute the metrics of a step over all records of the batches. Without records (`data.heldOut` 0) they
    are 0."""
    context.require("actor")
    batches = [_checked(context, key) for key in command.batches]
    config = context.spec.dpo

    def run() -> Metrics:
        totals: dict[str, float] = {}
        for batch in batches:
            kl = batch.kl(context)
            with context.timeline.phase("dpo evaluation"):
                found = batch.responses.logprobs(context)
            ratios = batch.responses.ratios(found)
            _, stats = batch.loss(ratios, config, normaliser=1.0, kl=kl)
            for name, value in stats.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return _metrics(totals)

    return run


def prepare_reference(context: Context, command: Evaluate, found: list[float]) -> Run:
    """Prepare to add to `found` the log-probabilities (nats) of the batches' responses under the current weights, on
    every rank. Raises BadCommand."""
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
