"""The wire of weight transfers, common to sender (trainer) and receiver (vLLM worker, scorer).

A *channel* is one sender's communicator: rank 0 broadcasts, the others receive; Gloo over TCP for CPU tensors, NCCL
for CUDA tensors. A bucket travels as one message: its packed tensors, then 16 bytes of checksum."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dovetail.models.compat import gloo_group, nccl_group
from dovetail.protocol.messages import Bucket
from dovetail.protocol.weights.buckets import CHECKSUM_BYTES, TensorSpec, aligned, bucket_specs
from dovetail.protocol.weights.layout import Box

Backend = Literal["gloo", "nccl"]
Named = tuple[str, torch.Tensor]


class Part(NamedTuple):
    """What one rank holds of a tensor of `shape`: `tensor` is the elements in `box`. `tp_dim`: the dimension that
    tensor-parallel ranks share, None: each holds all of it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    tp_dim: int | None = None


class TransferError(RuntimeError):
    """A weight transfer that did not complete; the message is one sentence for the user."""


class Deadline:
    """Seconds left of a budget that starts now. `clock` is injected for tests."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds
        self.seconds = seconds

    def left(self) -> timedelta:
        """Raises TransferError when nothing is left."""
        left = self._end - self._clock()
        if left <= 0:
            raise TransferError(f"the weight transfer passed its deadline of {self.seconds:g} s")
        return timedelta(seconds=max(left, 0.05))


class Handle(Protocol):
    def wait(self) -> None:
        """Raises TransferError if the message did not get through in time."""


class Channel:
    """One communicator: rank 0 sends, ranks 1 to world - 1 receive. Broken for good after its first error."""

    def __init__(
        self,
        backend: Backend,
        store: dist.Store,
        rank: int,
        world: int,
        host: str,
        deadline: Deadline,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        """Meets the other ranks in `store`; raises TransferError naming the ranks that did not come.

        `cancelled` is asked while waiting: once true, this and all waiting ranks give up."""
        self.rank, self.world = rank, world
        self._store = store
        self._version = 0
        self._meet(deadline, cancelled)
        try:
            if backend == "gloo":
                self._group: Any = gloo_group(store, rank, world, _local_address(host), deadline.left())
            else:
                self._group = nccl_group(store, rank, world, deadline.left())
        except RuntimeError as error:
            raise TransferError(f"the ranks met but could not connect: {_first_line(error)}") from error

    def _meet(self, deadline: Deadline, cancelled: Callable[[], bool]) -> None:
        with _rendezvous():
            self._store.set(f"joined/{self.rank}", "1")
            pause = 0.001
            while not self._store.check([f"joined/{rank}" for rank in range(self.world)]):
                if cancelled():
                    self._store.set("abort", "1")
                if self._store.check(["abort"]):
                    raise TransferError("the transfer was called off while its ranks were still meeting")
                try:
                    deadline.left()
                except TransferError as error:
                    absent = ", ".join(map(str, absent_ranks(self._store, self.world)))
                    raise TransferError(
                        f"the communicator did not form within {deadline.seconds:g} s: ranks {absent} did not come"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 0.02)

    def ready(self) -> None:
        """A receiver is about to take the next version's messages. Raises TransferError."""
        self._version += 1
        with _rendezvous():
            self._store.set(f"ready/{self._version}/{self.rank}", "1")

    def wait_ready(self, deadline: Deadline, cancelled: Callable[[], bool] = lambda: False) -> None:
        """The sender, before the next version's first message: returns when all receivers are `ready`.

        A message cannot be called off, and one that nobody takes holds its sender until the deadline. So it is not
        begun before everybody is there. Raises TransferError naming the ranks that did not come, or once
        `cancelled()`."""
        self._version += 1
        pause = 0.0005
        with _rendezvous():
            while not self._store.check([f"ready/{self._version}/{rank}" for rank in range(1, self.world)]):
                if cancelled():
                    raise TransferError("the transfer was called off before its receivers were ready")
                try:
                    deadline.left()
                except TransferError as error:
                    raise TransferError(
                        f"ranks {', '.join(map(str, self.late()))} were not ready within {deadline.seconds:g} s"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 0.01)

    def late(self) -> list[int]:
        """Receivers that are not ready for the version that the sender waits with; none if the store is gone."""
        try:
            return [r for r in range(1, self.world) if not self._store.check([f"ready/{self._version}/{r}"])]
        except RuntimeError:
            return []

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """Start sending (rank 0) or receiving `buffer`, a contiguous uint8 tensor. Messages arrive in order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = deadline.left()
        try:
            return _Pending(self._group.broadcast([buffer], options), deadline)
        except RuntimeError as error:
            raise TransferError(f"the connection broke: {_first_line(error)}") from error

    def close(self) -> None:
        """Tear down without waiting for peers; safe to call twice and after errors."""
        group, self._group = getattr(self, "_group", None), None
        if group is not None:
            # A peer's blocked read must end too: NCCL needs the abort, Gloo closes its sockets on release.
            with contextlib.suppress(Exception):
                group.abort()
        self._store = None  # type: ignore[assignment]


@contextlib.contextmanager
def _rendezvous() -> Iterator[None]:
    """What the store raises is a TransferError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"the rendezvous broke: {_first_line(error)}") from error


def absent_ranks(store: dist.Store, world: int) -> list[int]:
    """Ranks that have not come to the rendezvous; none if the store is gone."""
    try:
        return [rank for rank in range(world) if not store.check([f"joined/{rank}"])]
    except RuntimeError:
        return []


class _Pending:
    def __init__(self, work: Any, deadline: Deadline):
        self._work = work
        self._deadline = deadline

    def wait(self) -> None:
        try:
            self._work.wait(self._deadline.left())
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the connection broke or stalled: {_first_line(error)}") from error


def listen(host: str, deadline: Deadline) -> tuple[dist.TCPStore, int]:
    """A rendezvous on a free port of `host`; returns the store and its port."""
    store = store_at(host, 0, None, deadline.left(), wait_for_workers=False)
    return store, int(store.port)


def store_at(
    host: str, port: int, world: int | None, timeout: timedelta, wait_for_workers: bool = True
) -> dist.TCPStore:
    """A rendezvous that listens at `host` alone: torch's own listens on all interfaces, and asks nobody for a token.
    `port` 0: a free one. Raises OSError or RuntimeError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
        bound = int(listening.getsockname()[1])
        return dist.TCPStore(
            host,
            bound,
            world,
            True,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            master_listen_fd=listening.detach(),
        )


def call(host: str, port: int, deadline: Deadline) -> dist.TCPStore:
    """Connect to a sender's rendezvous. Raises TransferError if nobody listens there in time."""
    try:
        return dist.TCPStore(host, port, None, False, timeout=deadline.left(), wait_for_workers=False)
    except RuntimeError as error:
        raise TransferError(f"no sender answers at {host}:{port}: {_first_line(error)}") from error


def _local_address(peer: str) -> str:
    """The address of this machine from which `peer` is reached: what other ranks can connect to."""
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return peer


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


# ---------------------------------------------------------------- buckets in memory


def message_bytes(bucket: Bucket) -> int:
    """Length of a bucket on the wire, bytes."""
    return bucket.nbytes + CHECKSUM_BYTES


def pack_into(buffer: torch.Tensor, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
    """Copy `tensors` (in the bucket's order; any device) to their places in `buffer` (uint8) and append its
    checksum."""
    for spec, offset, tensor in zip(bucket_specs(bucket), bucket.offsets, tensors, strict=True):
        end = offset + spec.nbytes
        if spec.nbytes:
            buffer[offset:end].view(tensor.dtype).view(spec.extent).copy_(tensor)
        buffer[end : offset + aligned(spec.nbytes)].zero_()
    buffer[bucket.nbytes : message_bytes(bucket)].view(torch.int64).copy_(checksum(buffer[: bucket.nbytes]))


def unpack(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each entry in `buffer`, as views of it."""
    for spec, offset in zip(bucket_specs(bucket), bucket.offsets, strict=True):
        yield spec.name, _view(buffer, offset, spec)


def assemble(buffer: torch.Tensor, messages: Sequence[tuple[torch.Tensor, Bucket]]) -> Iterator[Named]:
    """(name, whole tensor) of each tensor whose parts are in `messages` (those of one bucket from all of its senders,
    part 0's first), as views of `buffer`, which must have `assembled_bytes` of them."""
    wholes: dict[str, torch.Tensor] = {}
    end = 0
    for spec in _wholes(messages[0][1]):
        wholes[spec.name] = _view(buffer, end, spec)
        end += aligned(spec.nbytes)
    for message, bucket in messages:
        for spec, offset in zip(bucket_specs(bucket), bucket.offsets, strict=True):
            if spec.nbytes and spec.box is not None:
                place = tuple(slice(*interval) for interval in spec.box)
                wholes[spec.name][place].copy_(_view(message, offset, spec))
    yield from wholes.items()


def assembled_bytes(first: Bucket) -> int:
    """Room for the whole tensors of a bucket, given part 0 of it."""
    return sum(aligned(spec.nbytes) for spec in _wholes(first))


def _wholes(bucket: Bucket) -> list[TensorSpec]:
    # Several parts of one tensor are several entries.
    return list(dict.fromkeys(replace(spec, box=None) for spec in bucket_specs(bucket)))


def _view(buffer: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.extent, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + spec.nbytes].view(dtype).view(spec.extent)


def intact(buffer: torch.Tensor, bucket: Bucket) -> bool:
    """Whether the checksum that came with the bucket is that of its bytes."""
    sent = buffer[bucket.nbytes : message_bytes(bucket)].view(torch.int64)
    return bool(torch.equal(sent, checksum(buffer[: bucket.nbytes])))


_ROW = 2048


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Two int64 (2,) of a uint8 tensor whose length is a multiple of 16: the sum of its 64-bit words, and the sum of
    the sums of rows of 2,048 words, row r times (2r + 3), modulo 2**64. Memory-bandwidth speed, on the tensor's device.
    It tells a changed, missing or displaced row from a good one; it is no defence against a forger."""
    words = data.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    sums = words[:whole].view(-1, _ROW).sum(1)
    if whole < words.numel():
        sums = torch.cat([sums, words[whole:].sum()[None]])
    weights = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64) * 2 + 3
    return torch.stack([sums.sum(), (sums * weights).sum()])
