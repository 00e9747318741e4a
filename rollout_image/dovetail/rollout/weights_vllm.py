"""vLLM's end of a weight transfer. It is the backend `dovetail` of `--weight-transfer-config`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dovetail.models.config import family_facts
from dovetail.models.links.deadline import TransferError
from dovetail.models.source import in_files
from dovetail.protocol.messages import Receive, SendOn
from dovetail.protocol.process.env import HOST
from dovetail.protocol.sampling import SERVED_TEMPERATURE
from dovetail.rollout import compat
from dovetail.rollout.compat import is_vocabulary, pack_vocabulary
from dovetail.rollout.peer_sender import PeerSender
from dovetail.rollout.received_copy import ReceivedCopy
from dovetail.rollout.serving.weights_worker import SENDING_WORKER
from dovetail.rollout.weight_receiver import FixedPlaces, WeightReceiver

BACKEND = "dovetail"


@dataclass
class Loaded:
    """The version of the weights in this worker process. It is None while they are incomplete."""

    version: int | None = None


LOADED = Loaded()


@dataclass
class DovetailInitInfo(WeightTransferInitInfo):
    """`receive`: a `dovetail.protocol.messages.Receive` as JSON."""

    receive: dict[str, Any] = field(default_factory=dict)


@dataclass
class DovetailUpdateInfo(WeightTransferUpdateInfo):
    """`receive`: a `dovetail.protocol.messages.Receive` as JSON."""

    receive: dict[str, Any] = field(default_factory=dict)


class DovetailWeightTransferEngine(WeightTransferEngine[DovetailInitInfo, DovetailUpdateInfo]):
    """Loads the offer's tensors through the model's own weight loader, by the names that they have in files. The loader
    fuses, shards and converts to the server's dtype. A session that fails leaves the model partly without weights. Then
    the server answers 503 (`dovetail.rollout.serving.routes`) until a complete version has arrived."""

    init_info_cls = DovetailInitInfo
    update_info_cls = DovetailUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any):
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        # Each worker receives all of the weights, so one of the server's workers can send them on.
        sends = rank == 0 and parallel.worker_extension_cls == SENDING_WORKER
        copy = ReceivedCopy() if sends else None
        self._peers = None if copy is None else PeerSender(copy, os.environ.get(HOST, "127.0.0.1"))
        self._receiver = WeightReceiver(device, rank, copy)
        self._family = family_facts(vllm_config.model_config.hf_config)
        self._arrived: int | None = None
        self._parameters = compat.loaded_parameters(model)
        # Find these now, because a session that breaks off leaves modules without the weights that they share.
        self._tied: list[Tied] = tied_modules(model)
        self._places: FixedPlaces | None = None
        compat.divide_logits(model, float(os.environ.get(SERVED_TEMPERATURE, "1.0")))

    def init_transfer_engine(self, init_info: DovetailInitInfo) -> None:
        self._receiver.connect(Receive.model_validate(init_info.receive))

    def start_weight_update(self) -> None:
        LOADED.version = None
        if self._places is None and torch.device(self.device).type == "cuda":
            self._places = FixedPlaces(self.model)  # no session has begun, so the model is whole
        compat.forget_partial_loads(self.model)
        compat.begin_reload(self.model)

    def receive_weights(self, update_info: DovetailUpdateInfo) -> None:
        """Load the weights. Raises TransferError unless every tensor came intact and every parameter of the model got
        its weights."""
        receive = Receive.model_validate(update_info.receive)
        self._arrived = None
        arriving = self._receiver.receive(receive, self._nothing_held)
        try:
            loaded = self.model.load_weights(in_files(self._family, arriving))
        finally:
            arriving.close()  # type: ignore[attr-defined]
        # Models that don't report what they loaded can't be checked.
        missing = [min(names) for names in self._parameters if loaded and not names & set(loaded)]
        if missing and self.model_config.quantization is None:
            raise TransferError(
                f"weights {receive.offer.version} lack {len(missing)} parameters of the model, such as {min(missing)}"
            )
        self._arrived = receive.offer.version

    def finish_weight_update(self) -> None:
        """Finish the update. Raises TransferError if a tied head, or a CUDA graph, does not use the weights that
        arrived."""
        compat.finish_reload(self.model, self.model_config)
        compat.pack_experts(self.model)
        renew(self._tied)
        if self._places is not None:
            self._places.check(self.model)
        LOADED.version = self._arrived

    def send_on(self, request: SendOn) -> dict[str, Any] | None:
        """Send this worker's version to another server. Returns `{"offer": ...}`, or `{"error": one sentence}`, or None
        if another worker sends it."""
        if self._peers is None:
            return None
        try:
            return {"offer": self._peers.send(request).model_dump(mode="json")}
        except (TransferError, OSError, RuntimeError) as error:
            return {"error": str(error)}

    def shutdown(self) -> None:
        self._receiver.close()

    def _nothing_held(self) -> bool:
        return not compat.holds_partial_loads(self.model)


@dataclass(frozen=True)
class Tied:
    """A module, by its name in the model, that shares the weight of `source`."""

    name: str
    module: Any
    source: Any


def tied_modules(model: torch.nn.Module) -> list[Tied]:
    """The heads of a loaded model that share an embedding's weight, on each pipeline stage that has both.

    Trainers send a tied weight once, under the embedding's name. vLLM 0.32's layerwise reload loads it into the
    embedding, whose parameter the head shares, and skips the head ("ParallelLMHead: Failed to load weights"). On GPUs
    the head multiplies by this parameter, so nothing else is needed. On CPUs it multiplies by a packed copy. vLLM makes
    this copy when it loads the head, and would never renew it."""
    first: dict[int, Any] = {}
    found = []
    for name, module in model.named_modules():
        if is_vocabulary(module):
            source = first.setdefault(id(module.weight), module)
            if source is not module:
                found.append(Tied(name, module, source))
    return found


def renew(tied: list[Tied]) -> None:
    """Compute the packed copies of the tied modules' weights again, after vLLM has finished a reload. Raises
    TransferError if a module no longer shares the weight, because it would serve older weights."""
    for one in tied:
        if one.module.weight is not one.source.weight:
            raise TransferError(f"{one.name} is tied to the embedding and did not get its new weights")
        pack_vocabulary(one.module)
