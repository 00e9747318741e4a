"""The cost of moving one sample to another server (RLHFuse section 4.2). Either its tokens are prefilled again, or its
KV cache is moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

# The weight of a new measurement.
SMOOTHING = 0.2


class Mechanism(StrEnum):
    TOKENS = "tokens"
    KV = "kv"


@dataclass(frozen=True)
class MigrationCosts:
    """The seconds from a sample's resubmission to its next token on the new server. They are a fixed part plus a
    prefill, or a fixed part plus the transfer of the KV cache at `bytes_per_second`. `token_bytes` is the bytes of KV
    cache per token. The KV cache is moved in whole blocks of `block_tokens` tokens."""

    token_bytes: int
    block_tokens: int = 1
    bytes_per_second: float = 1e9
    prefill_seconds_per_token: float = 5e-5
    tokens_fixed_seconds: float = 0.01
    kv_fixed_seconds: float = 0.015

    def nbytes(self, tokens: int) -> int:
        """The bytes of KV cache to move for a sample of `tokens` tokens, prompt and response together."""
        return -(-tokens // self.block_tokens) * self.block_tokens * self.token_bytes

    def seconds(self, mechanism: Mechanism, tokens: int) -> float:
        if mechanism is Mechanism.TOKENS:
            return self.tokens_fixed_seconds + tokens * self.prefill_seconds_per_token
        return self.kv_fixed_seconds + self.nbytes(tokens) / self.bytes_per_second

    def choose(self, tokens: int) -> Mechanism:
        """The cheaper mechanism. If both cost the same it is `tokens`, which needs nothing from the old server."""
        cheaper = self.seconds(Mechanism.KV, tokens) < self.seconds(Mechanism.TOKENS, tokens)
        return Mechanism.KV if cheaper else Mechanism.TOKENS

    def least_tokens(self) -> int | None:
        """The smallest number of tokens for which moving the KV cache can be cheaper. None if it never is."""
        gain = self.prefill_seconds_per_token - self.token_bytes / self.bytes_per_second
        if gain <= 0:
            return None
        return max(0, int((self.kv_fixed_seconds - self.tokens_fixed_seconds) / gain))


class MeasuredCosts:
    """The assumed costs, scaled for each mechanism by the ratio of measured to assumed seconds. Older measurements
    count less.

    A mechanism that was not used yet keeps its assumed cost. `costs` has the scaled ones."""

    def __init__(self, assumed: MigrationCosts) -> None:
        self._assumed = assumed
        self._ratio: dict[Mechanism, float] = {}
        self.costs = assumed

    def measured(self, mechanism: Mechanism, tokens: int, seconds: float) -> None:
        ratio = seconds / self._assumed.seconds(mechanism, tokens)
        if ratio > 0:
            old = self._ratio.get(mechanism, ratio)
            self._ratio[mechanism] = old + SMOOTHING * (ratio - old)
        prefill, moved = (self._ratio.get(m, 1.0) for m in (Mechanism.TOKENS, Mechanism.KV))
        a = self._assumed
        self.costs = replace(
            a,
            prefill_seconds_per_token=a.prefill_seconds_per_token * prefill,
            tokens_fixed_seconds=a.tokens_fixed_seconds * prefill,
            kv_fixed_seconds=a.kv_fixed_seconds * moved,
            bytes_per_second=a.bytes_per_second / moved,
        )
