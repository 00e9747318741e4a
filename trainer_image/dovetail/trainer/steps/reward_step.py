"""Reward-model training with the pairwise ranking loss on the value at each sequence's last token."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.protocol.messages import Evaluate, Step
from dovetail.trainer.algorithms.losses import reward_loss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Packed, Sequences, pair_lengths
from dovetail.trainer.steps.step_context import Context, Metrics, Run, balance, cut, digest, mean


def last_tokens(sequences: Sequences) -> Tensor:
    """(N, T) bool, true at each sequence's last token. The value there is the sequence's reward."""
    return torch.arange(sequences.tokens.shape[1]) == sequences.lengths.unsqueeze(1) - 1


def load_pairs(context: Context, key: str) -> Sequences:
    """The chosen sequences, then the rejected ones. Pair i has the rows i and i + pairs. Raises BadCommand."""
    arrays = context.fetch(key, None)
    chosen, rejected = Sequences.read(arrays, "chosen_"), Sequences.read(arrays, "rejected_")
    if len(chosen) != len(rejected):
        raise BadCommand(f"batch {key} has {len(chosen)} chosen and {len(rejected)} rejected sequences")
    width = max(chosen.tokens.shape[1], rejected.tokens.shape[1])
    both = [torch.nn.functional.pad(part.tokens, (0, width - part.tokens.shape[1])) for part in (chosen, rejected)]
    pairs = Sequences(torch.cat(both), torch.cat([chosen.lengths, rejected.lengths]))
    context.check_vocabulary(context.model("reward"), pairs)
    return pairs


def prepare_step(context: Context, step: Step) -> Run:
    """Check what one rank can check about the step, and return the rest of it. Raises BadCommand.

    A micro-batch of n pairs is one forward pass of 2n sequences."""
    model = context.model("reward")
    pairs = load_pairs(context, step.batch)
    n = len(pairs) // 2
    lengths = pair_lengths(pairs.lengths, model.packs)
    last = last_tokens(pairs)
    micro, tokens = context.spec.reward.micro_batch_size, step.micro_batch_tokens
    micro_batches = cut(model, lengths, micro, tokens)
    actions = context.actions(step, {"reward": len(micro_batches)})

    def micro_batch(rows: list[int]) -> MicroBatch:
        both = [*rows, *(row + n for row in rows)]

        def loss(rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return reward_loss(rewards[: len(rows)], rewards[len(rows) :], normaliser=n)

        return MicroBatch(pairs.pack(both, last[both]), loss)

    work = [micro_batch(rows) for rows in micro_batches]
    schedule = digest(step.actions)

    def run() -> Metrics:
        with context.timeline.phase("reward step"):
            stats = context.engine.run(actions, {"reward": work}, schedule=schedule)["reward"]
            applied = context.engine.optimizer_step("reward")
        return {
            "loss": mean(stats, "reward_loss", "pairs"),
            "accuracy": mean(stats, "correct", "pairs"),
            "margin": mean(stats, "margin", "pairs"),
            "pairs": stats["pairs"],
            **balance(stats),
            **applied,
        }

    return run


def _load_demonstrations(context: Context, key: str) -> Sequences:
    sequences = Sequences.read(context.fetch(key, None))
    if "reward" in context.engine.models:
        context.check_vocabulary(context.model("reward"), sequences)
    return sequences


def _rewards(values: Tensor, _: Packed, __: list[int]) -> Tensor:
    return values.unsqueeze(1)


def prepare_evaluate(context: Context, command: Evaluate) -> Run:
    """Prepare to compute accuracy (a tie is wrong) and loss over all pairs of the batches, and the mean score of the
    demonstrations, if there are any. Raises BadCommand."""
    context.require("reward")
    batches = [load_pairs(context, key) for key in command.batches]
    demonstrations = [_load_demonstrations(context, key) for key in command.demonstrations]
    micro = 2 * context.spec.reward.micro_batch_size

    def scores(sequences: Sequences) -> Tensor:
        return context.per_sequence("reward", sequences, last_tokens(sequences), micro, 1, _rewards).squeeze(1)

    def run() -> Metrics:
        totals = {"pairs": 0.0, "correct": 0.0, "loss": 0.0, "chosen": 0.0, "rejected": 0.0}
        for pairs in batches:
            n = len(pairs) // 2
            with context.timeline.phase("reward evaluation"):
                found = scores(pairs)
            _, stats = reward_loss(found[:n], found[n:], normaliser=1.0)
            totals["pairs"] += n
            totals["correct"] += float(stats["correct"])
            totals["loss"] += float(stats["reward_loss"])
            totals["chosen"] += float(stats["chosen"])
            totals["rejected"] += float(stats["rejected"])
        written: Metrics = {}
        if demonstrations:
            with context.timeline.phase("reward of demonstrations"):
                found = torch.cat([scores(sequences) for sequences in demonstrations]).double()
            written = {"demonstrations": float(len(found)), "demonstration_score": float(found.mean())}
        return {
            **written,
            "accuracy": mean(totals, "correct", "pairs"),
            "pairs": totals["pairs"],
            "correct": totals["correct"],
            "loss": mean(totals, "loss", "pairs"),
            "chosen": mean(totals, "chosen", "pairs"),
            "rejected": mean(totals, "rejected", "pairs"),
        }

    return run
