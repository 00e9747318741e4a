"""Receiving weights: the other end of `dovetail.trainer.weights`, for the scorer and for vLLM's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dovetail.api.messages import Bucket, Receive, Segment
from dovetail.models.transfer import Channel, Deadline, Handle, TransferError, call, intact, message_bytes, unpack

__all__ = ["TransferError", "WeightReceiver"]


def _yes() -> bool:
    return True


class WeightReceiver:
    """Keeps the communicators of one epoch and two bucket buffers. Not thread-safe.

    `rank` is added to the offer's `rank_offset`: a vLLM worker's rank within its server."""

    def __init__(self, device: torch.device | str = "cpu", rank: int = 0):
        self._device = torch.device(device)
        self._rank = rank
        self._epoch: int | None = None
        self._channels: dict[tuple[str, int], Channel] = {}
        self._buffers: list[torch.Tensor | None] = [None, None]

    def connect(self, receive: Receive, deadline: Deadline | None = None) -> None:
        """Join the senders' communicators if the epoch is a new one. Raises TransferError."""
        deadline = deadline or Deadline(receive.offer.deadline_seconds)
        if self._epoch == receive.offer.epoch:
            return
        self.close()
        try:
            for segment in receive.offer.segments:
                store = call(segment.host, segment.port, deadline)
                self._channels[segment.model, segment.index] = Channel(
                    receive.offer.backend,
                    store,
                    receive.rank_offset + self._rank,
                    receive.world_size,
                    segment.host,
                    deadline,
                )
        except BaseException:
            self.close()
            raise
        self._epoch = receive.offer.epoch

    def receive(self, receive: Receive, may_reuse: Callable[[], bool] = _yes) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every segment of the offer, in order; the next bucket arrives while these are used.

        A bucket is yielded only after its checksum was verified. Tensors are views of a buffer that is written
        again two buckets later, unless `may_reuse()`, asked after the last tensor of a bucket was taken, says that
        somebody still holds some. Raises TransferError on a wrong checksum, a broken connection or the deadline;
        the communicators are then gone and what was yielded so far is to be thrown away. A consumer that stops
        early has the same effect."""
        deadline = Deadline(receive.offer.deadline_seconds)
        self.connect(receive, deadline)
        parcels = [(segment, bucket) for segment in receive.offer.segments for bucket in segment.buckets]
        complete = False
        try:
            coming = self._start(parcels, 0, deadline)
            for k, (segment, bucket) in enumerate(parcels):
                message, handle = coming
                handle.wait()
                if k + 1 < len(parcels):
                    coming = self._start(parcels, k + 1, deadline)
                if not intact(message, bucket):
                    raise TransferError(
                        f"bucket {k + 1} of {len(parcels)} of {segment.model} (segment {segment.index}) arrived with "
                        "a wrong checksum"
                    )
                yield from unpack(message, bucket)
                if not may_reuse():
                    self._buffers[k % 2] = None
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

    def _start(self, parcels: list[tuple[Segment, Bucket]], k: int, deadline: Deadline) -> tuple[torch.Tensor, Handle]:
        segment, bucket = parcels[k]
        size = message_bytes(bucket)
        buffer = self._buffers[k % 2]
        if buffer is None or buffer.numel() < size:
            largest = max(message_bytes(b) for _, b in parcels)
            buffer = self._buffers[k % 2] = torch.empty(largest, dtype=torch.uint8, device=self._device)
        message = buffer[:size]
        return message, self._channels[segment.model, segment.index].broadcast(message, deadline)
