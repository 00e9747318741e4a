"""A version of the weights in host memory, as it was received, so that it can be sent on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dovetail.protocol.messages import Offer


@dataclass
class Copied:
    """`messages`: the packed buckets with their checksums, uint8, in the order in which the parcels of `offer` travel.
    `users`: the number of threads that send them."""

    offer: Offer
    messages: list[torch.Tensor] = field(default_factory=list)
    users: int = 0


class ReceivedCopy:
    """The last version that arrived completely. The thread that receives calls `begin`, `add` and `complete`. Other
    threads may be `using` it.

    A new version overwrites the one before, unless that is being sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._whole: Copied | None = None
        self._coming: Copied | None = None
        self._spare: list[torch.Tensor] = []

    def begin(self, offer: Offer) -> None:
        """Begin a new version. The one before is dropped."""
        with self._lock:
            old, self._whole = self._whole or self._coming, None
            self._spare = [] if old is None or old.users else old.messages
            self._coming = Copied(offer)

    def add(self, message: torch.Tensor) -> None:
        """Copy the next message, on any device. The buffer may be written again by later work on its stream."""
        assert self._coming is not None
        number = len(self._coming.messages)
        room = self._spare[number] if number < len(self._spare) else None
        if room is None or room.numel() != message.numel():
            room = torch.empty(message.numel(), dtype=torch.uint8, pin_memory=message.is_cuda)
        room.copy_(message, non_blocking=True)
        self._coming.messages.append(room)

    def complete(self) -> None:
        """Mark the version as complete. From now on it can be sent."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        with self._lock:
            self._whole, self._coming, self._spare = self._coming, None, []

    @contextmanager
    def using(self, version: int) -> Iterator[Copied | None]:
        """The version, which does not change inside the block, or None if it is not here."""
        with self._lock:
            whole = self._whole
            found = whole if whole is not None and whole.offer.version == version else None
            if found is not None:
                found.users += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.users -= 1
