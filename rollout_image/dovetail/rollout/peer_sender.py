"""Sends the weights that a server holds to another server that came late.

The bytes are those that the trainers sent, with the trainers' checksums, so the receiver verifies them from end to end.
They cannot be read back from vLLM, because its parameters are fused, split, padded, packed or quantised."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import Any

from dovetail.models.links.deadline import Deadline, Handle, TransferError
from dovetail.models.links.rendezvous import Rendezvous
from dovetail.models.transfer import SLOWEST, Channel, listen, message_bytes
from dovetail.protocol.messages import Offer, SendOn
from dovetail.rollout.received_copy import Copied, ReceivedCopy
from dovetail.rollout.weight_receiver import parcels

# vLLM configures loggers below this name only.
logger = logging.getLogger("vllm.dovetail.weights")


class PeerSender:
    """Sends versions of `received`, each in a thread of its own, from host memory over TCP. So the server goes on
    generating, and its GPU is not touched. `host`: the address to which receivers connect."""

    def __init__(self, received: ReceivedCopy, host: str) -> None:
        self._received, self._host = received, host

    def send(self, request: SendOn) -> Offer:
        """Begin to listen for the receiver. Returns the offer for it. The thread ends with the transfer, or at the
        deadline. Raises TransferError if the version is not here, and OSError."""
        with ExitStack() as stack:
            copied = stack.enter_context(self._received.using(request.version))
            if copied is None:
                raise TransferError(f"it holds no copy of version {request.version}")
            nbytes = sum(message.numel() for message in copied.messages)
            seconds = request.deadline_seconds + round(nbytes / SLOWEST["gloo"], 1)
            deadline = Deadline(seconds)
            stores = [listen(self._host, deadline) for _ in copied.offer.segments]
            segments = [
                segment.model_copy(update={"host": self._host, "port": port, "secret": store.secret})
                for segment, (store, port) in zip(copied.offer.segments, stores, strict=True)
            ]
            offer = Offer(
                version=request.version,
                epoch=request.epoch,
                backend="gloo",
                segments=segments,
                deadline_seconds=seconds,
            )
            holding = stack.pop_all()
        lines = [store for store, _ in stores]
        thread = threading.Thread(
            target=self._run,
            args=(holding, copied, offer, lines, request.world_size, deadline),
            name="dovetail-send-weights",
            daemon=True,
        )
        thread.start()
        return offer

    def _run(
        self, holding: ExitStack, copied: Copied, offer: Offer, stores: list[Any], world: int, deadline: Deadline
    ) -> None:
        with holding:
            try:
                self._send(copied, offer, stores, world, deadline)
            except TransferError as error:
                # The receiver tells the coordinator.
                logger.warning("version %d was not sent on: %s", offer.version, error)

    def _send(self, copied: Copied, offer: Offer, stores: list[Any], world: int, deadline: Deadline) -> None:
        channels: dict[tuple[str, int, int], Channel] = {}
        try:
            for segment, store in zip(offer.segments, stores, strict=True):
                channel = Channel("gloo", Rendezvous(store, 0, world), self._host, deadline)
                channels[segment.model, segment.index, segment.part] = channel
            for channel in channels.values():
                channel.wait_ready(deadline)
            before: list[Handle] = []
            messages = iter(copied.messages)
            for parcel in parcels(offer.segments):
                sending = []
                for segment, bucket in parcel:
                    message = next(messages)
                    assert message.numel() == message_bytes(bucket)
                    key = (segment.model, segment.index, segment.part)
                    sending.append(channels[key].broadcast(message, deadline))
                for handle in before:
                    handle.wait()
                before = sending
            for handle in before:
                handle.wait()
        finally:
            for channel in channels.values():
                channel.close()
