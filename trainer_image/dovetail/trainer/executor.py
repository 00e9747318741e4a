"""Run a rank's list of forward and backward actions of several pipelined models.

One host thread; one two-rank group per (model, direction) edge; receives are posted ahead of their action and sends
are never waited for before the end, so compute only ever waits for the tensor it needs. Micro-batches have exact
shapes, known to both ends from the batch, so no shape travels."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.api.messages import Action
from dovetail.models import Stage
from dovetail.trainer.groups import ModelGroups, PeerLost, peer_errors, transport_sentence

Loss = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
Record = Callable[[str, float, float], None]


@dataclass
class MicroBatch:
    """Sequences of one forward pass.

    `tokens` (B, T) int64, right-padded; `lengths` (B,) int64. `loss` maps the last stage's output (logits (B, T, V),
    or values (B, T)) to a scalar, scaled so that the sum over all micro-batches and all dp ranks is the mini-batch's
    loss, and to detached scalars that are summed the same way."""

    tokens: Tensor
    lengths: Tensor
    loss: Loss | None = None


@dataclass
class Pipe:
    """One model on this rank during one run."""

    stage: Stage
    groups: ModelGroups
    batches: Sequence[MicroBatch]
    device: torch.device
    dtype: torch.dtype  # of activations between stages
    read: Callable[[Tensor, MicroBatch], Tensor] | None = None  # forward only
    before_forward: Callable[[int], None] | None = None  # called with the micro-batch's index
    before_last_backward: Callable[[], None] | None = None
    stats: list[dict[str, Tensor]] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)

    def buffer(self, micro_batch: int) -> Tensor:
        """An empty tensor of the shape that crosses a stage boundary: (B, T, H)."""
        batch, time_ = self.batches[micro_batch].tokens.shape
        return torch.empty(batch, time_, self.stage.hidden_size, dtype=self.dtype, device=self.device)


def check_actions(actions: Sequence[Action], micro_batches: dict[str, int], training: bool) -> None:
    """Raise `ValueError` unless every micro-batch of every model goes forward once and (when training) backward once,
    later, each kind in ascending order.

    Ascending order makes both ends of a channel agree on the order of its messages, and gradients are then added in
    micro-batch order, so they are the same bits whatever the interleaving of the models."""
    done: dict[tuple[str, str], int] = {}
    for action in actions:
        if action.model not in micro_batches:
            raise ValueError(f"the schedule runs model {action.model!r}, which has no work")
        count = done.get((action.model, action.kind), 0)
        if action.micro_batch != count:
            raise ValueError(
                f"the schedule runs {action.kind} of {action.model} micro-batch {action.micro_batch} where "
                f"{count} is next; each kind must run in ascending order"
            )
        if action.kind == "B" and count >= done.get((action.model, "F"), 0):
            raise ValueError(f"the schedule runs B of {action.model} micro-batch {count} before its F")
        done[action.model, action.kind] = count + 1
    for model, count in micro_batches.items():
        for kind in ("F", "B") if training else ("F",):
            if done.get((model, kind), 0) != count:
                raise ValueError(
                    f"the schedule runs {done.get((model, kind), 0)} {kind} of {model}, there are {count} micro-batches"
                )


def agree_on_work(pipes: dict[str, Pipe]) -> None:
    """Raise `RuntimeError` on every stage of a pipeline if the stages hold micro-batches of unlike shapes: their
    sends and receives would not match."""
    for name in sorted(pipes):
        pipe = pipes[name]
        if pipe.groups.pp_size == 1:
            continue
        shapes = repr([tuple(batch.tokens.shape) for batch in pipe.batches])
        digest = int.from_bytes(hashlib.sha256(shapes.encode()).digest()[:8], "big") >> 1
        mine = torch.tensor([digest], device=pipe.device)
        others = [torch.empty_like(mine) for _ in range(pipe.groups.pp_size)]
        with peer_errors(f"comparing the schedule of {name} along its pipeline"):
            dist.all_gather(others, mine, group=pipe.groups.pp_group)
        odd = [rank for rank, other in zip(pipe.groups.pp_ranks, others, strict=True) if int(other) != int(others[0])]
        if odd:
            raise RuntimeError(
                f"trainer ranks {odd} hold other micro-batches of {name} than their pipeline's first stage"
            )


class Executor:
    """Runs one action list. `window` is how many actions ahead receives are posted; `deadline` bounds every wait."""

    def __init__(
        self,
        pipes: dict[str, Pipe],
        deadline: timedelta,
        record: Record | None = None,
        window: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.pipes, self.deadline, self.record, self.window, self.clock = pipes, deadline, record, window, clock
        self.nccl = any(pipe.device.type == "cuda" for pipe in pipes.values())
        self._received: dict[tuple[str, str, int], tuple[Tensor, Any, int]] = {}
        self._saved: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._sends: list[tuple[Any, Tensor, int]] = []
        self.peak_saved = 0  # most micro-batches whose activations were held at once, all models together

    def run(self, actions: Sequence[Action], training: bool = True) -> None:
        """Execute the list. Raises `PeerLost` naming the rank that a wait was for."""
        check_actions(actions, {name: len(pipe.batches) for name, pipe in self.pipes.items()}, training)
        agree_on_work(self.pipes)
        for index, action in enumerate(actions):
            for ahead in actions[index : index + 1 + self.window]:
                self._post(ahead)
            start = self.clock()
            pipe = self.pipes[action.model]
            if action.kind == "F":
                self._forward(action, pipe, training)
            else:
                self._backward(action, pipe)
            self._reap()
            if self.record is not None:
                self.record(f"{action.model} {action.kind}{action.micro_batch}", start, self.clock())
        for work, _, peer in self._sends:
            self._wait(work, peer, "sending to")
        self._sends.clear()

    # ------------------------------------------------------------ compute

    def _forward(self, action: Action, pipe: Pipe, training: bool) -> None:
        batch = pipe.batches[action.micro_batch]
        if pipe.stage.is_first:
            inputs = batch.tokens.to(pipe.device, non_blocking=True)
        else:
            inputs = self._take(action)
            if training:
                inputs.requires_grad_(True)
        if pipe.before_forward is not None:
            pipe.before_forward(action.micro_batch)
        with torch.set_grad_enabled(training):
            with peer_errors(f"gathering weights of {action.model}"):
                output = pipe.stage(inputs)
            if not pipe.stage.is_last:
                self._send(output.detach().contiguous(), pipe.groups.forward_out, pipe.groups.next)
            elif training:
                if batch.loss is None:
                    raise ValueError(f"micro-batch {action.micro_batch} of {action.model} has no loss")
                output, stats = batch.loss(output)
                pipe.stats.append(stats)
            else:
                assert pipe.read is not None
                pipe.results.append(pipe.read(output, batch))
        if training:
            self._saved[action.model, action.micro_batch] = (inputs, output)
            self.peak_saved = max(self.peak_saved, len(self._saved))

    def _backward(self, action: Action, pipe: Pipe) -> None:
        inputs, output = self._saved.pop((action.model, action.micro_batch))
        gradient = None if pipe.stage.is_last else self._take(action)
        if action.micro_batch == len(pipe.batches) - 1 and pipe.before_last_backward is not None:
            pipe.before_last_backward()
        with peer_errors(f"reducing gradients of {action.model}"):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        if not pipe.stage.is_first:
            upstream = inputs.grad if inputs.grad is not None else torch.zeros_like(inputs)
            self._send(upstream.contiguous(), pipe.groups.backward_out, pipe.groups.previous)

    # ------------------------------------------------------------ transfers

    def _post(self, action: Action) -> None:
        """Post the receive that `action` needs, once."""
        pipe, key = self.pipes[action.model], (action.model, action.kind, action.micro_batch)
        if key in self._received:
            return
        group: Any
        if action.kind == "F":
            if pipe.stage.is_first:
                return
            peer, group = pipe.groups.previous, pipe.groups.forward_in
        else:
            if pipe.stage.is_last:
                return
            peer, group = pipe.groups.next, pipe.groups.backward_in
        buffer = pipe.buffer(action.micro_batch)
        with peer_errors(f"receiving from trainer rank {peer}"):
            self._received[key] = (buffer, dist.irecv(buffer, src=peer, group=group), peer)

    def _take(self, action: Action) -> Tensor:
        buffer, work, peer = self._received[action.model, action.kind, action.micro_batch]
        self._wait(work, peer, "receiving from")
        # The key stays, so that a later look-ahead does not post it again; the tensor is the caller's.
        self._received[action.model, action.kind, action.micro_batch] = (torch.empty(0), None, peer)
        return buffer

    def _send(self, tensor: Tensor, group: Any, peer: int) -> None:
        with peer_errors(f"sending to trainer rank {peer}"):
            self._sends.append((dist.isend(tensor, dst=peer, group=group), tensor, peer))

    def _reap(self) -> None:
        """Let go of buffers whose sends are done."""
        self._sends = [send for send in self._sends if not send[0].is_completed()]

    def _wait(self, work: Any, peer: int, doing: Literal["sending to", "receiving from"]) -> None:
        try:
            if self.nccl:
                # Orders the streams without blocking this thread; the group's own timeout is the deadline.
                work.wait()
            else:
                work.wait(self.deadline)
        except RuntimeError as error:
            raise PeerLost(f"trainer rank {peer} was lost while {doing} it: {transport_sentence(error)}") from error
