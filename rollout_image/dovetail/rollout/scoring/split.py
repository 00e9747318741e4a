"""Splits a scorer's model by layers over GPUs of its pod. A forward pass goes from device to device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.manifest.model_families import ModelFamily
from dovetail.models import PipelineStage, build_stage
from dovetail.models.config import load_config
from dovetail.models.layers.packing import Past
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.pulse import PROGRESS

R = TypeVar("R")


@dataclass(frozen=True)
class StagePass(Generic[R]):
    """One forward pass with the inputs of `Stage.forward`, `tokens` (total,) int64 and `wanted` (n,) int64. If `asks`
    is given, it returns for a stage's device the predictions that are wanted in place of logits. `read` makes the
    result from the last stage's output. All stages put their layers' keys and values into the caches of `pasts`."""

    tokens: NDArray[np.int64]
    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...]
    wanted: NDArray[np.int64]
    read: Callable[[Tensor | Predicted], R]
    asks: Callable[[torch.device], Predictions] | None = None
    pasts: tuple[Past | None, ...] | None = None


class SplitModel:
    """A model's stages in order, each on a device of its own (several may be the same CPU)."""

    def __init__(self, stages: Sequence[PipelineStage], devices: Sequence[torch.device]) -> None:
        self.stages, self.devices = tuple(stages), tuple(devices)

    @property
    def config(self) -> Any:
        return self.stages[0].config

    @property
    def family(self) -> ModelFamily:
        return self.stages[0].family

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all stages, with the names of the whole model."""
        for stage in self.stages:
            yield from stage.named_parameters()

    def homes(self) -> dict[str, tuple[torch.Size, torch.device, torch.dtype]]:
        """The shape, device and dtype of each parameter."""
        return {
            name: (parameter.shape, device, parameter.dtype)
            for stage, device in zip(self.stages, self.devices, strict=True)
            for name, parameter in stage.named_parameters()
        }

    def run(self, passes: Iterable[StagePass[R]]) -> Iterator[R]:
        """The result of each pass, in their order. A result comes when the next pass has begun, so that no GPU is idle
        while the host reads it. With several stages, stage k works on a pass while stage k + 1 works on the one before.
        Each stage has a thread, so a wait for one device does not delay another device."""
        if len(self.stages) == 1:
            begun: deque[R] = deque()
            for each in passes:
                begun.append(self._read(each, self._stage(0, each, torch.from_numpy(each.tokens)[None])))
                if len(begun) > 1:
                    yield begun.popleft()
            yield from begun
            return
        workers = [ThreadPoolExecutor(1, thread_name_prefix=f"stage-{k}") for k in range(len(self.stages))]
        under_way: deque[Future[R]] = deque()
        try:
            for each in passes:
                under_way.append(self._begin(workers, each))
                if len(under_way) > len(self.stages):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for worker in workers:
                worker.shutdown(cancel_futures=True)

    def _begin(self, workers: Sequence[ThreadPoolExecutor], each: StagePass[R]) -> Future[R]:
        last = len(self.stages) - 1

        def first() -> Tensor:
            return self._hidden(0, each, torch.from_numpy(each.tokens)[None])

        def further(k: int, before: Future[Tensor]) -> Tensor:
            return self._hidden(k, each, before.result())

        def end(before: Future[Tensor]) -> R:
            return self._read(each, self._stage(last, each, before.result()))

        future = workers[0].submit(first)
        for k in range(1, last):
            future = workers[k].submit(further, k, future)
        return workers[last].submit(end, future)

    def _hidden(self, k: int, each: StagePass[R], inputs: Tensor) -> Tensor:
        found = self._stage(k, each, inputs)
        assert isinstance(found, Tensor)
        return found

    # Each thread has its own inference mode.
    def _stage(self, k: int, each: StagePass[R], inputs: Tensor) -> Tensor | Predicted:
        stage, device = self.stages[k], self.devices[k]
        with torch.inference_mode():
            # The host does not wait, because CUDA copies memory that is not page-locked.
            wanted = torch.from_numpy(each.wanted).to(device, non_blocking=True) if stage.is_last else None
            predictions = each.asks(device) if stage.is_last and each.asks is not None else None
            inputs = inputs.to(device, non_blocking=True)
            # Kernels that do not know a tensor's device run on the thread's device.
            with torch.cuda.device_of(inputs):
                found = stage(inputs, each.lengths, wanted, each.prefixes, predictions=predictions, pasts=each.pasts)
        PROGRESS.made()
        assert isinstance(found, Tensor | Predicted)  # a scorer's models have one head
        return found

    def _read(self, each: StagePass[R], found: Tensor | Predicted) -> R:
        tensor = found if isinstance(found, Tensor) else found.logprobs
        with torch.inference_mode(), torch.cuda.device_of(tensor):
            return each.read(found)


def build_split(
    ref: ModelRef, stages: int, devices: Sequence[torch.device], dtype: torch.dtype, *, on_host: bool = False
) -> SplitModel:
    """The model in `stages` stages, or as many as it has layers, one on each of the first of `devices`. With `on_host`
    the parameters are in host memory, and only the other tensors are on the devices. Raises
    `dovetail.models.ModelError`."""
    count = min(stages, int(load_config(ref).num_hidden_layers))
    places = [torch.device(device) for device in devices[:count]]
    built = []
    for k, device in enumerate(places):
        stage = build_stage(ref, k, len(places), "cpu" if on_host else device, dtype)
        if on_host:
            stage.place_buffers(device)
        built.append(stage)
    return SplitModel(built, places)
