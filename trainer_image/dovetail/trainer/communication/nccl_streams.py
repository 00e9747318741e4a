"""Gives each NCCL communicator a CUDA stream that nothing else uses.

torch gives the communicators the streams of a pool in turn, and begins again after 32. If two communicators share a
stream, an operation of one waits for a message of the other. If the peer first waits for that operation itself, both
wait for ever."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dovetail.models.links.nccl import library

_NON_BLOCKING = 1
# No pool has so many streams.
_MANY = 1024


class StreamPool:
    """torch's pool of streams on a GPU. `priority`: 0, or -1 for the pool of streams that go first."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._taken: dict[str, set[int]] = {}
        self._ring: list[int] = []

    def release(self, owner: str) -> None:
        """The owner uses none of its streams any more."""
        self._taken.pop(owner, None)

    def reserve(self, owner: str) -> bool:
        """Make the pool's next stream one that nobody has reserved, and reserve it for the owner. Returns False if all
        streams are reserved. Then the next one is shared."""
        if not self._ring:
            self._ring = self._all()
        taken = {stream for streams in self._taken.values() for stream in streams}
        for _ in self._ring:
            after = (self._ring.index(self._draw()) + 1) % len(self._ring)
            if self._ring[after] not in taken:
                self._taken.setdefault(owner, set()).add(self._ring[after])
                return True
        return False

    def _draw(self) -> int:
        return int(torch.cuda.Stream(self._device, priority=self._priority).cuda_stream)

    def _all(self) -> list[int]:
        """The pool's streams in their order."""
        found = [self._draw()]
        while (drawn := self._draw()) != found[0]:
            found.append(drawn)
            if len(found) > _MANY:
                raise RuntimeError(f"torch has given {_MANY} CUDA streams without giving one again")
        return found


def own_stream(device: torch.device) -> Any:
    """A new stream outside of torch's pools. It lives as long as the process."""
    cuda = library(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}", "cudaStreamCreateWithFlags")
    cuda.cudaStreamCreateWithFlags.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        if failed := cuda.cudaStreamCreateWithFlags(ctypes.byref(made), _NON_BLOCKING):
            raise RuntimeError(f"CUDA error {failed}: no stream could be made on {device}")
    return torch.cuda.ExternalStream(made.value or 0, device=device)
