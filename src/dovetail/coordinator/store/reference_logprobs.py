"""Keeps the reference's log-probabilities of the responses that DPO learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from dovetail.coordinator.store.store import KeyValues
from dovetail.protocol.wire import Arrays

NAMESPACE = "reference"
PREFIXES = ("", "kl_")


class ReferenceLogprobs:
    """Each log-probability is computed once, with the weights from which the stage starts, and kept in the store.

    The tokens identify a response, so a pair that comes again in a later epoch is not computed again."""

    def __init__(self, records: KeyValues) -> None:
        self._records = records
        self._found: dict[str, float] | None = None

    def __len__(self) -> int:
        """The number of known log-probabilities."""
        return len(self._known)

    def has(self, arrays: Arrays) -> bool:
        """Whether all responses of a batch are known."""
        return all(row in self._known for prefix in PREFIXES for row in _rows(arrays, prefix))

    def add(self, key: str, arrays: Arrays, logprobs: Sequence[float]) -> None:
        """Store the log-probabilities (nats) of the batch `key`. Those of its rows come first, and then those of its
        `kl_` rows. Raises ValueError for a wrong number of them."""
        rows = [row for prefix in PREFIXES for row in _rows(arrays, prefix)]
        made = dict(zip(rows, map(float, logprobs), strict=True))
        self._records.put(f"{NAMESPACE}/{key}", made)
        self._known.update(made)

    def added(self, arrays: Arrays) -> Arrays:
        """The batch with `reference` and `kl_reference` (N,) float32, if all are known."""
        if not self.has(arrays):
            return arrays
        found = {
            f"{prefix}reference": np.array([self._known[row] for row in rows], np.float32)
            for prefix in PREFIXES
            if (rows := list(_rows(arrays, prefix)))
        }
        return arrays | found

    @property
    def _known(self) -> dict[str, float]:
        if self._found is None:
            self._found = {}
            for each in self._records.items(NAMESPACE).values():
                self._found |= each
        return self._found


def _rows(arrays: Arrays, prefix: str) -> Iterator[str]:
    """The key of each sequence, which is a hash of its tokens and of its response mask."""
    if f"{prefix}tokens" not in arrays:
        return
    parts = (arrays[f"{prefix}{name}"] for name in ("tokens", "lengths", "loss_mask"))
    for tokens, length, mask in zip(*parts, strict=True):
        content = tokens[:length].astype("<i4").tobytes() + mask[:length].astype("u1").tobytes()
        yield hashlib.blake2b(content, digest_size=16).hexdigest()
