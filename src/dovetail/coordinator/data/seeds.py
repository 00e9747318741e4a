"""Seeds that are the same on every platform and after every restart."""

from __future__ import annotations

import hashlib


def derived_seed(*key: int | str) -> int:
    """The 63-bit seed of a key: the first 8 bytes of its SHA-256, without the sign bit."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_seed(job_seed: int, iteration: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample, 0 <= seed < 2**63. Every server draws the same tokens with it, at any time."""
    return derived_seed("sample", job_seed, iteration, prompt_index, sample_index)
