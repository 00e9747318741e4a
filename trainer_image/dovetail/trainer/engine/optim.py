"""AdamW on this rank's shards, exact clipping by the global gradient norm, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dovetail.manifest.training_types import Optimizer
from dovetail.protocol.budgets import OFFLOAD_NUMBERS
from dovetail.trainer import compat


def learning_rate(step: int, total_steps: int, config: Optimizer, warmup_total: int | None = None) -> float:
    """The learning rate of optimizer step `step` (0 for the first) of `total_steps`.

    A linear warm-up over the first ceil(warmup_fraction * total) steps ends at the full rate. Then the rate is
    constant, or falls to 0 linearly or as a cosine. It would be 0 in the step after the last one. If steps were added
    to a run, `warmup_total` is the total for the warm-up, so that it does not begin again."""
    warmup = math.ceil(config.warmup_fraction * (warmup_total or total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "Constant":
        return config.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.schedule == "Linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient. It is the shard of a DTensor, or the tensor itself."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) over named parameters, sharded or not.

    It works on the local shards as plain tensors, with one fused kernel for all. Vectors (norms and biases) have no
    weight decay. Moments are float32 like the parameters. With `offload` they are kept in pinned host memory, and a
    step copies a part of them to the device at a time.

    `steps` counts applied steps."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: Optimizer, total_steps: int) -> None:
        self.parameters, self.config, self.total_steps = parameters, config, total_steps
        self.warmup_total: int | None = None
        self.steps = 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in parameters.items():
            shard = local(parameter)
            self.moments[name] = (self._moment(shard), self._moment(shard))

    def _moment(self, shard: Tensor) -> Tensor:
        """Zeros for a moment, in the memory where it is kept between steps."""
        if not self.offloads(shard.device):
            return torch.zeros_like(shard)
        # The zeros are copied from the device, because filling page-locked memory on the host is slower.
        return torch.empty_like(shard, device="cpu", pin_memory=True).copy_(torch.zeros_like(shard))

    def offloads(self, device: torch.device) -> bool:
        """Whether moments of parameters on `device` are kept in host memory."""
        return self.config.offload and device.type != "cpu"

    def squared_norm(self, skip: Iterable[str] = ()) -> Tensor | None:
        """The sum of squares of this rank's gradient shards, without the parameters named in `skip`. It is a 0-dim
        tensor on their device, float64 and accumulated over tensors in float64, or None if there are no gradients."""
        gradients = [
            local(parameter.grad)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and name not in set(skip)
        ]
        if not gradients:
            return None
        return compat.norms(gradients).double().square().sum()

    def step(self, scale: float) -> float:
        """Apply one step with gradients multiplied by `scale`, then drop them. Returns its learning rate."""
        begun = self.begin(scale)
        begun.finish()
        return begun.rate

    def begin(self, scale: float) -> OptimizerStep:
        """The step that `step` would apply. It can be applied part by part."""
        return OptimizerStep(self, scale, learning_rate(self.steps, self.total_steps, self.config, self.warmup_total))

    def follow(self, rate: float | None, total_steps: int | None, warmup_total: int | None) -> None:
        """Set, from the next step on, the peak learning rate, the total steps and the total for the warm-up. With None
        the old value stays."""
        if rate is not None:
            self.config = self.config.model_copy(update={"learning_rate": rate})
        self.total_steps = total_steps or self.total_steps
        self.warmup_total = warmup_total or self.warmup_total

    def apply(self, names: list[str], rate: float, decay: float, scale: float) -> None:
        """Apply the next step to the parameters `names` only. All of them must have gradients."""
        shards = [local(self.parameters[name]) for name in names]
        gradients = [local(grad) for name in names if (grad := self.parameters[name].grad) is not None]
        if scale != 1.0:
            compat.multiply(gradients, scale)
        first = [self.moments[name][0] for name in names]
        second = [self.moments[name][1] for name in names]
        if not self.offloads(shards[0].device):
            self._update(shards, gradients, first, second, rate, decay)
            return
        device = shards[0].device
        for part in _pieces(zip(shards, gradients, first, second, strict=True), OFFLOAD_NUMBERS):
            weights, slopes, *homes = (list(column) for column in zip(*part, strict=True))
            # All pieces use one stream. So the next one may reuse this one's memory before the host knows it is free.
            m, v = ([each.to(device, non_blocking=True) for each in column] for column in homes)
            self._update(weights, slopes, m, v, rate, decay)
            for home, there in zip(homes[0] + homes[1], m + v, strict=True):
                home.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)

    def _update(
        self,
        shards: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        rate: float,
        decay: float,
    ) -> None:
        """Update these tensors, which are all on one device."""
        adamw(
            shards,
            gradients,
            first,
            second,
            [],
            # They are filled on the device. Copies from the host would each wait for the device.
            list(torch.full((len(shards),), float(self.steps), device=shards[0].device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )


def _pieces(rows: Iterable[tuple[Tensor, ...]], numbers: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Lists of rows whose first tensors have at most `numbers` elements together. The tensors of a row are equally
    large. A row that does not fit is cut."""
    piece: list[tuple[Tensor, ...]] = []
    room = numbers
    for row in rows:
        flat = [tensor.view(-1) for tensor in row]
        start, end = 0, flat[0].numel()
        while start < end:
            stop = min(end, start + room)
            piece.append(tuple(tensor[start:stop] for tensor in flat))
            room -= stop - start
            start = stop
            if not room:
                yield piece
                piece, room = [], numbers
    if piece:
        yield piece


class OptimizerStep:
    """One optimizer step that may be applied to some parameters earlier than to others. Each parameter is updated by
    itself, so the bits of the result are the same. `rate` is the step's learning rate."""

    def __init__(self, optimizer: AdamW, scale: float, rate: float) -> None:
        self.rate = rate
        self._optimizer, self._scale = optimizer, scale
        self._left = dict.fromkeys(optimizer.parameters)

    def apply(self, names: Iterable[str]) -> None:
        """Update those of `names` that are not updated yet, and drop their gradients. Unknown names are ignored."""
        now = [name for name in names if name in self._left]
        parameters = self._optimizer.parameters
        for decayed in (True, False):
            some = [
                name
                for name in now
                if parameters[name].grad is not None
                and (parameters[name].dim() > 1) == decayed
                and local(parameters[name]).numel() > 0
            ]
            if some:
                with torch.no_grad():
                    decay = self._optimizer.config.weight_decay if decayed else 0.0
                    self._optimizer.apply(some, self.rate, decay, self._scale)
        for name in now:
            parameters[name].grad = None
            del self._left[name]

    def finish(self) -> None:
        """Update all remaining parameters and count the step. Call it once."""
        self.apply(list(self._left))
        self._optimizer.steps += 1


def ema_update(averages: Iterable[Tensor], parameters: Iterable[Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * parameter, in place, pair by pair, in the average's dtype.

    Start the averages as copies of the parameters. Then no bias correction is needed. Keep them in float32, because in
    bfloat16 a step of 1 - decay < 2^-8 is lost. Raises ValueError for a decay outside [0, 1] or for different numbers
    of tensors."""
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"ema must be between 0 and 1, not {decay}")
    with torch.no_grad():
        for average, parameter in zip(averages, parameters, strict=True):
            average.lerp_(parameter.detach().to(device=average.device, dtype=average.dtype), 1.0 - decay)
