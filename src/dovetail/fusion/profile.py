"""Describes one rollout instance: the seconds of decode steps, prefills, inference and swaps, how many samples fit on
it, and how many are scored together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

from dovetail.fusion.curve import interpolate

# A decode step that takes more than this times the step of one sample is not "almost constant" (RLHFuse section 4.2).
SATURATED = 1.1
MAX_BATCH_TOKENS = 16_384
# Smaller batches cost as much: the fixed costs (a request, reading the weights of three models) prevail.
MIN_BATCH_TOKENS = 512
CHUNKS_PER_SCORER = 3
# The number of unfinished samples for each scorer that are scored while they are generated. With more, a prompt would
# be computed again for each of its samples, long before the last one ends.
STREAMED_PER_SCORER = 2

# The fields that must be at least 1. The others are seconds.
_COUNTS = ("max_samples", "kv_tokens", "saturation", "batch_tokens", "block_tokens")


class ProfileError(ValueError):
    """A profile or an argument is impossible. The message names the field."""


@dataclass(frozen=True)
class StageProfile:
    """One instance: a vLLM server and its scorer. Both share the device, so the instance scores only while it does not
    generate. This is also right for CPU scorers on the server's own cores.

    `decode`: measured points (batch size, seconds of a decode step). Between points the time is interpolated. Below the
    first point it is constant. Beyond the last point it follows the line through the last two points. With one point it
    is in proportion to the batch.
    `prefill_seconds_per_token`: the time of a prefill. `request_seconds`: the time of each request besides.
    `inference_seconds_per_token`: the time of reference, reward and critic together, for a token of prompt and
    response. A prompt counts for each of its samples, although they share its computation. So the value is lower.
    `inference_seconds_per_batch`: the fixed seconds of a batch of samples that are scored together.
    `swap_in_seconds`: the time from the last decode step to the first scored batch, without what other work hides.
    `swap_out_seconds`: the time from the last scored batch until the server can generate again.
    `max_samples`: the most requests at once.
    `kv_tokens`: the tokens that the KV cache holds. None: it holds enough.
    `saturation`: BS_max, the largest batch whose step takes almost as long as that of one sample. None: by `decode`.
    `migration_seconds`: the time from the decision to stop a request until it arrives elsewhere.
    `resume_seconds_per_token`: the time of the prefill at its destination. None: the same as for any prefill.
    `kv_transfer_seconds_per_token`: the time to move the KV cache in place of a prefill. None: it cannot be moved.
    `batch_tokens`: the fewest tokens that are scored together, if as many wait.
    `block_tokens`: the response tokens of a block, by which scorers take unfinished samples. None: they do not.

    Raises ProfileError for impossible values."""

    decode: tuple[tuple[int, float], ...]
    prefill_seconds_per_token: float
    inference_seconds_per_token: float
    inference_seconds_per_batch: float = 0.0
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0
    max_samples: int = 256
    kv_tokens: int | None = None
    saturation: int | None = None
    migration_seconds: float = 0.0
    resume_seconds_per_token: float | None = None
    kv_transfer_seconds_per_token: float | None = None
    batch_tokens: int = MIN_BATCH_TOKENS
    block_tokens: int | None = None
    request_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.decode:
            raise ProfileError("decode has no points; give at least one (batch size, seconds a step)")
        batches = [b for b, _ in self.decode]
        if batches != sorted(set(batches)) or batches[0] < 1:
            raise ProfileError(f"decode's batch sizes must be at least 1 and rise, not {batches}")
        if not all(math.isfinite(s) and s > 0 for _, s in self.decode):
            raise ProfileError("decode's seconds a step must be above 0")
        for name, value in vars(self).items():
            least = 1 if name in _COUNTS else 0
            if name != "decode" and value is not None and not (math.isfinite(value) and value >= least):
                raise ProfileError(f"{name} is {value}; it must be {least} or more")

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """The seconds of a step by batch size, from 0 (equal to 1) to `max_samples`. They never fall."""
        batches = [b for b, _ in self.decode]
        # Measured points are noisy; a larger batch is not faster.
        seconds = list(accumulate((s for _, s in self.decode), max))
        if len(batches) > 1:
            slope = (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2])
        else:
            slope = seconds[-1] / batches[-1]
        return tuple(
            interpolate(size, batches, seconds) + slope * max(0, size - batches[-1])
            for size in range(self.max_samples + 1)
        )

    @cached_property
    def bs_max(self) -> int:
        """BS_max (RLHFuse section 4.2), but at most `max_samples`."""
        if self.saturation is not None:
            return min(self.saturation, self.max_samples)
        return max(b for b in range(1, self.max_samples + 1) if b == 1 or self.steps[b] <= SATURATED * self.steps[1])

    def roomy(self) -> Self:
        """The same instance, but as a destination it takes all samples that it has room for. Its steps get longer."""
        return replace(self, saturation=self.max_samples)

    def slots(self, kv_per_sample: int) -> int:
        """The number of samples that a destination takes. It is BS_max, or fewer if the KV cache is too small (RLHFuse
        section 4.2). `kv_per_sample`: tokens."""
        fit = self.bs_max if self.kv_tokens is None else self.kv_tokens // max(1, kv_per_sample)
        return max(1, min(self.bs_max, fit))

    def moving_seconds(self, tokens: int) -> tuple[float, bool]:
        """The seconds of the cheaper way to bring a sample here, and whether that way is a prefill. `tokens`: the
        tokens of its prompt and response so far."""
        each = self.resume_seconds_per_token
        prefill = tokens * (self.prefill_seconds_per_token if each is None else each)
        if self.kv_transfer_seconds_per_token is None:
            return prefill, True
        transfer = tokens * self.kv_transfer_seconds_per_token
        return (transfer, False) if transfer < prefill else (prefill, True)

    def batch_seconds(self, lengths: Sequence[int]) -> float:
        """The seconds to score samples together. `lengths`: the tokens of each sample's prompt and response."""
        return self.inference_seconds_per_batch + sum(lengths) * self.inference_seconds_per_token


def batch_target(waiting: int, scorers: int, least: int = MIN_BATCH_TOKENS, most: int = MAX_BATCH_TOKENS) -> int:
    """The most tokens of the next batch of one of `scorers` scorers, padded to its longest sample. A batch always has
    at least one sample.

    It is about a third of a scorer's share of the `waiting` tokens, but at least `least` tokens and at most `most`. The
    last batches are small, so all scorers end at about the same time. Where the shortest samples come first, each
    further sample makes all rows longer."""
    return min(most, max(least, waiting // max(1, scorers * CHUNKS_PER_SCORER)))
