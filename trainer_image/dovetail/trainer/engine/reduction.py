"""The sum of a model's gradient over the ranks that hold parts of it, computed beside other work.

Each rank begins as soon as it has its gradient. After that no rank's thread is needed. So a rank that continues with
other work of its schedule does not delay the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dovetail.trainer.communication.groups import PeerLost, others_of, peer_errors
from dovetail.trainer.communication.nccl_streams import own_stream
from dovetail.trainer.compat import copy_into
from dovetail.trainer.engine.engine_model import EngineModel
from dovetail.trainer.engine.optim import local

# A gradient of at least so many numbers is added up in place.
IN_PLACE = 2**20


@cache
def _beside(device: torch.device, model: str) -> Any:
    """The stream of a GPU on which gradients of a model are added up, beside compute. Each model has one, because ranks
    may come to the models in different orders. The stream is kept, because torch's allocator keeps the memory of each
    stream apart."""
    return own_stream(device)


class Reduction:
    """Reduces the gradient of one model after its last backward pass of a mini-batch on this rank. It is summed over
    parallel pipelines, over tp ranks that each have a part of it, and over both copies of a tied embedding. Then the
    squared norm over everything is computed. Every rank makes one. The order of models does not matter, because each
    model has groups of its own."""

    def __init__(self, held: EngineModel, device: torch.device) -> None:
        self._held, self._device = held, device
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._squared = torch.zeros(1, dtype=torch.float64, device=device)
        self._stages = self._start()
        if held.groups.staged:
            threading.Thread(target=self._in_turn, name=f"adds up {held.name}", daemon=True).start()
        elif device.type == "cuda":
            self._enqueue()
        else:
            self._advance(None)

    def norm(self, deadline: timedelta, awaiting: Callable[[str], None] = lambda _: None) -> float:
        """The global gradient norm, the same on every rank. Waits for the other ranks, and raises PeerLost after
        `deadline`. `awaiting` is called if a GPU waits."""
        end = time.monotonic() + deadline.total_seconds()
        while not self._ended.wait(timeout=min(1.0, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise PeerLost(
                    f"adding up the gradient of {self._held.name}: another trainer rank did not come within "
                    f"{deadline.total_seconds():.0f} s"
                )
        with peer_errors(f"adding up the gradient of {self._held.name}"):
            if self._error is not None:
                raise self._error
            if self._device.type == "cuda":
                if not self._held.groups.staged:
                    torch.cuda.current_stream(self._device).wait_stream(_beside(self._device, self._held.name))
                if others := others_of([self._held.groups.everyone]):
                    awaiting(f"{others} was lost while adding up the gradient of {self._held.name}")
        return float(self._squared.sqrt())

    def _advance(self, future: Any) -> None:
        """Start the next operation. The transport's thread calls it again when that is done."""
        try:
            if future is not None:
                future.value()
            for work in self._stages:
                future = work.get_future()
                if not future.done():
                    future.then(self._advance)
                    return
                # `then` would call this function at once, once more for each gradient.
                future.value()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def _enqueue(self) -> None:
        """Give all operations to NCCL. Those after the first one run on a stream beside the current one. The host waits
        for nothing."""
        try:
            work = next(self._stages, None)
            with torch.cuda.stream(_beside(self._device, self._held.name)):
                while work is not None:
                    # This orders the streams. Also, NCCL keeps its tensors until somebody waits for the work.
                    work.wait()
                    work = next(self._stages, None)
        except BaseException as error:
            self._error = error
        self._ended.set()

    def _in_turn(self) -> None:
        """Wait for one operation after another, in a thread of its own. Gloo's futures do not order the streams of a
        GPU, but its waits do."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for work in self._stages:
                work.wait()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def _start(self) -> Iterator[Any]:
        """The operations in order. Each is started when the one before is done."""
        groups, optimizer = self._held.groups, self._held.optimizer
        split = self._held.split
        trainable = self._held.trainable()
        if partial := [name for name in trainable if name in split.partial]:
            yield from self._sum(partial, groups.tp_mesh.get_group())
        skip: set[str] = set()
        for names, group in self._held.copies():
            yield from self._sum(names, group)
            # Copies hold the same gradients, so only one of them adds its norm.
            skip |= set(names) if dist.get_rank(group) else set()
        name = self._held.module.tied_copy
        if name is not None:
            parameter = dict(self._held.module.named_parameters())[name]
            embedding = self._held.module.embedding_name
            if parameter.requires_grad and parameter.grad is not None:
                if embedding in trainable and name != embedding:  # both copies are on this rank
                    both = local(trainable[embedding].grad).add_(local(parameter.grad))
                    local(parameter.grad).copy_(both)
                else:
                    yield dist.all_reduce(local(parameter.grad), group=groups.tied, async_op=True)
            if name != embedding:
                skip |= {name}  # the first stage includes it in its norm
        if groups.tp_rank:
            skip |= trainable.keys() - split.shared.keys()  # all tp ranks hold these; the first includes them
        if (squared := optimizer.squared_norm(skip)) is not None:
            self._squared.copy_(squared)
        if dist.get_world_size(groups.everyone) > 1:
            yield dist.all_reduce(self._squared, group=groups.everyone, async_op=True)

    def _sum(self, names: list[str], group: Any) -> Iterator[Any]:
        """Add up the gradients of parameters over the ranks of a group. Small ones are copied together into one
        message."""
        parameters = self._held.trainable()
        found = [local(grad) for name in names if (grad := parameters[name].grad) is not None]
        large = [gradient.numel() >= IN_PLACE and gradient.is_contiguous() for gradient in found]
        for gradient in (gradient for gradient, alone in zip(found, large, strict=True) if alone):
            yield dist.all_reduce(gradient, group=group, async_op=True)
        gradients = [gradient for gradient, alone in zip(found, large, strict=True) if not alone]
        if not found:
            yield dist.all_reduce(torch.zeros(0, device=self._device), group=group, async_op=True)
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            yield dist.all_reduce(flat, group=group, async_op=True)
            if flat.is_cuda:
                # The tensor may belong to another stream. That stream must not reuse its memory while it is read here.
                flat.record_stream(torch.cuda.current_stream(self._device))
            parts = flat.split([gradient.numel() for gradient in gradients])
            copy_into(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
