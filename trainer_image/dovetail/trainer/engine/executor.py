"""Runs a rank's list of actions of several pipelined models. Actions are forward passes, and backward passes as a whole
or in two halves.

A rank may hold several stages of a model (chunks, see `dovetail.protocol.plan.stage_path`). Between stages of one rank
tensors are handed over without a message. One host thread runs all actions. Each edge of a model and direction has a
group of its own with two ranks. Receives are posted before their action, and nothing waits for a send before the end.
So compute waits only for the tensor that it needs. Micro-batches are packed and have no padding. Both ends know their
sizes from the batch, so no shapes are sent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.models import Outputs, PipelineStage
from dovetail.models.compiled import use_compiled
from dovetail.models.layers.expert_ranks import divided
from dovetail.models.layers.predictions import Predicted, Predictions, gradients_of
from dovetail.models.recompute import recomputes
from dovetail.protocol.messages import Action
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.trainer.communication.groups import ModelGroups, PeerLost, on_host, peer_errors, transport_sentence
from dovetail.trainer.compat import is_view
from dovetail.trainer.engine.action_measures import ActionStopwatch, AllocatedBytes, Meter, SavedBytes
from dovetail.trainer.engine.optim import local
from dovetail.trainer.engine.parallel import is_sharded
from dovetail.trainer.engine.split_backward import WeightGroup, backward_input, backward_weights
from dovetail.trainer.packed_batches import Packed, moved, moved_together

# Receives are posted this many actions ahead.
WINDOW = 3
# On a GPU a posted receive is a kernel that spins until its message comes. It occupies some of the multiprocessors that
# compute needs. The receive of the next action is enough, because its message is sent while this action computes.
GPU_RECEIVES = 2

_PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}

Loss = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]
Record = Callable[[str, float, float], None]
# (model, chunk, micro-batch)
Piece = tuple[str, int, int]


@dataclass
class MicroBatch:
    """The sequences of one forward pass, and the functions for its outputs (see `Packed`).

    `loss` takes the last stage's output at the n wanted positions: logits (n, V), or values (n,), or both. It returns a
    scalar, and detached scalars that are summed in the same way. It is scaled so that the sum over all micro-batches
    and all dp ranks is the mini-batch's loss. `asks` takes the packed targets on the device. It says what the last
    stage must return for them instead of logits. With None the stage returns logits."""

    packed: Packed
    loss: Loss | None = None
    asks: Callable[[Tensor], Predictions] | None = None


@dataclass
class Pipe:
    """One model on this rank during one run.

    `mini_batch` is the number of micro-batches of one optimizer step, or 0 for all. `reduce` is called when this rank
    has run all backward passes of a mini-batch. `step` is called before the first forward pass of the next one, and at
    the end. With `by_layer` each pass gathers the weights layer by layer (ZeRO-3). `balance` is passed to
    `PipelineStage.forward` for each micro-batch."""

    stage: PipelineStage
    groups: ModelGroups
    batches: Sequence[MicroBatch]
    device: torch.device
    dtype: torch.dtype  # of activations between stages
    read: Callable[[Any, MicroBatch], Tensor] | None = None  # only for forward passes without training
    before_forward: Callable[[int, int], None] | None = None  # gets the chunk, and the index in the mini-batch
    before_last_backward: Callable[[], None] | None = None
    after_weight_gradient: Callable[[bool], None] | None = None  # gets whether it was the mini-batch's last one
    mini_batch: int = 0
    reduce: Callable[[], None] | None = None
    step: Callable[[], None] | None = None
    balance: float = 0.0
    by_layer: bool = False
    # By micro-batch, what all ranks that share its tokens compute, and what this one does.
    wholes: list[Packed] = field(init=False)
    parts: list[Packed] = field(init=False)
    stats: list[dict[str, Tensor]] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    _ended: int = 0  # finished backward passes of the current mini-batch, of all chunks

    @property
    def chunks(self) -> int:
        """The number of the model's stages on this rank."""
        return len(self.stage.stages)

    def last_backward(self) -> bool:
        """Whether the next backward pass on this rank is the last one of its mini-batch."""
        return self._ended + 1 == self.mini_batch * self.chunks

    def end_backward(self) -> bool:
        """Count a finished backward pass. Returns whether it was the last one of its mini-batch."""
        last = self.last_backward()
        self._ended = 0 if last else self._ended + 1
        return last

    def __post_init__(self) -> None:
        self.mini_batch = self.mini_batch or max(1, len(self.batches))
        ranks = self.groups.token_ranks
        # Layers need at least one token.
        self.wholes = [each.packed.filled(ranks.size) for each in self.batches]
        self.parts = [whole.of(ranks.own(whole.total)) for whole in self.wholes]

    def gathered_bytes(self, chunk: int = 0) -> int:
        """The bytes of the weights that FSDP2 gathers and keeps in a mini-batch's first forward pass of a chunk,
        without its padding. These are the chunk's layers (not under ZeRO-3), and with chunk 0 all weights outside of
        layers."""
        if not is_sharded(self.stage):
            return 0
        shards = int(self.groups.dp_mesh.size())
        layers = self.stage.layers
        kept = [] if self.by_layer else self.stage.chunk_layers[chunk]
        mine = [p for number in kept for p in layers[str(number)].parameters()]
        if chunk == 0:
            inside = {id(p) for p in layers.parameters()}
            mine += [p for p in self.stage.parameters() if id(p) not in inside]
        fewer = {id(p) for experts in divided(layers) for p in experts.parameters()}  # not those of other ranks
        held = sum(int(local(p).numel()) // (self.groups.layout.ep if id(p) in fewer else 1) for p in mine)
        return held * shards * int(self.dtype.itemsize)

    def boundary(self) -> torch.Size:
        """The shape (1, tokens, H) of a message between stages, for the micro-batch of median size."""
        sizes = sorted(part.tokens.numel() for part in self.parts)
        return torch.Size((1, sizes[len(sizes) // 2], self.stage.hidden_size))

    def whole(self, output: Any, micro_batch: int, asked: Predictions | None) -> Any:
        """The outputs of a last stage at all wanted positions, from those at this rank's, of which it `asked` for
        predictions."""
        ranks, packed = self.groups.token_ranks, self.wholes[micro_batch]
        if ranks.size == 1:
            return output
        at, count = packed.asked(ranks.own(packed.total)), len(packed.wanted)
        if isinstance(output, Outputs):
            return Outputs(self.whole(output.logits, micro_batch, asked), ranks.joined(output.values, at, count))
        if isinstance(output, Predicted):
            with_entropy = asked is not None and asked.entropy != "none"
            entropy = ranks.joined(output.entropy, at, count) if with_entropy else output.entropy
            return Predicted(moved(packed.targets, self.device), ranks.joined(output.logprobs, at, count), entropy)
        return ranks.joined(output, at, count)

    def buffer(self, micro_batch: int) -> Tensor:
        """An empty tensor with the shape of a message between stages: (1, tokens, H)."""
        shape = self.parts[micro_batch].tokens.shape
        return torch.empty(*shape, self.stage.hidden_size, dtype=self.dtype, device=self.device)


def check_actions(
    actions: Sequence[Action],
    micro_batches: dict[str, int],
    training: bool,
    mini_batches: int = 1,
    chunks: Mapping[str, int] | None = None,
) -> None:
    """Raise `ValueError` unless the actions are a complete and well-ordered schedule.

    Every micro-batch of every model must have one forward pass and (when training) a later backward pass. A backward
    pass is B, or I and later W. Each kind must run in ascending order. A mini-batch's forward passes must come after
    all backward passes of the model's mini-batch before. All this must hold for each of a model's `chunks` on the rank
    (default 1).

    Because of the ascending order both ends of a channel agree on the order of its messages. Gradients are added in
    micro-batch order, so their bits do not depend on how the models' actions interleave."""
    done: dict[tuple[str, int, str], int] = {}
    held = {name: (chunks or {}).get(name, 1) for name in micro_batches}
    for action in actions:
        if action.model not in micro_batches:
            raise ValueError(f"the schedule runs model {action.model!r}, which has no work")
        name, chunk = action.model, action.chunk
        if not 0 <= chunk < held[name]:
            raise ValueError(f"the schedule runs chunk {chunk} of {name}, of which the rank has {held[name]}")
        per = micro_batches[action.model] // mini_batches or 1
        before = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
        for part in "IW" if action.kind == "B" else action.kind:
            count = done.get((name, chunk, part), 0)
            if action.micro_batch != count:
                raise ValueError(
                    f"the schedule runs {action.kind} of {action.model} micro-batch {action.micro_batch} where "
                    f"{count} is next; each kind must run in ascending order"
                )
            done[name, chunk, part] = count + 1
        if before is not None and action.micro_batch >= done.get((name, chunk, before), 0):
            raise ValueError(
                f"the schedule runs {action.kind} of {action.model} micro-batch {action.micro_batch} before its "
                f"{before}"
            )
        least = min(done.get((name, each, "W"), 0) for each in range(held[name]))
        if action.kind == "F" and training and least < action.micro_batch // per * per:
            raise ValueError(
                f"the schedule runs F of {action.model} micro-batch {action.micro_batch} before the optimizer step of "
                "the mini-batch before it"
            )
    for model, count in micro_batches.items():
        for kind, part in (("F", "F"), ("B", "W")) if training else (("F", "F"),):
            for chunk in range(held[model]):
                if (found := done.get((model, chunk, part), 0)) != count:
                    raise ValueError(f"the schedule runs {found} {kind} of {model}, there are {count} micro-batches")


def agree_on_work(pipes: dict[str, Pipe], models: Sequence[str], schedule: str, control: Any, rank: int) -> None:
    """Raise `RuntimeError` on every rank if the ranks hold different schedules, or different micro-batches within a
    pipeline or among the tp or cp ranks of a stage. Sends, receives, sums and attention would not match. `models` are
    those of all ranks. Raises `PeerLost`."""
    world = dist.get_world_size(control)
    if world == 1:
        return
    names = sorted(models)
    batches = {name: pipe.batches for name, pipe in pipes.items()}
    lengths = [repr((name, [batch.packed.lengths for batch in batches.get(name, ())])) for name in names]
    mine = torch.tensor([_number(text) for text in (schedule, *lengths)])
    others = [torch.empty_like(mine) for _ in range(world)]
    with peer_errors("comparing schedules with the other trainer ranks"):
        dist.all_gather(others, mine, group=control)
    if odd := [r for r, other in enumerate(others) if int(other[0]) != int(others[0][0])]:
        raise RuntimeError(f"trainer ranks {odd} hold another schedule than rank 0")
    for index, name in enumerate(names, start=1):
        if name not in pipes:
            continue
        for ranks, who in (
            (pipes[name].groups.pp_ranks, "their pipeline's first stage"),
            (pipes[name].groups.tp_ranks, "the first tensor-parallel rank of their stage"),
            (pipes[name].groups.cp_ranks, "the first context-parallel rank of their stage"),
        ):
            if odd := [r for r in ranks[1:] if int(others[r][index]) != int(others[ranks[0]][index])]:
                raise RuntimeError(f"trainer ranks {odd} hold other micro-batches of {name} than {who}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _piece(action: Action) -> Piece:
    return action.model, action.chunk, action.micro_batch


class Executor:
    """Runs one action list. `deadline` bounds every wait of a CPU. For every wait of a GPU `awaiting` is called with a
    sentence about the peer. Between ranks that share a GPU (`ModelGroups.staged`) messages go through host memory, and
    the CPU waits for them.

    After `run`, `watch` has the times of compute by kind and (model, chunk, micro-batch), and `saved_bytes` the bytes
    of activations by (model, chunk, micro-batch). `peak_bytes` is the most that all models held at the same time."""

    def __init__(
        self,
        pipes: dict[str, Pipe],
        deadline: timedelta,
        record: Record | None = None,
        awaiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.awaiting = awaiting
        self.pipes, self.deadline, self.record = pipes, deadline, record
        device = next((pipe.device for pipe in pipes.values()), torch.device("cpu"))
        self.staged = any(pipe.groups.staged for pipe in pipes.values())
        self.nccl = device.type == "cuda" and not self.staged
        self.watch = ActionStopwatch(device, time.time)
        self.saved_bytes: dict[Piece, int] = {}
        self.peak_bytes = 0
        self._held_bytes = 0
        self._received: dict[tuple[str, Piece], tuple[Tensor, Any, int]] = {}  # posted, and not arrived yet
        self._posted = 0  # actions whose receives are posted
        self._handed: dict[tuple[str, Piece], Tensor] = {}  # handed from one stage of this rank to the next
        self._saved: dict[Piece, tuple[Tensor, Tensor]] = {}
        self._split: dict[Piece, list[WeightGroup]] = {}
        self._sends: dict[tuple[str, Piece], tuple[Any, Tensor, int]] = {}
        self._meters: dict[str, Meter] = {
            name: AllocatedBytes(device) if device.type == "cuda" else SavedBytes(pipe.stage.parameters())
            for name, pipe in pipes.items()
        }
        self._splits: set[str] = set()  # models with split backward passes
        self._dropped: set[str] = set()  # models that had a backward pass since their last forward pass
        self.peak_saved = 0  # the most micro-batches whose activations were held at once, over all models

    def run(self, actions: Sequence[Action], training: bool = True) -> None:
        """Execute a list that `check_actions` accepts. Raises `PeerLost`, which names the rank for which this one
        waited, and `ValueError` for a split backward pass of a model with activation checkpointing or under ZeRO-3."""
        self._splits = {action.model for action in actions if action.kind == "I"}
        if checkpointed := sorted(model for model in self._splits if recomputes(self.pipes[model].stage)):
            raise ValueError(f"the schedule splits backwards of {checkpointed[0]}, which has activation checkpointing")
        if gathered := sorted(model for model in self._splits if self.pipes[model].by_layer):
            raise ValueError(f"the schedule splits backwards of {gathered[0]}, which is under ZeRO-3")
        for model, pipe in self.pipes.items():
            use_compiled(pipe.stage, model not in self._splits)
        self._posted = 0
        for index, action in enumerate(actions):
            self._post_ahead(actions, index + 1 + WINDOW)
            pipe = self.pipes[action.model]
            first = action.kind == "F" and not action.chunk and action.micro_batch % pipe.mini_batch == 0
            if first and action.micro_batch and pipe.step is not None:
                pipe.step()
            arrived = self._arrived(action, pipe)
            if action.kind == "F":
                self._forward(action, pipe, arrived, training)
            elif action.kind == "W":
                self._weight_gradient(action, pipe)
            else:
                self._backward(action, pipe, arrived)
            PROGRESS.made()
            self._reap()
            if self.nccl and pipe.groups.beside:
                # On the GPU, FSDP2 or tensor-parallel layers wait for these ranks.
                self.awaiting(f"{pipe.groups.beside} was lost in a {_PASSES[action.kind]} pass of {action.model}")
            if action.kind in "BW" and pipe.end_backward() and pipe.reduce is not None:
                pipe.reduce()
        if training:
            for pipe in self.pipes.values():
                if pipe.step is not None and pipe.batches:
                    pipe.step()
        for work, _, peer in self._sends.values():
            self._wait(work, peer, "sending to")
        self._sends.clear()

    def report(self) -> None:
        """Call `record` with the times of each action. Waits for the device."""
        if self.record is not None:
            for (kind, (model, chunk, micro_batch)), (start, seconds) in self.watch.spans().items():
                which = f".{chunk}" if self.pipes[model].chunks > 1 else ""
                self.record(f"{model} {kind}{micro_batch}{which}", start, start + seconds)

    # ------------------------------------------------------------ compute

    def _forward(self, action: Action, pipe: Pipe, arrived: Tensor | None, training: bool) -> None:
        batch = pipe.batches[action.micro_batch]
        packed, chunk, key = pipe.parts[action.micro_batch], action.chunk, _piece(action)
        ends = pipe.stage.ends(chunk)
        inputs = packed.tokens.to(pipe.device, non_blocking=True) if arrived is None else arrived
        wanted = predictions = None
        if ends:
            wanted, targets = moved_together([packed.wanted, packed.targets], pipe.device)
            predictions = None if batch.asks is None else batch.asks(targets)
        routing = None if packed.routing is None else packed.routing.to(pipe.device, non_blocking=True)
        if arrived is not None and training:
            inputs.requires_grad_(True)
        if pipe.before_forward is not None:
            pipe.before_forward(chunk, action.micro_batch % pipe.mini_batch)
        meter = self._meters[action.model]
        if isinstance(meter, AllocatedBytes):
            # The mini-batch's first forward pass gathers the weights. They stay until its last backward pass. With
            # ZeRO-3 a backward pass drops them, and the next forward pass gathers them again.
            gathers = self._gathers(action, pipe)
            meter.gathered = pipe.gathered_bytes(chunk) if gathers else 0
        with (
            torch.set_grad_enabled(training),
            self.watch.time(("F", key)),
            meter if training else nullcontext(),
        ):
            with peer_errors(f"a forward pass of {action.model}"):
                output = pipe.stage(
                    inputs,
                    packed.lengths,
                    wanted,
                    routing=routing,
                    predictions=predictions,
                    balance=pipe.balance,
                    chunk=chunk,
                )
                if ends:
                    output = pipe.whole(output, action.micro_batch, predictions)
            if ends and training:
                if batch.loss is None:
                    raise ValueError(f"micro-batch {action.micro_batch} of {action.model} has no loss")
                output, stats = batch.loss(output)
                pipe.stats.append(stats)
            if action.model in self._splits and is_view(output):
                output = output.clone()  # torch's split backward detaches it in place, and a view cannot be detached so
        if not ends:
            edge = pipe.groups.edges[chunk]
            self._give("F", action, output.detach().contiguous(), edge.forward_out, edge.next)
        elif not training:
            assert pipe.read is not None
            pipe.results.append(pipe.read(output, batch))
        if training:
            self._saved[key] = (inputs, output)
            self.peak_saved = max(self.peak_saved, len(self._saved))
            self.saved_bytes[key] = meter.bytes
            self._held_bytes += meter.bytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _gathers(self, action: Action, pipe: Pipe) -> bool:
        """Whether the next forward pass gathers weights that stay after it."""
        gathers = action.micro_batch % pipe.mini_batch == 0 or (pipe.by_layer and action.model in self._dropped)
        self._dropped.discard(action.model)
        return gathers

    def _backward(self, action: Action, pipe: Pipe, gradient: Tensor | None) -> None:
        """Run the whole backward pass (B), or its first half (I), for which the previous stage waits."""
        key, begins = _piece(action), pipe.stage.begins(action.chunk)
        inputs, output = self._saved[key]
        whole = action.kind == "B"
        if whole:
            self._before_gradient(pipe)
        with self.watch.time((action.kind, key)):
            if whole:
                with peer_errors(f"a backward pass of {action.model}"):
                    if output.requires_grad:
                        torch.autograd.backward(output, gradient)
            elif begins:
                # No stage waits for the gradient of tokens.
                self._saved[key] = (output, gradient if gradient is not None else torch.ones_like(output))
            else:
                with peer_errors(f"a backward pass of {action.model}"), gradients_of("inputs"):
                    inputs.grad, self._split[key] = backward_input(output, gradient, inputs)
        if not begins:
            upstream = inputs.grad if inputs.grad is not None else torch.zeros_like(inputs)
            edge = pipe.groups.edges[action.chunk]
            self._give("B", action, upstream.contiguous(), edge.backward_out, edge.previous)
            inputs.grad = None
        self._dropped.add(action.model)
        if whole:
            self._release(key)
        elif not begins:
            del self._saved[key]

    def _weight_gradient(self, action: Action, pipe: Pipe) -> None:
        """Run the second half of a split backward pass (W)."""
        key = _piece(action)
        doing = peer_errors(f"a backward pass of {action.model}")
        with self.watch.time(("W", key)), doing:
            if pipe.stage.begins(action.chunk):
                self._before_gradient(pipe)
                output, gradient = self._saved[key]
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            else:
                with gradients_of("weights"):
                    backward_weights(self._split.pop(key))
                if pipe.after_weight_gradient is not None:
                    pipe.after_weight_gradient(pipe.last_backward())
        self._release(key)

    def _before_gradient(self, pipe: Pipe) -> None:
        if pipe.before_last_backward is not None and pipe.last_backward():
            pipe.before_last_backward()

    def _release(self, key: Piece) -> None:
        self._saved.pop(key, None)
        self._held_bytes -= self.saved_bytes.get(key, 0)

    # ------------------------------------------------------------ transfers

    def _source(self, action: Action, pipe: Pipe) -> tuple[int, Any] | None:
        """The rank and group that send an action's input, or None if the input comes from this rank."""
        edge = pipe.groups.edges[action.chunk]
        if action.kind == "F":
            return None if edge.previous is None else (edge.previous, edge.forward_in)
        return None if action.kind == "W" or edge.next is None else (edge.next, edge.backward_in)

    def _post_ahead(self, actions: Sequence[Action], end: int) -> None:
        """Post the receives of the actions before `end` in their order, up to the limit of GPU_RECEIVES on a GPU."""
        end = min(end, len(actions))
        while self._posted < end and not (self.nccl and len(self._received) >= GPU_RECEIVES):
            self._post(actions[self._posted])
            self._posted += 1

    def _post(self, action: Action) -> None:
        """Post the receive that `action` needs, if it needs one."""
        pipe, key = self.pipes[action.model], (action.kind, _piece(action))
        source = self._source(action, pipe)
        if source is None:
            return
        peer, group = source
        buffer = pipe.buffer(action.micro_batch)
        if self.staged:
            buffer = on_host(buffer)
        with peer_errors(f"receiving from trainer rank {peer}"):
            self._received[key] = (buffer, dist.irecv(buffer, src=peer, group=group), peer)

    def _arrived(self, action: Action, pipe: Pipe) -> Tensor | None:
        """The action's input from another stage, or None if it has none. Raises PeerLost."""
        key = (action.kind, _piece(action))
        if self._source(action, pipe) is None:
            return self._handed.pop(("F" if action.kind == "F" else "B", key[1]), None)
        buffer, work, peer = self._received.pop(key)
        self._wait(work, peer, "receiving from")
        if action.kind != "F":
            # This is the gradient of a tensor that was sent forward. So that send is over, even if it is not reported.
            sent = self._sends.pop(("F", key[1]), None)
            if sent is not None:
                self._wait(sent[0], sent[2], "sending to")
        return buffer.to(pipe.device, non_blocking=True) if self.staged else buffer

    def _give(self, way: str, action: Action, tensor: Tensor, group: Any, peer: int | None) -> None:
        """Give a tensor to the next stage (way F) or to the one before (way B). Without a peer that stage is here."""
        if peer is None:
            onward = action.chunk + 1 if way == "F" else action.chunk - 1
            self._handed[way, (action.model, onward, action.micro_batch)] = tensor
            return
        if self.staged:
            tensor = tensor.cpu()
        with peer_errors(f"sending to trainer rank {peer}"):
            self._sends[way, _piece(action)] = (dist.isend(tensor, dst=peer, group=group), tensor, peer)

    def _reap(self) -> None:
        """Free the buffers of completed sends. Gloo reports none before it is waited for (see `_arrived`)."""
        if self.nccl:
            for key in [key for key, send in self._sends.items() if send[0].is_completed()]:
                # After a wait NCCL drops the tensor at once. Without it, NCCL keeps the tensor until a thread of torch
                # has seen the end.
                self._sends.pop(key)[0].wait()

    def _wait(self, work: Any, peer: int, doing: Literal["sending to", "receiving from"]) -> None:
        try:
            if self.nccl:
                # This orders the streams and does not block this thread. The heartbeat thread checks the deadline.
                work.wait()
                self.awaiting(f"trainer rank {peer} was lost while {doing} it")
            else:
                work.wait(self.deadline)
        except RuntimeError as error:
            raise PeerLost(f"trainer rank {peer} was lost while {doing} it: {transport_sentence(error)}") from error
