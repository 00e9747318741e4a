"""Measures the optimizer's step, gradient clipping and the averaged weights."""

from __future__ import annotations

import torch

from dovetail.manifest.training_types import Optimizer
from dovetail.trainer.engine.engine import ema_update
from dovetail.trainer.engine.optim import AdamW
from gpu import device, models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import by_clock, free


def run(scale: Scale, report: Report) -> None:
    shapes = [p.shape for p in models.stock_model(scale, scale.layers, "value").parameters()]
    free()
    work = _Work(scale, report, [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes])
    work.steps()
    free()
    work.averages()


class _Work:
    """Measures work on these weights."""

    def __init__(self, scale: Scale, report: Report, weights: list[torch.nn.Parameter]) -> None:
        self.repeats, self.report, self.weights = scale.repeats, report, weights
        self.count = sum(weight.numel() for weight in weights)
        self.note = f"{self.count / 1e9:.3g} billion parameters in {len(weights)} tensors"

    def add(self, name: str, seconds: float, anchor: str, beside: float) -> None:
        self.report.add(name, 1e3 * seconds, "ms", anchor, 1e3 * beside, self.note)

    def bound(self, bytes_each: int) -> float:
        """The seconds in which the memory can move so many bytes for each parameter."""
        return bytes_each * self.count / self.report.device[device.MEMORY] / 1e9

    def steps(self) -> None:
        gradients = [torch.randn_like(weight) for weight in self.weights]
        norm, plain, clipped = self._ours(gradients)
        free()
        # Weight, gradient and moments are read, and all but the gradient are written. Clipping reads and writes the
        # gradient.
        self.add("gradient norm", norm, "bytes over bandwidth", self.bound(4))
        self.add("optimizer step", plain, "bytes over bandwidth", self.bound(28))
        self.add("optimizer step, clipped", clipped, "bytes over bandwidth", self.bound(36))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        stock = torch.optim.AdamW(self.weights, lr=1e-6, fused=True)
        self.add("optimizer step", plain, "torch.optim.AdamW, fused", by_clock(stock.step, self.repeats))

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(self.weights, 1e-6)
            stock.step()

        theirs = by_clock(clip, self.repeats)
        self.add("gradient norm and clipped step", norm + clipped, "clip_grad_norm_ and AdamW of torch", theirs)
        for weight in self.weights:
            weight.grad = None

    def _ours(self, gradients: list[torch.Tensor]) -> tuple[float, float, float]:
        """The seconds of the norm, of a step, and of a step that clips."""
        made = AdamW({str(i): weight for i, weight in enumerate(self.weights)}, Optimizer(), 1000)

        def step(scaled: float | None) -> None:
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            if scaled is not None:
                made.step(scaled)

        step(None)
        norm = by_clock(made.squared_norm, self.repeats)
        return norm, by_clock(lambda: step(1.0), self.repeats), by_clock(lambda: step(0.999), self.repeats)

    def averages(self) -> None:
        averages = [weight.detach().clone() for weight in self.weights]
        seconds = by_clock(lambda: ema_update(averages, self.weights, 0.99), self.repeats)
        self.add("averaged weights", seconds, "bytes over bandwidth", self.bound(12))
