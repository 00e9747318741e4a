"""Measures log-probabilities and loss over a large vocabulary, forward and backward. They are computed from existing
logits, and from hidden states without the whole logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.models.layers.logprobs import gather_logprobs, logprobs_and_entropy
from dovetail.models.layers.predictions import Predictions, Vocabulary, by_chunks
from gpu import device
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import on_device, peak_bytes


def run(scale: Scale, report: Report) -> None:
    tokens = torch.randint(0, scale.vocabulary, (scale.rows,)).cuda()
    _from_logits(scale, report, tokens)
    _from_hidden_states(scale, report, tokens)


def _measured(scale: Scale, inputs: list[Tensor], loss: Callable[..., Tensor]) -> tuple[float, int]:
    """The seconds and bytes of a forward and a backward pass."""

    def work() -> None:
        for each in inputs:
            each.grad = None
        loss(*inputs).backward()

    return on_device(work, scale.repeats), peak_bytes(work)


def _from_logits(scale: Scale, report: Report, tokens: Tensor) -> None:
    logits = torch.randn(scale.rows, scale.vocabulary, device="cuda", dtype=torch.bfloat16).requires_grad_(True)

    def both(x: Tensor) -> Tensor:
        logprobs, entropies = logprobs_and_entropy(x, tokens)
        return entropies.mean() - logprobs.mean()

    plain, most = _measured(scale, [logits], lambda x: F.cross_entropy(x.float(), tokens))
    # Logits are read twice, and their gradient is written once.
    bound = 3 * logits.nbytes / report.device[device.MEMORY] / 1e9
    note = f"({scale.rows}, {scale.vocabulary}) bfloat16, forward and backward"
    for name, loss in (
        ("log-probabilities", lambda x: -gather_logprobs(x, tokens).mean()),
        ("log-probabilities and entropy", both),
    ):
        seconds, memory = _measured(scale, [logits], loss)
        report.add(name, 1e3 * seconds, "ms", "cross_entropy", 1e3 * plain, note)
        report.add(name, 1e3 * seconds, "ms", "bytes over bandwidth", 1e3 * bound, note)
        report.add(f"{name}, memory", memory / 2**30, "GiB", "cross_entropy", most / 2**30, "with the logits' gradient")


def _from_hidden_states(scale: Scale, report: Report, tokens: Tensor) -> None:
    """Measure them as the trainer's last stage computes them, with the entropy's value but not its gradient."""
    width = scale.config["hidden_size"]
    hidden, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (scale.rows, scale.vocabulary))
    inputs = [hidden.requires_grad_(True), weight.mul_(0.02).requires_grad_(True)]
    asked = Predictions(tokens, entropy="value")
    stock: dict[str, Callable[..., Tensor]] = {
        "linear, cross_entropy": lambda h, w: F.cross_entropy(F.linear(h, w).float(), tokens)
    }
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()
        stock["linear_cross_entropy"] = lambda h, w: F.linear_cross_entropy(h, w, tokens, options=options)
    seconds, memory = _measured(scale, inputs, lambda h, w: -by_chunks(h, Vocabulary(w), asked).logprobs.mean())
    name, note = (
        "log-probabilities from hidden states",
        f"({scale.rows}, {width}) to a vocabulary of {scale.vocabulary}, bfloat16",
    )
    for other, loss in stock.items():
        its, most = _measured(scale, inputs, loss)
        report.add(name, 1e3 * seconds, "ms", other, 1e3 * its, note)
        report.add(f"{name}, memory", memory / 2**30, "GiB", other, most / 2**30, "with the weight's gradient")
    # The logits are computed twice, and both gradients once.
    bound = 4 * 2 * scale.rows * scale.vocabulary * width / report.device[device.FLOPS] / 1e12
    report.add(name, 1e3 * seconds, "ms", "4 products at the matmul peak", 1e3 * bound, note)
