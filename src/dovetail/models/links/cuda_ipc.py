"""Sends messages from one process to others on the same GPU, which map its memory (CUDA IPC).

The sender copies a message, slot by slot, into memory that is used for nothing else. torch's own allocator is not used,
because with expandable segments only processes that may debug each other can share its memory."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from dovetail.models.links.deadline import LONGEST_PAUSE, Deadline, Handle, TransferError
from dovetail.models.links.nccl import library
from dovetail.models.links.rendezvous import Rendezvous
from dovetail.protocol.budgets import SHARED_WEIGHT_BYTES

SLOTS = 2
SLOT_BYTES = SHARED_WEIGHT_BYTES // SLOTS
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
SENT, TAKEN = "ipc/sent", "ipc/taken"


class _MemoryHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    """CUDA's runtime library. Raises OSError if it is not found."""
    major = (torch.version.cuda or "").partition(".")[0]
    cuda = library(f"libcudart.so.{major}", "cudaIpcGetMemHandle")
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    cuda.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    cuda.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_MemoryHandle), ctypes.c_void_p]
    cuda.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _MemoryHandle, ctypes.c_uint]
    cuda.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    return cuda


def _expect(result: int, what: str) -> None:
    if result:
        _cuda().cudaGetLastError()  # torch would raise it at its next call
        raise TransferError(f"CUDA could not {what}: {_cuda().cudaGetErrorString(result).decode(errors='replace')}")


@dataclass
class _Raw:
    """Device memory that torch did not allocate: `nbytes` bytes at the address `at`."""

    at: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.at, False), "version": 3}


def _slots(at: int, device: torch.device) -> list[torch.Tensor]:
    return list(torch.as_tensor(_Raw(at, SLOTS * SLOT_BYTES), device=device).split(SLOT_BYTES))


@cache
def _mailbox(device: torch.device) -> tuple[str, list[torch.Tensor]]:
    """The handle by which other processes map this process's slots on a GPU, and the slots. The slots stay until the
    process ends, because CUDA does not allow a process to free memory that another one may still have mapped."""
    at, handle = ctypes.c_void_p(), _MemoryHandle()
    with torch.cuda.device(device):
        _expect(_cuda().cudaMalloc(ctypes.byref(at), SLOTS * SLOT_BYTES), "allocate memory to share")
        _expect(_cuda().cudaIpcGetMemHandle(ctypes.byref(handle), at), "share memory")
    return bytes(handle).hex(), _slots(at.value or 0, device)


def mailbox_handle(device: torch.device) -> str:
    """The handle by which receivers on this GPU map the sender's memory. Raises TransferError or OSError."""
    return _mailbox(device)[0]


class _Queue:
    """Messages in order. `advance` must be called until a message is through."""

    def __init__(self, meeting: Rendezvous, device: torch.device):
        self._meeting, self._device = meeting, device
        self._waiting: deque[tuple[torch.Tensor, int]] = deque()  # the rest of each message, and its number
        self._asked = self._over = 0
        self._chunks = 0  # the number of chunks that were sent or taken

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """See `Link`."""
        self._asked += 1
        self._waiting.append((buffer, self._asked))
        self.advance()
        return _Pending(self, self._asked, deadline)

    def wait(self, number: int, deadline: Deadline) -> None:
        """Wait until the message is through. Raises TransferError."""
        pause = 0.00005
        while not self.through(number):
            if self.advance():
                pause = 0.00005
                continue
            self._meeting.look("before all ranks had all of it")
            deadline.left(self._late)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def advance(self) -> bool:
        """Move the next chunk, if that is possible now. Returns whether it was moved."""
        raise NotImplementedError

    def through(self, number: int) -> bool:
        """Whether message `number`, which counts from 1, is sent or received."""
        raise NotImplementedError

    def _late(self) -> list[int]:
        return []

    def _next(self) -> torch.Tensor:
        """The next chunk of the first message."""
        message, number = self._waiting[0]
        chunk, rest = message[:SLOT_BYTES], message[SLOT_BYTES:]
        if rest.numel():
            self._waiting[0] = rest, number
        else:
            self._waiting.popleft()
            self._over = number
        self._chunks += 1
        return chunk

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        torch.cuda.current_stream(self._device).synchronize()


class IpcSender(_Queue):
    """The sender's end of the link. `ranks`: its receivers on the same GPU."""

    def __init__(self, meeting: Rendezvous, ranks: list[int], device: torch.device):
        super().__init__(meeting, device)
        self._ranks = ranks
        self._slots = _mailbox(device)[1]
        self._ends: dict[int, int] = {}  # maps a message to the number of chunks that were sent when it was through

    def advance(self) -> bool:
        if not self._waiting or self._chunks - self._taken() >= SLOTS:
            return False
        slot = self._slots[self._chunks % SLOTS]
        chunk = self._next()
        self._copy(slot[: chunk.numel()], chunk)
        self._ends[self._over] = self._chunks
        self._meeting.set(SENT, str(self._chunks))
        return True

    def through(self, number: int) -> bool:
        return self._over >= number and self._taken() >= self._ends[number]

    def close(self) -> None:
        """See `Link`. The slots stay mapped."""

    def _late(self) -> list[int]:
        return [rank for rank in self._ranks if self._meeting.count(f"{TAKEN}/{rank}") < self._chunks]

    def _taken(self) -> int:
        return min(self._meeting.count(f"{TAKEN}/{rank}") for rank in self._ranks)


class IpcReceiver(_Queue):
    """A receiver's end of the link. `handle`: the sender's `mailbox_handle`."""

    def __init__(self, meeting: Rendezvous, rank: int, device: torch.device, handle: str):
        """Raises TransferError if this process cannot map the sender's memory."""
        super().__init__(meeting, device)
        self._rank = rank
        self._at = ctypes.c_void_p()
        sent = _MemoryHandle.from_buffer_copy(bytes.fromhex(handle))
        try:
            with torch.cuda.device(device):
                result = _cuda().cudaIpcOpenMemHandle(ctypes.byref(self._at), sent, _LAZY_PEER_ACCESS)
        except OSError as error:
            raise TransferError(f"CUDA's library was not found: {error}") from error
        _expect(result, "map the sender's memory")
        self._slots = _slots(self._at.value or 0, device)

    def advance(self) -> bool:
        if not self._waiting or self._meeting.count(SENT) <= self._chunks:
            return False
        slot = self._slots[self._chunks % SLOTS]
        chunk = self._next()
        self._copy(chunk, slot[: chunk.numel()])
        self._meeting.set(f"{TAKEN}/{self._rank}", str(self._chunks))
        return True

    def through(self, number: int) -> bool:
        return self._over >= number

    def close(self) -> None:
        """See `Link`."""
        at, self._at = self._at, ctypes.c_void_p()
        self._slots = []
        if at.value is not None:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                _cuda().cudaIpcCloseMemHandle(at)


class _Pending:
    def __init__(self, queue: _Queue, number: int, deadline: Deadline):
        self._queue, self._number, self._deadline = queue, number, deadline

    def wait(self) -> None:
        self._queue.wait(self._number, self._deadline)
