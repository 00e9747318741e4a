"""The KV cache blocks of aborted requests. A worker keeps them for a while, so that another server can fetch them. This
file uses neither vLLM nor sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Held:
    """One request's KV cache. `layers` has for each layer (blocks, bytes of a block) uint8 in host memory. `tokens` is
    the number of tokens in it. `weights` is the weight version that computed it."""

    weights: int
    tokens: int
    layers: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.numel() for layer in self.layers)


class HeldBlocks:
    """Entries by key, with at most `capacity` bytes together. Each is kept for at most `seconds`, and only while
    `weights()`, the version in this worker, stays the same. It is None while an update is in progress. The class is
    thread-safe. `clock` gives monotonic seconds."""

    def __init__(
        self,
        capacity: int,
        seconds: float,
        weights: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._weights = weights
        self._clock = clock
        # In the order of their ends. None if refused.
        self._entries: dict[str, tuple[float, Held | None]] = {}
        self._purged_at: int | None = None  # the version to which all entries belong
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        with self._changed:
            return self._used()

    def may_hold(self, weights: int, nbytes: int) -> bool:
        """Whether `put` would keep this many bytes. Ask before you make the copy."""
        with self._changed:
            self._purge()
            used = self._used()
        return weights == self._weights() and used + nbytes <= self._capacity

    def put(self, key: str, held: Held) -> bool:
        """Keep an entry. Returns False, and keeps nothing, if there is no room or its weights are not the current
        ones."""
        if not self.may_hold(held.weights, held.nbytes):
            return False
        with self._changed:
            self._keep(key, held)
        return True

    def refuse(self, key: str) -> None:
        """Record that this entry will never come. Whoever waits for it, now or later, is told at once."""
        with self._changed:
            self._purge()
            self._keep(key, None)

    def get(self, key: str, wait: float = 0.0) -> Held | None:
        """The entry, or None. If its request is just being aborted, this waits up to `wait` seconds."""
        with self._changed:
            if key not in self._entries:
                self._changed.wait_for(lambda: key in self._entries, wait)
            self._purge()
            entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def drop(self, key: str) -> None:
        with self._changed:
            self._entries.pop(key, None)

    def purge(self) -> None:
        """Drop entries that are too old."""
        with self._changed:
            self._purge()

    def clear(self) -> None:
        with self._changed:
            self._entries.clear()

    def _keep(self, key: str, held: Held | None) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._seconds, held)
        self._changed.notify_all()

    def _purge(self) -> None:
        """Every request of a server is refused or put, so this must not look at all entries."""
        now, weights = self._clock(), self._weights()
        while self._entries and now >= next(iter(self._entries.values()))[0]:
            del self._entries[next(iter(self._entries))]
        if weights != self._purged_at:
            kept = {k: e for k, e in self._entries.items() if e[1] is None or e[1].weights == weights}
            self._entries, self._purged_at = kept, weights

    def _used(self) -> int:
        return sum(held.nbytes for _, held in self._entries.values() if held is not None)
