"""Sends weights. The ranks of a stage share the work, and each sends to all receivers at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from dovetail.models.links.deadline import Deadline, Handle, TransferError
from dovetail.models.links.rendezvous import Rendezvous
from dovetail.models.transfer import (
    SLOWEST,
    Backend,
    Channel,
    Named,
    Part,
    absent_ranks,
    listen,
    message_bytes,
    pack_into,
)
from dovetail.protocol.messages import Bucket, Offer, Publish, Receiver, Segment
from dovetail.protocol.process.env import HOST
from dovetail.protocol.weights.buckets import (
    CPU_BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    TensorSpec,
    bucket_specs,
    plan_buckets,
    share_buckets,
)
from dovetail.protocol.weights.layout import Box, StageRanks, volume

Source = Iterable[Named] | Callable[[], Iterable[Named]]
# The most senders of one stage. Each has a communicator. NCCL's communicators take device memory, on vLLM's side too.
MAX_SENDERS: dict[Backend, int] = {"gloo": 16, "nccl": 4}


@dataclass(frozen=True)
class WeightParts:
    """The weights of a model if each rank of a stage holds and sends only parts of them.

    `iterate` starts an iteration over this rank's part of every tensor of its stage. The order is the same each time
    and on all ranks of the stage. `layout` says how the stage's first dp ranks hold a tensor. Others send nothing."""

    iterate: Callable[[], Iterable[Part]]
    layout: StageRanks


class GroupsLike(Protocol):
    """The attributes and methods of `dovetail.trainer.communication.groups.Groups` that a sender needs."""

    rank: int
    world_size: int
    device: torch.device
    model: Mapping[str, Any]

    def broadcast_json(self, value: Any) -> Any: ...

    def gather_json(self, value: Any) -> list[Any] | None: ...


@dataclass
class _Line:
    """The communicator of one model on this rank. It is kept while the epoch stays the same."""

    epoch: int
    store: Any
    host: str
    port: int
    channel: Channel | None = None


class WeightSender:
    """Sends weights. `publish` is collective: every rank calls it with the same command. It is not thread-safe.

    `post_offer` is called on rank 0 once all senders listen. `host` is the address to which receivers connect (default:
    DOVETAIL_HOST). `cancelled` is called until all receivers are ready to take the version. If it returns true, the
    publish ends with an error."""

    def __init__(
        self,
        groups: GroupsLike,
        post_offer: Callable[[Offer], None],
        *,
        host: str | None = None,
        bucket_bytes: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        self._groups = groups
        self._post_offer = post_offer
        self._host = host or os.environ.get(HOST, "127.0.0.1")
        on_gpu = groups.device.type == "cuda"
        self._backend: Backend = "nccl" if on_gpu else "gloo"
        self._bucket_bytes = bucket_bytes or (GPU_BUCKET_BYTES if on_gpu else CPU_BUCKET_BYTES)
        self._cancelled = cancelled
        # The whole buckets of each model's stage, and the share of each of its senders.
        self._wholes: dict[str, list[Bucket]] = {}
        self._shares: dict[str, dict[int, list[Bucket]]] = {}
        self._layouts: dict[str, StageRanks] = {}
        self._dtypes: dict[str, str | None] = {}  # the dtype in which matrices are sent, or None for their own
        self._lines: dict[str, _Line] = {}
        self._buffers: list[torch.Tensor] = []

    @property
    def max_senders(self) -> int:
        """The most ranks of a stage that may send."""
        return MAX_SENDERS[self._backend]

    def publish(self, command: Publish, weights: Mapping[str, Source | WeightParts]) -> dict[str, float]:
        """Send each model of `weights` that has receivers. Returns `bytes` (sent by all senders together), `seconds`
        (from the offer to the last byte) and `gigabytes_per_second` (bytes / seconds / 1e9). Each byte counts once,
        however many receivers take it.

        `weights[model]` can be `WeightParts`. Then one of the ranks that hold an element sends it. Otherwise it gives
        this rank's stage of the model as pairs (Hugging Face name, full tensor), and the first rank of the stage sends
        them. They must be the same on all ranks of the stage, in the same order each time. It is either a callable that
        starts such an iteration, or an iterable. An iterable is held in memory as a whole at the first publish of a
        model, because its bucket plan must be known before the first byte. All ranks go through `weights` in the order
        of the models' names, because an iteration may be a collective.

        A tensor is taken from the iteration only when its bucket is packed, while the bucket before is being sent. So
        the work of making tensors overlaps with sending.

        The transfer may take the command's deadline plus the time that its bytes take at SLOWEST.

        Raises TransferError on every rank alike. It names the receivers that did not come, if they are known. The
        sender can publish again with a new epoch."""
        deadline = Deadline(command.deadline_seconds)
        models = sorted({m for r in command.receivers for m in r.models} & set(weights))
        iterations = {
            model: self._plan(model, weights[model], serving_dtype(command.receivers, model)) for model in models
        }
        segments = []
        problem = None
        try:
            for model in models:
                mine = self._mine(model)
                if mine is not None:
                    line = self._line(model, command.epoch, deadline)
                    segments.append(
                        Segment(
                            index=self._groups.model[model].pp_rank,
                            part=list(self._shares[model]).index(self._sender(model)),
                            model=model,
                            host=line.host,
                            port=line.port,
                            secret=line.store.secret,
                            buckets=mine,
                        )
                    )
        except (OSError, RuntimeError) as error:
            problem = f"rank {self._groups.rank} cannot listen for receivers: {error}"
        self._agree(problem)

        start = time.monotonic()
        gathered = self._groups.gather_json([s.model_dump(mode="json") for s in segments])
        problem, allowed = None, command.deadline_seconds
        if gathered is not None:
            offered = [Segment.model_validate(s) for part in gathered for s in part]
            offered.sort(key=lambda s: (s.model, s.index, s.part))
            nbytes = sum(message_bytes(b) for s in offered for b in s.buckets)
            allowed += round(nbytes / SLOWEST[self._backend], 1)
            try:
                self._post_offer(
                    Offer(
                        version=command.version,
                        epoch=command.epoch,
                        backend=self._backend,
                        segments=offered,
                        deadline_seconds=allowed,
                    )
                )
            except Exception as error:
                problem = f"the offer did not reach the coordinator: {error}"
        # Rank 0 decides for all ranks whether they go on.
        problem, allowed = self._groups.broadcast_json([problem, allowed])
        if problem:
            self._drop_lines()
            raise TransferError(problem)

        deadline = Deadline(allowed)
        sent = 0
        for model in models:
            try:
                if self._mine(model) is not None and problem is None:
                    sent += self._send(model, iterations[model], command, deadline)
                else:
                    _drain(iterations[model])
            except (TransferError, OSError) as error:
                problem = f"sending {model} from rank {self._groups.rank}: {error}"
        total = self._agree(problem, sent)
        seconds = time.monotonic() - start
        return {"bytes": total, "seconds": seconds, "gigabytes_per_second": total / max(seconds, 1e-9) / 1e9}

    def close(self) -> None:
        """Close every communicator and free the buffers."""
        self._drop_lines()
        self._buffers.clear()

    # ------------------------------------------------------------ helpers of publish

    def _plan(self, model: str, source: Source | WeightParts, dtype: str | None) -> Iterable[Part]:
        """Make the model's bucket plan, with matrices in `dtype`, unless it exists. Returns the iteration to send."""
        layout = source.layout if isinstance(source, WeightParts) else StageRanks()
        if isinstance(source, WeightParts):
            iterate = source.iterate
        elif callable(source):
            start = source
            iterate = lambda: map(whole_part, start())  # noqa: E731
        else:
            held = [whole_part((name, tensor.detach())) for name, tensor in source]
            iterate = lambda: held  # noqa: E731
        if model not in self._wholes or (self._layouts[model], self._dtypes[model]) != (layout, dtype):
            self._layouts[model], self._dtypes[model] = layout, dtype
            specs, tp_dims, experts = [], {}, set()
            for part in iterate():
                specs.append(_spec(part, dtype))
                if part.tp_dim is not None:
                    tp_dims[part.name] = part.tp_dim
                if part.experts:
                    experts.add(part.name)
            self._wholes[model] = plan_buckets(specs, self._bucket_bytes)
            self._shares[model] = share_buckets(self._wholes[model], layout, tp_dims, experts)
        return iterate()

    def _mine(self, model: str) -> list[Bucket] | None:
        """The share of the model's buckets that this rank sends, or None if it sends nothing."""
        return self._shares[model].get(self._sender(model))

    def _sender(self, model: str) -> int:
        """This rank's number among the ranks of its stage."""
        groups = self._groups.model[model]
        number: int = groups.dp_rank * self._layouts[model].tp + groups.tp_rank
        return number

    def _line(self, model: str, epoch: int, deadline: Deadline) -> _Line:
        line = self._lines.get(model)
        if line is None or line.epoch != epoch:
            if line is not None:
                self._hang_up(model)
            store, port = listen(self._host, deadline)
            line = self._lines[model] = _Line(epoch, store, self._host, port)
        return line

    def _send(self, model: str, source: Iterable[Part], command: Publish, deadline: Deadline) -> int:
        """Send a model. Returns the bytes sent. After a failure it first iterates `source` to the end, because peers
        take part in its collectives. Then it raises TransferError."""
        receivers = [r for r in command.receivers if model in r.models]
        line = self._lines[model]
        with closing(_iterate(source)) as parts:
            try:
                if line.channel is None:
                    world = 1 + sum(r.world for r in receivers)
                    try:
                        meeting = Rendezvous(line.store, 0, world, lambda: self._cancelled())
                        line.channel = Channel(self._backend, meeting, self._host, deadline, self._groups.device)
                    except TransferError as error:
                        late = error.ranks or absent_ranks(line.store, world)
                        raise TransferError(f"{error}{_names(receivers, late)}") from error
                try:
                    line.channel.wait_ready(deadline)
                except TransferError as error:
                    raise TransferError(f"{error}{_names(receivers, line.channel.late())}") from error
                try:
                    return self._stream(model, parts, line.channel, deadline)
                except TransferError as error:
                    raise TransferError(f"{error}{_names(receivers, error.ranks)}") from error
            except BaseException:
                self._hang_up(model)
                with suppress(TransferError):
                    _drain(parts)
                raise

    def _stream(self, model: str, parts: Iterator[Part], channel: Channel, deadline: Deadline) -> int:
        """Pack bucket k + 1 while bucket k is being sent. Returns the bytes sent."""
        plan = self._mine(model) or []
        self._allocate(max((message_bytes(b) for b in plan), default=0))
        busy: list[Handle | None] = [None, None]
        sent = 0
        for k, (whole, bucket) in enumerate(zip(self._wholes[model], plan, strict=True)):
            taken = {spec.name: self._next(model, parts, spec) for spec in bucket_specs(whole)}
            if (before := busy[k % 2]) is not None:
                before.wait()
            message = self._buffers[k % 2][: message_bytes(bucket)]
            pack_into(message, bucket, [_cut(taken[spec.name], spec.box) for spec in bucket_specs(bucket)])
            busy[k % 2] = channel.broadcast(message, deadline)
            sent += bucket.nbytes
        for handle in (busy[len(plan) % 2], busy[(len(plan) + 1) % 2]):
            if handle is not None:
                handle.wait()
        if next(parts, None) is not None:
            self._changed(model, "has more tensors than before")
        if self._groups.device.type == "cuda":
            # Synchronising the whole device would also wait for a thread that trains on it.
            torch.cuda.current_stream(self._groups.device).synchronize()
        return sent

    def _next(self, model: str, parts: Iterator[Part], spec: TensorSpec) -> Part:
        part = next(parts, None)
        if part is None or _spec(part, self._dtypes[model]) != spec:
            name = "nothing" if part is None else part.name
            self._changed(model, f"gave {name} where {spec.name} {list(spec.shape)} was planned")
        return part

    def _changed(self, model: str, how: str) -> NoReturn:
        self._wholes.pop(model, None)
        raise TransferError(f"the weights of {model} changed since their buckets were planned: it {how}")

    def _allocate(self, nbytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self._groups.device) for _ in range(2)]

    def _agree(self, problem: str | None, sent: int = 0) -> float:
        """Raise the same TransferError on all ranks if any has a problem. Returns the sum of `sent`, in bytes."""
        gathered = self._groups.gather_json([problem, sent])
        verdict = None
        if gathered is not None:
            verdict = ["; ".join(p for p, _ in gathered if p), sum(n for _, n in gathered)]
        problems, total = self._groups.broadcast_json(verdict)
        if problems:
            self._drop_lines()
            raise TransferError(problems)
        return float(total)

    def _hang_up(self, model: str) -> None:
        line = self._lines.pop(model, None)
        if line is not None and line.channel is not None:
            line.channel.close()

    def _drop_lines(self) -> None:
        for model in list(self._lines):
            self._hang_up(model)


def whole_part(named: Named) -> Part:
    """A whole tensor as a part that one rank holds."""
    name, tensor = named
    shape = tuple(tensor.shape)
    return Part(name, shape, tuple((0, n) for n in shape), tensor)


def serving_dtype(receivers: Iterable[Receiver], model: str) -> str | None:
    """The 16-bit dtype in which all receivers hold the model, or None if they differ or hold another dtype.

    If weights are cast before they are sent, receivers get the same bits, and half as many bytes are sent."""
    held = {receiver.dtype for receiver in receivers if model in receiver.models}
    (dtype,) = held if len(held) == 1 else (None,)
    return dtype if dtype in ("bfloat16", "float16") else None


def _spec(part: Part, dtype: str | None) -> TensorSpec:
    """The spec of the tensor that is sent for the part. Vectors keep their dtype, because they are small, and servers
    hold some in float32."""
    own = str(part.tensor.dtype).removeprefix("torch.")
    sent = dtype if dtype and own == "float32" and len(part.shape) > 1 else own
    return TensorSpec(part.name, sent, tuple(part.shape))


def _cut(part: Part, box: Box | None) -> torch.Tensor:
    """The elements in `box`, taken from what this rank holds."""
    tensor = part.tensor.detach()
    if box is None or not volume(box):
        return tensor
    return tensor[tuple(slice(a - held, b - held) for (a, b), (held, _) in zip(box, part.box, strict=True))]


def _iterate(source: Iterable[Part]) -> Generator[Part, None, None]:
    yield from source


def _drain(source: Iterable[Part]) -> None:
    for _ in source:
        pass


def _names(receivers: list[Receiver], ranks: list[int]) -> str:
    names = [r.name for r in receivers if any(r.rank_offset <= rank < r.rank_offset + r.world for rank in ranks)]
    return f"; not there: {', '.join(names)}" if names else ""
