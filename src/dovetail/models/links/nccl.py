"""Sends messages over NCCL, from GPU to GPU.

When a peer is lost, the watchdog of torch's own NCCL groups ends the process, or a call never returns. Here the
communicator does not block. It is polled until a deadline and then aborted. So a failure raises an exception. vLLM and
SGLang also call NCCL through ctypes, because torch offers nothing public for this."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from dovetail.models.links.deadline import LONGEST_PAUSE, Deadline, Handle, TransferError, first_line
from dovetail.models.links.rendezvous import Rendezvous

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNSET = -(2**31)
_ID, _STARTED = "nccl/id", "nccl/started"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Its `version` says so, and a later NCCL adds the other fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


@lru_cache(maxsize=1)
def _nccl() -> ctypes.CDLL:
    """The library of NCCL. Raises OSError if it is not found."""
    nccl = library("libnccl.so.2", "ncclCommInitRankConfig")
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetLastError.argtypes = [ctypes.c_void_p]
    nccl.ncclCommAbort.argtypes = [ctypes.c_void_p]
    nccl.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    nccl.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ]
    nccl.ncclBroadcast.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return nccl


def nccl_version() -> int | None:
    """The version of this process's NCCL, such as 22907. None if there is none."""
    version = ctypes.c_int()
    try:
        failed = _nccl().ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def board_of(device: torch.device) -> str:
    """The machine and the PCI address, by which NCCL identifies a GPU. It refuses a second rank there. All MIG slices
    of a GPU have the same address, but UUIDs of their own."""
    properties = torch.cuda.get_device_properties(device)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in address:
        return str(properties.uuid)
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}/{address}"


class NcclLink:
    """The first of `ranks` sends, and the others receive. Each is on another GPU, and all have the same version of
    NCCL."""

    def __init__(self, meeting: Rendezvous, rank: int, ranks: list[int], device: torch.device, deadline: Deadline):
        """Returns when all ranks have come. Raises TransferError, which names the ranks that did not come."""
        self._meeting, self._rank, self._ranks = meeting, rank, ranks
        self._messages = 0
        self._device = device
        self._comm = ctypes.c_void_p()
        self._stream: Any = torch.cuda.Stream(device)
        identity = _UniqueId()
        if rank == ranks[0]:
            self._expect(_nccl().ncclGetUniqueId(ctypes.byref(identity)), "make a communicator")
            meeting.set(_ID, bytes(identity))
        else:
            late = f"the sender made no NCCL communicator within {deadline.seconds:g} s"
            meeting.wait([_ID], deadline, lambda: late, "while its ranks were connecting")
            identity = _UniqueId.from_buffer_copy(meeting.get(_ID))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21700, 0, _UNSET, _UNSET, _UNSET, None, _UNSET)
        try:
            meeting.set(f"{_STARTED}/{rank}", "0")
            with torch.cuda.device(device):
                started = _nccl().ncclCommInitRankConfig(
                    ctypes.byref(self._comm), len(ranks), identity, ranks.index(rank), ctypes.byref(config)
                )
            self._settle(started, deadline, "connect its ranks")
        except BaseException:
            self.close()
            raise

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """See `Link`."""
        self._messages += 1
        self._meeting.set(f"{_STARTED}/{self._rank}", str(self._messages))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        at, size = buffer.data_ptr(), buffer.numel()
        started = _nccl().ncclBroadcast(at, at, size, _UINT8, 0, self._comm, self._stream.cuda_stream)
        self._settle(started, deadline, "start a message")
        event = torch.cuda.Event()
        event.record(self._stream)
        return _Pending(self, event, deadline)

    def wait(self, event: Any, deadline: Deadline) -> None:
        """Wait until the message before `event` has been sent or received. Raises TransferError."""

        def done() -> bool:
            self._error("carry a message")
            return bool(event.query())

        try:
            self._poll(done, deadline)
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the GPU failed in a weight transfer: {first_line(error)}") from error
        torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        """See `Link`. It aborts the calls that run on this GPU, and does not tell the peers."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value is not None:
            with suppress(OSError):
                _nccl().ncclCommAbort(comm)

    def _settle(self, result: int, deadline: Deadline, what: str) -> None:
        """Wait until the communicator has finished the last call, whose result is `result`."""
        self._expect(result, what)
        self._poll(lambda: self._error(what) == _SUCCESS, deadline)

    def _poll(self, done: Callable[[], bool], deadline: Deadline) -> None:
        pause = 0.00005
        while not done():
            try:
                self._meeting.look("before all ranks had all of it")
            except TransferError:
                # A sender may close its end as soon as its last message has left.
                if done():
                    return
                raise
            deadline.left(self._late)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _late(self) -> list[int]:
        """The ranks that have started the fewest messages. It is empty if this rank has started no more than they."""
        started = {rank: self._meeting.count(f"{_STARTED}/{rank}", -1) for rank in self._ranks}
        least = min(started.values())
        return [rank for rank, messages in started.items() if messages == least < self._messages]

    def _error(self, what: str) -> int:
        state = ctypes.c_int()
        self._expect(_nccl().ncclCommGetAsyncError(self._comm, ctypes.byref(state)), what)
        self._expect(state.value, what)
        return state.value

    def _expect(self, result: int, what: str) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            self._fail(result, what)

    def _fail(self, result: int, what: str) -> NoReturn:
        reason = _nccl().ncclGetErrorString(result).decode(errors="replace")
        last = _nccl().ncclGetLastError(None)
        detail = f" ({first_line(RuntimeError(last.decode(errors='replace')))})" if last else ""
        raise TransferError(f"NCCL could not {what}: {reason}{detail}")


class _Pending:
    def __init__(self, link: NcclLink, event: Any, deadline: Deadline):
        self._link, self._event, self._deadline = link, event, deadline

    def wait(self) -> None:
        self._link.wait(self._event, self._deadline)


def library(soname: str, function: str) -> ctypes.CDLL:
    """The library that this process already uses for `function`, or else the one called `soname`. Raises OSError if it
    is not found."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, function) else ctypes.CDLL(soname)
