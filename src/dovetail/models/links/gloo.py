"""Sends messages over Gloo, from host memory to host memory."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from dovetail.models.compat import gloo_group
from dovetail.models.links.deadline import Deadline, Handle, TransferError, first_line, in_time
from dovetail.models.links.rendezvous import SignedStore, find_stranger


class GlooLink:
    """Rank 0 sends, and ranks 1 to `world` - 1 receive. Tensors on a GPU travel through host memory."""

    def __init__(self, store: SignedStore, rank: int, world: int, host: str, deadline: Deadline):
        """`host`: the address of the sender. Every two ranks prove to each other that they know the store's secret,
        because Gloo takes whoever connects first. Raises TransferError."""
        self._rank = rank
        try:
            # The call asks the store, which may be frozen.
            late = f"the ranks met but did not connect within {deadline.seconds:g} s"
            left = deadline.left()
            self._group: Any = in_time(
                lambda: gloo_group(store, rank, world, local_address(host), left), left.total_seconds() + 1.0, late
            )
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the ranks met but could not connect: {first_line(error)}") from error
        try:
            self._prove(store, rank, [other for other in range(world) if other != rank], deadline)
        except BaseException:
            self.close()
            raise

    def _prove(self, store: SignedStore, rank: int, others: list[int], deadline: Deadline) -> None:
        def send(proof: torch.Tensor, other: int) -> Callable[[], object]:
            work = self._group.send([proof], other, 0)
            return lambda: work.wait(deadline.left())

        def receive(proof: torch.Tensor, other: int) -> None:
            self._group.recv([proof], other, 0).wait(deadline.left())

        try:
            stranger = find_stranger(rank, others, lambda a, b: store.proof(f"gloo {a} to {b}"), send, receive)
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the ranks met but could not connect: {first_line(error)}") from error
        if stranger is not None:
            raise TransferError(f"what connected as rank {stranger} does not belong to the transfer")

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """See `Link`."""
        host = buffer
        if buffer.is_cuda:
            host = buffer.cpu() if self._rank == 0 else torch.empty(buffer.numel(), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = deadline.left()
        try:
            work = self._group.broadcast([host], options)
        except RuntimeError as error:
            raise TransferError(f"the connection broke: {first_line(error)}") from error
        return _Pending(work, deadline, host, buffer if self._rank else host)

    def close(self) -> None:
        """See `Link`. A peer's blocked read ends too."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.abort()


class _Pending:
    def __init__(self, work: Any, deadline: Deadline, host: torch.Tensor, target: torch.Tensor):
        self._work, self._deadline = work, deadline
        self._host, self._target = host, target

    def wait(self) -> None:
        try:
            self._work.wait(self._deadline.left())
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the connection broke or stalled: {first_line(error)}") from error
        if self._target is not self._host:
            self._target.copy_(self._host)


def local_address(peer: str) -> str:
    """The address of this machine from which it reaches `peer`. Other ranks can connect to it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return peer
