"""Carries weights from a sender (trainer) to its receivers (vLLM workers and scorers). Both sides use this module.

Each sender has a *channel*: rank 0 broadcasts, and the other ranks receive. CPU tensors travel by Gloo over TCP. CUDA
tensors reach each receiver by CUDA IPC, NCCL or Gloo (`dovetail.models.links.rendezvous`). A bucket is one message:
its packed tensors, and then a checksum of 16 bytes."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from dovetail.models.links import rendezvous
from dovetail.models.links.cuda_ipc import IpcReceiver, IpcSender, mailbox_handle
from dovetail.models.links.deadline import Deadline, Handle, Link, TransferError, first_line, in_time
from dovetail.models.links.gloo import GlooLink
from dovetail.models.links.nccl import NcclLink, board_of, nccl_version
from dovetail.models.links.rendezvous import Place, Rendezvous, SignedStore, Way, routes
from dovetail.protocol.messages import Bucket
from dovetail.protocol.weights.buckets import CHECKSUM_BYTES, TensorSpec, aligned, bucket_specs
from dovetail.protocol.weights.layout import Box

Backend = Literal["gloo", "nccl"]
# Bytes per second that a receiver gets at least from all senders together. This is less than a slow network carries.
SLOWEST: dict[Backend, float] = {"gloo": 50e6, "nccl": 500e6}
Named = tuple[str, torch.Tensor]
_CONNECTING = "while its ranks were connecting"


class Part(NamedTuple):
    """The part of a tensor that one rank holds. `shape`: the shape of the whole tensor. `box`: the place of the part in
    it. `tensor`: the elements of the part. `tp_dim`: the dimension that tensor-parallel ranks share, or None if each
    rank holds the whole tensor. `experts`: whether it is of experts that are divided over ranks."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    tp_dim: int | None = None
    experts: bool = False


class Channel:
    """One sender's connection to its receivers. Rank 0 sends, and ranks 1 to world - 1 receive. After its first error
    it can no longer be used."""

    def __init__(
        self,
        backend: Backend,
        meeting: Rendezvous,
        host: str,
        deadline: Deadline,
        device: torch.device | None = None,
    ):
        """Meets the other ranks. Raises TransferError, which names the ranks that did not come. `device`: the device of
        the messages. The backend nccl needs it."""
        self.rank, self.world = meeting.rank, meeting.world
        self._meeting: Rendezvous | None = meeting
        self._version = 0
        self._links: list[Link] = []
        self._gpu = backend == "nccl"
        try:
            place = _place(device) if self._gpu else Place()
            self._meet(meeting, place, deadline)
            if not self._gpu:
                self._links.append(GlooLink(meeting.store, self.rank, self.world, host, deadline))
            elif device is not None:
                self._connect(meeting, host, device, deadline)
        except BaseException:
            self.close()
            raise

    def _meet(self, meeting: Rendezvous, place: Place, deadline: Deadline) -> None:
        tell_place(meeting, self.rank, place)

        def late() -> str:
            absent = ", ".join(str(rank) for rank in range(self.world) if not meeting.has([f"joined/{rank}"]))
            return f"the communicator did not form within {deadline.seconds:g} s: ranks {absent} did not come"

        everyone = [f"joined/{rank}" for rank in range(self.world)]
        meeting.wait(everyone, deadline, late, "while its ranks were still meeting")

    def _connect(self, meeting: Rendezvous, host: str, device: torch.device, deadline: Deadline) -> None:
        """Make this rank's link of each kind that is used."""
        mapped = None
        if self.rank == 0:
            ways = self._choose(meeting, device, deadline)
        else:
            mapped = self._map(meeting, device, deadline)
            ways = _read_ways(meeting, deadline)
        members = {way: [0, *(rank for rank in ways if ways[rank] == way)] for way in set(ways.values())}
        mine = {way: ranks for way, ranks in members.items() if self.rank in ranks}
        # NCCL's link comes first, so that its messages start before those that need the sender's host.
        if "nccl" in mine:
            self._links.append(NcclLink(meeting, self.rank, mine["nccl"], device, deadline))
        if "ipc" in mine:
            self._links.append(mapped or IpcSender(meeting, mine["ipc"][1:], device))
        elif mapped is not None:
            mapped.close()
        if "gloo" in mine:
            ranks, store = mine["gloo"], meeting.store.within("gloo")
            self._links.append(GlooLink(store, ranks.index(self.rank), len(ranks), host, deadline))

    def _choose(self, meeting: Rendezvous, device: torch.device, deadline: Deadline) -> dict[int, Way]:
        """Chooses the kind of link to each receiver, by rank. The sender does this. A receiver that cannot map the
        sender's memory, because it is in another container for example, gets its weights by Gloo."""
        places = [read_place(meeting, rank) for rank in range(self.world)]
        ways = routes(places)
        near = [rank for rank, way in ways.items() if way == "ipc"]
        handle = ""
        if near:
            with suppress(TransferError, OSError):
                handle = mailbox_handle(device)
        meeting.set(_NEAR, json.dumps([near, handle]))

        def absent() -> list[int]:
            return [rank for rank in near if not meeting.has([f"mapped/{rank}"])]

        answers = [f"mapped/{rank}" for rank in near]
        meeting.wait(answers, deadline, lambda: _late("map the sender's memory", deadline), _CONNECTING, absent)
        for rank in near:
            if meeting.get(f"mapped/{rank}") != b"yes":
                ways[rank] = "gloo"
        meeting.set(_WAYS, json.dumps(ways))
        return ways

    def _map(self, meeting: Rendezvous, device: torch.device, deadline: Deadline) -> IpcReceiver | None:
        """Maps the sender's memory if this receiver is on the same GPU. Returns None if it is not, or if mapping
        fails."""
        meeting.wait([_NEAR], deadline, lambda: _late("choose its links", deadline), _CONNECTING)
        near, handle = json.loads(meeting.get(_NEAR))
        if self.rank not in near:
            return None
        mapped = None
        if handle:
            with suppress(TransferError):
                mapped = IpcReceiver(meeting, self.rank, device, handle)
        meeting.set(f"mapped/{self.rank}", "no" if mapped is None else "yes")
        return mapped

    @property
    def ways(self) -> list[str]:
        """The kinds of links by which this rank sends or receives, for logs."""
        return [type(link).__name__ for link in self._links]

    def ready(self) -> None:
        """Say that this receiver is about to take the next version's messages. Raises TransferError."""
        self._version += 1
        self._met.set(f"ready/{self._version}/{self.rank}", "1")

    def wait_ready(self, deadline: Deadline) -> None:
        """Wait until all receivers are `ready`. The sender calls it before the first message of a version.

        A message over Gloo cannot be cancelled, and a message that nobody takes holds its sender until the deadline. So
        no message begins before all receivers are there. Raises TransferError, which names the ranks that did not come,
        and also once the transfer is cancelled."""
        self._version += 1

        def late() -> str:
            return f"ranks {', '.join(map(str, self.late()))} were not ready within {deadline.seconds:g} s"

        everyone = [f"ready/{self._version}/{rank}" for rank in range(1, self.world)]
        self._met.wait(everyone, deadline, late, "before its receivers were ready")

    def late(self) -> list[int]:
        """The receivers that are not ready for the sender's next version. It is empty if the store is gone."""
        try:
            return [r for r in range(1, self.world) if not self._met.has([f"ready/{self._version}/{r}"])]
        except TransferError:
            return []

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """Start sending (rank 0) or receiving `buffer`, a contiguous uint8 tensor. Messages arrive in order."""
        return _All([link.broadcast(buffer, deadline) for link in self._links])

    def close(self) -> None:
        """Close the channel without waiting for peers. It may be called twice, and after errors. Peers that still wait
        for a GPU give up."""
        links, self._links = self._links, []
        meeting, self._meeting = self._meeting, None
        if meeting is not None and self._gpu:
            meeting.call_off()
        for link in links:
            link.close()

    @property
    def _met(self) -> Rendezvous:
        if self._meeting is None:
            raise TransferError("the channel was closed")
        return self._meeting


_NEAR, _WAYS = "near", "ways"


def _late(what: str, deadline: Deadline) -> str:
    return f"a rank of the transfer did not {what} within {deadline.seconds:g} s"


def _read_ways(meeting: Rendezvous, deadline: Deadline) -> dict[int, Way]:
    meeting.wait([_WAYS], deadline, lambda: _late("choose its links", deadline), _CONNECTING)
    return {int(rank): way for rank, way in json.loads(meeting.get(_WAYS)).items()}


def _place(device: torch.device | None) -> Place:
    if device is None or device.type != "cuda":
        return Place()
    return Place(str(torch.cuda.get_device_properties(device).uuid), nccl_version(), board_of(device))


def tell_place(meeting: Rendezvous, rank: int, place: Place) -> None:
    """Say that this rank has come, and where it is. Earlier releases read exactly two values."""
    if place.board is not None:
        meeting.set(f"board/{rank}", place.board)
    meeting.set(f"joined/{rank}", json.dumps([place.gpu, place.nccl]))


def read_place(meeting: Rendezvous, rank: int) -> Place:
    """The place of a rank that has come."""
    gpu, nccl = json.loads(meeting.get(f"joined/{rank}"))
    key = f"board/{rank}"
    return Place(gpu, nccl, meeting.get(key).decode() if meeting.has([key]) else None)


def absent_ranks(store: dist.Store, world: int) -> list[int]:
    """The ranks that have not come to the rendezvous. It is empty if the store is gone."""
    try:
        return [rank for rank in range(world) if not store.check([f"joined/{rank}"])]
    except RuntimeError:
        return []


class _All:
    def __init__(self, handles: list[Handle]):
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def listen(host: str, deadline: Deadline) -> tuple[SignedStore, int]:
    """Opens a rendezvous on a free port of `host`. Returns the store, which has a new secret, and its port."""
    store = store_at(host, 0, None, deadline.left(), wait_for_workers=False)
    return SignedStore(store, secrets.token_hex(16)), int(store.port)


def store_at(
    host: str, port: int, world: int | None, timeout: timedelta, wait_for_workers: bool = True
) -> dist.TCPStore:
    """A rendezvous that listens only at `host`. torch's own would listen on all interfaces, and it asks nobody for a
    token. With `port` 0 it takes a free port. Raises OSError or RuntimeError."""
    return store_on(listening_at(host, port), world, timeout, wait_for_workers)


def listening_at(host: str, port: int = 0) -> socket.socket:
    """A socket that listens only at `host`. A process that tells others its port keeps the socket open until a store
    serves it (`store_on`). So no other process can take the port meanwhile. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


def store_on(
    listening: socket.socket, world: int | None, timeout: timedelta, wait_for_workers: bool = True
) -> dist.TCPStore:
    """A rendezvous that serves the socket `listening`. The socket belongs to the store then. Raises RuntimeError."""
    host, port = listening.getsockname()[:2]
    return dist.TCPStore(
        host, port, world, True, timeout=timeout, wait_for_workers=wait_for_workers, master_listen_fd=listening.detach()
    )


def call(host: str, port: int, secret: str, deadline: Deadline) -> SignedStore:
    """Connect to a sender's rendezvous with the secret of its offer. Raises TransferError if it does not answer within
    ANSWER_SECONDS. A sender listens before it makes its offer."""
    left = deadline.left()
    patience = min(left, timedelta(seconds=rendezvous.ANSWER_SECONDS))
    nobody = f"no sender answers at {host}:{port}"

    def connect() -> SignedStore:
        store = dist.TCPStore(host, port, None, False, timeout=patience, wait_for_workers=False)
        store.set_timeout(left)
        return SignedStore(store, secret)

    try:
        return in_time(connect, patience.total_seconds() + 1.0, nobody)
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"{nobody}: {first_line(error)}") from error


# ---------------------------------------------------------------- buckets in memory


def message_bytes(bucket: Bucket) -> int:
    """The length of a bucket's message, in bytes."""
    return bucket.nbytes + CHECKSUM_BYTES


def pack_into(buffer: torch.Tensor, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
    """Copy `tensors` to their places in `buffer` (uint8), and append the checksum. The tensors are in the bucket's
    order and on any device. They are cast to the dtypes that the bucket names."""
    for spec, offset, tensor in zip(bucket_specs(bucket), bucket.offsets, tensors, strict=True):
        end = offset + spec.nbytes
        if spec.nbytes:
            _view(buffer, offset, spec).copy_(tensor)
        buffer[end : offset + aligned(spec.nbytes)].zero_()
    buffer[bucket.nbytes : message_bytes(bucket)].view(torch.int64).copy_(checksum(buffer[: bucket.nbytes]))


def unpack(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) of each entry of `buffer`. The tensors are views of it."""
    for spec, offset in zip(bucket_specs(bucket), bucket.offsets, strict=True):
        yield spec.name, _view(buffer, offset, spec)


def assemble(buffer: torch.Tensor, messages: Sequence[tuple[torch.Tensor, Bucket]]) -> Iterator[Named]:
    """The (name, whole tensor) of each tensor of a bucket, from its parts. The tensors are views of `buffer`.

    `messages`: the messages and buckets of all senders of one bucket, part 0 first. `buffer` (uint8): it must have
    `assembled_bytes` bytes."""
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
    """The bytes that the whole tensors of a bucket need. `first`: part 0 of the bucket."""
    return sum(aligned(spec.nbytes) for spec in _wholes(first))


def _wholes(bucket: Bucket) -> list[TensorSpec]:
    # One tensor may have several parts, which are several entries.
    return list(dict.fromkeys(replace(spec, box=None) for spec in bucket_specs(bucket)))


def _view(buffer: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.extent, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + spec.nbytes].view(dtype).view(spec.extent)


def intact(buffer: torch.Tensor, bucket: Bucket) -> bool:
    """Whether the checksum in the message is that of its bytes."""
    sent = buffer[bucket.nbytes : message_bytes(bucket)].view(torch.int64)
    return not bool(torch.ne(sent, checksum(buffer[: bucket.nbytes])).any())


_ROW = 2048


def checksum(data: torch.Tensor) -> torch.Tensor:
    """The checksum of a uint8 tensor whose length is a multiple of 16, as (2,) int64. The first number is the sum of
    its 64-bit words. The second is the sum over rows of 2,048 words, where the sum of row r counts (2r + 3) times. Both
    are modulo 2**64.

    It runs on the tensor's device, as fast as memory is read. It finds a changed, missing or displaced row. It does not
    protect against forgery."""
    words = data.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    sums = words[:whole].view(-1, _ROW).sum(1)
    if whole < words.numel():
        sums = torch.cat([sums, words[whole:].sum()[None]])
    weights = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64) * 2 + 3
    return torch.stack([sums.sum(), (sums * weights).sum()])
