"""Receives weights from `dovetail.trainer.weight_sender`, for the scorer and for vLLM's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch

from dovetail.models.links.deadline import Deadline, Handle, TransferError
from dovetail.models.links.rendezvous import Rendezvous
from dovetail.models.transfer import Channel, Named, assemble, assembled_bytes, call, intact, message_bytes, unpack
from dovetail.protocol.messages import Bucket, Receive, Segment
from dovetail.rollout.received_copy import ReceivedCopy


def _yes() -> bool:
    return True


# A receiver waits so much longer than a sender.
LATER_SECONDS = 2.0
# One bucket, with the parts of all senders of its stage.
Parcel = list[tuple[Segment, Bucket]]


def parcels(segments: Sequence[Segment]) -> list[Parcel]:
    """An offer's buckets in the order in which they travel. Stages take turns, so that one packs while another
    sends."""
    stages: dict[tuple[str, int], list[Segment]] = {}
    for segment in sorted(segments, key=lambda s: (s.model, s.index, s.part)):
        stages.setdefault((segment.model, segment.index), []).append(segment)
    queues = [[list(zip(stage, column, strict=True)) for column in _columns(stage)] for stage in stages.values()]
    return [parcel for turn in zip_longest(*queues) for parcel in turn if parcel is not None]


def _columns(stage: Sequence[Segment]) -> list[tuple[Bucket, ...]]:
    return list(zip(*(segment.buckets for segment in stage), strict=True))


def _deadline(receive: Receive) -> Deadline:
    """The deadline of the offer. The sender's deadline passes first, because it knows which receivers are missing."""
    return Deadline(receive.offer.deadline_seconds, extra=LATER_SECONDS)


class WeightReceiver:
    """Keeps the communicators of one epoch and two bucket buffers. It is not thread-safe.

    `rank` is a vLLM worker's rank within its server. It is added to the offer's `rank_offset`. `copy` gets the messages
    of each version, so that they can be sent on."""

    def __init__(self, device: torch.device | str = "cpu", rank: int = 0, copy: ReceivedCopy | None = None):
        self._device = torch.device(device)
        self._rank = rank
        self._copy = copy
        self._epoch: int | None = None
        self._channels: dict[tuple[str, int, int], Channel] = {}
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._whole: torch.Tensor | None = None

    def connect(self, receive: Receive, deadline: Deadline | None = None) -> None:
        """Join the senders' communicators if the epoch is a new one. Raises TransferError."""
        deadline = deadline or _deadline(receive)
        if self._epoch == receive.offer.epoch:
            return
        self.close()
        try:
            for segment in receive.offer.segments:
                store = call(segment.host, segment.port, segment.secret, deadline)
                meeting = Rendezvous(store, receive.rank_offset + self._rank, receive.world_size)
                self._channels[_key(segment)] = Channel(
                    receive.offer.backend, meeting, segment.host, deadline, self._device
                )
        except BaseException:
            self.close()
            raise
        self._epoch = receive.offer.epoch

    def receive(self, receive: Receive, may_reuse: Callable[[], bool] = _yes) -> Iterator[Named]:
        """Yield (name, tensor) of every segment of the offer. Stages take turns, and the next bucket arrives while
        these tensors are used.

        A bucket is yielded only after the checksums of all its parts were verified. Tensors are views of a buffer. The
        buffer is written again once the next bucket was asked for. `may_reuse()` is called after the last tensor of a
        bucket was taken. If it returns false, somebody still holds tensors, and the buffer is not written again. Raises
        TransferError on a wrong checksum, a broken connection or the deadline. Then the communicators are gone, and
        everything that was yielded so far must be thrown away. A consumer that stops early has the same effect."""
        deadline = _deadline(receive)
        self.connect(receive, deadline)
        coming = parcels(receive.offer.segments)
        largest = max((sum(message_bytes(b) for _, b in parcel) for parcel in coming), default=0)
        complete = False
        if self._copy is not None:
            self._copy.begin(receive.offer)
        try:
            for channel in self._channels.values():
                channel.ready()
            started = self._start(coming[0], 0, largest, deadline)
            for k, parcel in enumerate(coming):
                arriving = started
                for _, handle in arriving:
                    handle.wait()
                if k + 1 < len(coming):
                    started = self._start(coming[k + 1], k + 1, largest, deadline)
                for (segment, bucket), (message, _) in zip(parcel, arriving, strict=True):
                    if not intact(message, bucket):
                        raise TransferError(
                            f"bucket {k + 1} of {len(coming)} of {segment.model} (segment {segment.index}, part "
                            f"{segment.part}) arrived with a wrong checksum"
                        )
                    if self._copy is not None:
                        self._copy.add(message)
                if len(parcel) == 1 and parcel[0][1].boxes is None:
                    yield from unpack(arriving[0][0], parcel[0][1])
                    if not may_reuse():
                        self._buffers[k % 2] = None
                    continue
                messages = [(message, bucket) for (message, _), (_, bucket) in zip(arriving, parcel, strict=True)]
                yield from assemble(self._room(coming, parcel[0][1]), messages)
                if not may_reuse():
                    self._whole = None
            if self._copy is not None:
                self._copy.complete()
            complete = True
        finally:
            if not complete:
                self.close()

    def close(self) -> None:
        """Leave all communicators."""
        channels, self._channels = list(self._channels.values()), {}
        self._epoch = None
        for channel in channels:
            channel.close()

    def _start(self, parcel: Parcel, k: int, largest: int, deadline: Deadline) -> list[tuple[torch.Tensor, Handle]]:
        """Ask all senders of a bucket for their parts at once."""
        buffer = self._buffers[k % 2]
        if buffer is None or buffer.numel() < largest:
            buffer = self._buffers[k % 2] = torch.empty(largest, dtype=torch.uint8, device=self._device)
        started, end = [], 0
        for segment, bucket in parcel:
            message = buffer[end : end + message_bytes(bucket)]
            end += message.numel()
            started.append((message, self._channels[_key(segment)].broadcast(message, deadline)))
        return started

    def _room(self, coming: list[Parcel], first: Bucket) -> torch.Tensor:
        if self._whole is None or self._whole.numel() < assembled_bytes(first):
            size = max(assembled_bytes(parcel[0][1]) for parcel in coming)
            self._whole = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._whole


def _key(segment: Segment) -> tuple[str, int, int]:
    return segment.model, segment.index, segment.part


class FixedPlaces:
    """The addresses of a model's parameters and buffers on a GPU. CUDA graphs read them at the addresses at which they
    were when the graphs were captured. So a new version must be written over the old one. vLLM 0.32's layerwise reload
    does so. It loads each layer beside the old one and copies it there. A layer at another address would be served with
    its old weights, and nobody would notice."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._found = _addresses(model)

    def check(self, model: torch.nn.Module) -> None:
        """Check all addresses. Raises TransferError if one has changed."""
        now = _addresses(model)
        moved = sorted(name for name, address in self._found.items() if now.get(name) != address)
        if moved:
            raise TransferError(
                f"{len(moved)} tensors of the model are no longer where CUDA graphs read them, such as {moved[0]}; "
                "start the server anew, with --enforce-eager if this is a model of your own"
            )


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.data_ptr() for name, tensor in named}
