"""Computes log-probabilities of a few fixed tokens under the weights that were just sent. They serve to check
servers."""

from __future__ import annotations

import random
from typing import Any

import torch

from dovetail.manifest.types import RLHFJobSpec
from dovetail.models import load_config
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.models.model_stage import Outputs
from dovetail.protocol.messages import Probe
from dovetail.protocol.sampling import served_temperature
from dovetail.trainer.engine.parallel import compute_dtype
from dovetail.trainer.packed_batches import Packed, Sequences
from dovetail.trainer.steps.step_context import Context

TOKENS = 32
_MODEL = "actor"


def probe_tokens(vocabulary: int, limit: int) -> list[int]:
    """At most `limit` token ids, drawn from the whole vocabulary. They are always the same."""
    draw = random.Random(vocabulary)
    return [draw.randrange(vocabulary) for _ in range(max(0, min(TOKENS, limit)))]


def longest_sequence(spec: RLHFJobSpec, config: Any) -> int:
    """The most tokens that a server of the job takes, prompt and response together."""
    wanted = spec.data.max_prompt_tokens + spec.generation.max_tokens
    positions = getattr(config, "max_position_embeddings", None)
    return min(wanted, int(positions)) if positions else wanted


def take_probe(context: Context, version: int) -> Probe | None:
    """The actor's log-probabilities (nats), the same on every rank, or None if servers take fewer than two tokens as a
    prompt. This is a collective call. Raises FloatingPointError on every rank if a number is not finite."""
    held = context.engine.models.get(_MODEL)
    ref = context.engine.loaded[_MODEL]
    config = held.config if held is not None else load_config(ref)
    tokens = probe_tokens(int(config.vocab_size), longest_sequence(context.spec, config) - 1)
    if len(tokens) < 2:
        return None
    sequences = Sequences(torch.tensor([tokens]), torch.tensor([len(tokens)]))
    wanted = torch.ones(1, len(tokens), dtype=torch.bool)
    wanted[:, -1] = False

    def read(output: Any, packed: Packed, rows: list[int]) -> torch.Tensor:
        said: Predicted = output.logits if isinstance(output, Outputs) else output
        return said.logprobs.view(len(rows), -1)

    def asks(tokens: torch.Tensor) -> Predictions:
        return Predictions(tokens, served_temperature(context.spec))

    found = context.per_sequence(_MODEL, sequences, wanted, 1, len(tokens) - 1, read, asks)[0]
    if not bool(found.isfinite().all()):
        raise FloatingPointError(
            f"the actor's weights of version {version} give log-probabilities that are not finite; lower the learning "
            "rate, or go on from an older checkpoint"
        )
    trained = getattr(context.spec.models, _MODEL)
    dtype = compute_dtype(trained.dtype, context.groups.device)
    return Probe(version=version, tokens=tokens, logprobs=found.tolist(), dtype=str(dtype).removeprefix("torch."))
