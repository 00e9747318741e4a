"""Keeps a scorer's weights in page-locked host memory. The scorer has the GPU only while the server beside it sleeps
(RLHFuse section 6).

The weights are copied to the GPU on a CUDA stream of their own. So forward passes in progress, and the server's last
decode steps, do not wait for the copies. Work that uses the weights waits for them on the device, and the host does not
wait. Nothing is copied back, because weights are only read. New weights are written to host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

# So much is left free for activations, and for the memory that the server keeps while it sleeps.
MARGIN_BYTES = 2 * 2**30


class CudaCopies:
    """The operations on a GPU that weights in host memory need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()

    def pinned(self, tensor: Tensor) -> Tensor:
        """The same values in page-locked host memory."""
        return tensor.detach().cpu().pin_memory()

    def bring(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy host tensors to the device, all at once, and do not wait."""
        # Work that still runs may use the memory that was freed.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = {
                name: torch.empty_like(t, device=self._device).copy_(t, non_blocking=True)
                for name, t in tensors.items()
            }
            self._event.record(self._stream)
        return copies

    def arrived(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the device's later work wait for the copies that `bring` has begun."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for tensor in tensors.values():
            # The allocator must not reuse the memory before all work of the `current` stream is done.
            tensor.record_stream(current)

    def drop(self) -> None:
        """Give memory back to other processes, if no tensor uses it any more."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """The bytes of device memory that may be used."""
        return int(torch.cuda.mem_get_info(self._device)[0])


class HostWeights:
    """The weights of a model or of one of its stages. After `use`, `module` computes with the copies on the device.
    Otherwise it holds the weights in host memory. It is not thread-safe."""

    def __init__(self, module: nn.Module, copies: CudaCopies) -> None:
        self._copies = copies
        self._parameters = dict(module.named_parameters())
        self._host: dict[str, Tensor] = {}
        # Tied parameters share their copy, because `named_parameters` names each only once.
        for name, parameter in self._parameters.items():
            self._host[name] = copies.pinned(parameter.data)
            parameter.data = self._host[name]
        self._there: dict[str, Tensor] | None = None
        self._arrived = False

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._host.values())

    @property
    def on_device(self) -> bool:
        """Whether the copies are on the device, or on their way."""
        return self._there is not None

    def bring(self) -> None:
        """Begin to copy, if that was not done yet."""
        if self._there is None:
            self._there, self._arrived = self._copies.bring(self._host), False

    def use(self) -> None:
        """Let `module` run on the device from now on."""
        self.bring()
        if not self._arrived:
            assert self._there is not None
            self._copies.arrived(self._there)
            for name, parameter in self._parameters.items():
                parameter.data = self._there[name]
            self._arrived = True

    def leave(self) -> None:
        """Remove the weights from the device. `CudaCopies.drop` then frees the memory."""
        for name, parameter in self._parameters.items():
            parameter.data = self._host[name]
        self._there, self._arrived = None, False

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights. `tensors` has at least all weights of the module. The copies on the device are
        dropped."""
        self.leave()
        for name, tensor in self._host.items():
            tensor.copy_(tensors[name])


class HostModels:
    """The models of a scorer, by name, in the order in which the devices need them. `copies` has one entry for each
    device. Stage k of a model is on device k."""

    def __init__(self, copies: Sequence[CudaCopies], margin_bytes: int = MARGIN_BYTES) -> None:
        self._copies, self._margin = tuple(copies), margin_bytes
        self._models: dict[str, list[HostWeights]] = {}

    def hold(self, name: str, stages: Sequence[nn.Module]) -> None:
        """Copy a model's weights to host memory. They replace the weights of a model of that name."""
        self._models[name] = [HostWeights(stage, each) for stage, each in zip(stages, self._copies, strict=False)]

    def forget(self, name: str) -> None:
        self._models.pop(name, None)

    def bring(self) -> list[str]:
        """Begin to copy as many models as there is room for. Returns the models that are on the devices or on their
        way."""
        for stages in self._models.values():
            if self._has_room(stages):
                for stage in stages:
                    stage.bring()
        return [name for name, stages in self._models.items() if all(stage.on_device for stage in stages)]

    def use(self, name: str) -> None:
        """Prepare for a forward pass of that model. If there is no room, the other models leave the device."""
        stages = self._models[name]
        if not self._has_room(stages):
            self.leave()
        for stage in stages:
            stage.use()

    def _has_room(self, stages: Sequence[HostWeights]) -> bool:
        return all(
            stage.on_device or stage.nbytes + self._margin <= each.free_bytes()
            for stage, each in zip(stages, self._copies, strict=False)
        )

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights of a model. Each tensor goes to the stage that has it."""
        for stage in self._models[name]:
            stage.write(tensors)

    def leave(self) -> None:
        """Remove all models from the devices, before the server wakes."""
        for stages in self._models.values():
            for stage in stages:
                stage.leave()
        for each in self._copies:
            each.drop()
