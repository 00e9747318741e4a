"""What one rollout instance costs: decode, prefill, inference, swap; and what fits on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from dovetail.planner.chunks import MIN_CHUNK_TOKENS
from dovetail.planner.costs.generation import SATURATED


class ProfileError(ValueError):
    """A profile or an argument that cannot be; the message names the field."""


@dataclass(frozen=True)
class StageProfile:
    """One instance: a vLLM server and its scorer.

    `decode`: measured (batch size, seconds a step), interpolated; below the first point as at it, beyond the last as
    the last two go on (with one point: in proportion). `inference_seconds_per_token`: reference, reward and critic
    together, per token of prompt and response (the prompt counts for each of its samples, though they share its
    computation: what is measured is that much lower); `inference_seconds_per_chunk`: what a chunk of samples that are
    scored together costs besides.
    `swap_in_seconds`: from the last decode step to the first scored batch, as far as nothing hides it;
    `swap_out_seconds`: from the last scored batch back to a server that can generate.
    `max_samples`: most requests at once. `kv_tokens`: the KV cache's room, None: enough. `saturation`: BS_max, the
    batch up to which a step takes almost as long as with one sample; None: read off `decode`.
    Scorer and server share the device, so the instance scores when it does not generate (also right for CPU scorers on
    the server's own cores).
    `migration_seconds`: from the decision to stop a request to its arrival elsewhere.
    `resume_seconds_per_token`: of its prefill there; None: as of any.
    `kv_transfer_seconds_per_token`: moving the KV cache instead of a new prefill, where it can be moved.
    `chunk_tokens`: fewest tokens that are scored together, if there are as many.
    `block_tokens`: scorers take unfinished samples in blocks of so many response tokens; None: they do not."""

    decode: tuple[tuple[int, float], ...]
    prefill_seconds_per_token: float
    inference_seconds_per_token: float
    inference_seconds_per_chunk: float = 0.0
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0
    max_samples: int = 256
    kv_tokens: int | None = None
    saturation: int | None = None
    migration_seconds: float = 0.0
    resume_seconds_per_token: float | None = None
    kv_transfer_seconds_per_token: float | None = None
    chunk_tokens: int = MIN_CHUNK_TOKENS
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.decode:
            raise ProfileError("decode has no points; give at least one (batch size, seconds a step)")
        batches = [b for b, _ in self.decode]
        if batches != sorted(set(batches)) or batches[0] < 1:
            raise ProfileError(f"decode's batch sizes must be at least 1 and rise, not {batches}")
        if not all(math.isfinite(s) and s > 0 for _, s in self.decode):
            raise ProfileError("decode's seconds a step must be above 0")
        for name in (
            "prefill_seconds_per_token",
            "inference_seconds_per_token",
            "inference_seconds_per_chunk",
            "swap_in_seconds",
            "swap_out_seconds",
            "migration_seconds",
            "resume_seconds_per_token",
            "kv_transfer_seconds_per_token",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"{name} is {value}; it must be 0 or more")
        for name in ("max_samples", "kv_tokens", "saturation", "chunk_tokens", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ProfileError(f"{name} is {value}; it must be 1 or more")

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """Seconds of a step at batch size 0 (as 1) to `max_samples`; never falling."""
        batches = np.array([b for b, _ in self.decode], float)
        # Measured points are noisy; a larger batch is not faster.
        seconds = np.maximum.accumulate([s for _, s in self.decode])
        sizes = np.arange(self.max_samples + 1, dtype=float)
        table = np.interp(sizes, batches, seconds)
        if len(batches) > 1:
            slope = (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2])
        else:
            slope = seconds[-1] / batches[-1]
        table += slope * np.maximum(0.0, sizes - batches[-1])
        return tuple(table.tolist())

    @cached_property
    def bs_max(self) -> int:
        """BS_max, at most `max_samples`."""
        if self.saturation is not None:
            return min(self.saturation, self.max_samples)
        return max(b for b in range(1, self.max_samples + 1) if b == 1 or self.steps[b] <= SATURATED * self.steps[1])

    def roomy(self) -> Self:
        """The same, but as a destination it takes what it has room for, though its steps get longer."""
        return replace(self, saturation=self.max_samples)

    def slots(self, kv_per_sample: int) -> int:
        """Samples that a destination takes: BS_max, fewer where KV memory is short (RLHFuse section 4.2)."""
        fit = self.bs_max if self.kv_tokens is None else self.kv_tokens // max(1, kv_per_sample)
        return max(1, min(self.bs_max, fit))

    def moving_seconds(self, tokens: int) -> tuple[float, bool]:
        """The cheaper way to bring a sample of `tokens` (prompt and response) here, and whether it is a prefill."""
        each = self.resume_seconds_per_token
        prefill = tokens * (self.prefill_seconds_per_token if each is None else each)
        if self.kv_transfer_seconds_per_token is None:
            return prefill, True
        transfer = tokens * self.kv_transfer_seconds_per_token
        return (transfer, False) if transfer < prefill else (prefill, True)

    def chunk_seconds(self, lengths: Sequence[int]) -> float:
        """Scoring samples of so many tokens (prompt and response) together."""
        return self.inference_seconds_per_chunk + sum(lengths) * self.inference_seconds_per_token
