"""Supervised fine-tuning with the next-token cross entropy of marked tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import Evaluate, Step
from dovetail.trainer.algorithms.losses import sft_loss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Packed, Sequences, read, shifted, unpacked
from dovetail.trainer.steps.step_context import Context, Metrics, Run, balance, cut, digest, mean


def predictions(sequences: Sequences, loss_mask: Tensor) -> Tensor:
    """(N, T) bool, true where a position's prediction is to be learnt. `loss_mask` (N, T) marks the tokens to learn.

    Position t predicts token t + 1. Nothing predicts a sequence's first token. Tokens beyond its length do not
    count."""
    inside = torch.arange(loss_mask.shape[1]) < sequences.lengths.unsqueeze(1)
    return shifted((loss_mask.bool() & inside).to(torch.uint8)).bool()


def load_batch(context: Context, key: str) -> tuple[Sequences, Tensor]:
    """A batch's sequences and their `predictions`. Raises BadCommand."""
    arrays = context.fetch(key, None)
    sequences = Sequences.read(arrays)
    mask = read(arrays, "loss_mask", torch.uint8, tuple(sequences.tokens.shape))
    context.check_vocabulary(context.model("actor"), sequences)
    return sequences, predictions(sequences, mask)


def prepare_step(context: Context, step: Step) -> Run:
    """Check what one rank can check about the step, and return the rest of it. Raises BadCommand."""
    model = context.model("actor")
    sequences, mask = load_batch(context, step.batch)
    lengths, micro, tokens = sequences.lengths.tolist(), context.spec.sft.micro_batch_size, step.micro_batch_tokens
    micro_batches = cut(model, lengths, micro, tokens)
    actions = context.actions(step, {"actor": len(micro_batches)})
    normaliser = int(mask.sum())
    if normaliser == 0:
        raise BadCommand(f"batch {step.batch} has no token to learn: its loss_mask is 0 everywhere")

    def micro_batch(rows: list[int]) -> MicroBatch:
        packed = sequences.pack(rows, mask[rows])

        def loss(said: Predicted) -> tuple[Tensor, dict[str, Tensor]]:
            return sft_loss(said.logprobs, torch.ones_like(said.tokens, dtype=torch.bool), normaliser=normaliser)

        return MicroBatch(packed, loss, Predictions)

    work = [micro_batch(rows) for rows in micro_batches]
    schedule = digest(step.actions)

    def run() -> Metrics:
        with context.timeline.phase("sft step"):
            stats = context.engine.run(actions, {"actor": work}, schedule=schedule)["actor"]
            applied = context.engine.optimizer_step("actor")
        return {"loss": mean(stats, "loss", "tokens"), "tokens": stats["tokens"], **balance(stats), **applied}

    return run


def prepare_evaluate(context: Context, command: Evaluate) -> Run:
    """Prepare to compute the mean loss per token (nats) over all the batches. Raises BadCommand."""
    context.require("actor")
    batches = [load_batch(context, key) for key in command.batches]

    def run() -> Metrics:
        loss = tokens = 0.0
        for sequences, mask in batches:

            def sums(said: Predicted, packed: Packed, rows: list[int], mask: Tensor = mask) -> Tensor:
                return -unpacked(said.logprobs, mask[rows]).sum(dim=1, keepdim=True)

            with context.timeline.phase("sft evaluation"):
                micro = context.spec.sft.micro_batch_size
                found = context.per_sequence("actor", sequences, mask, micro, 1, sums, Predictions)
            loss += float(found.double().sum())
            tokens += float(mask.sum())
        return {"loss": loss / tokens if tokens else 0.0, "tokens": tokens}

    return run
