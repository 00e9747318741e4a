"""Log-probabilities and loss over a large vocabulary, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.models.logprobs import gather_logprobs, logprobs_and_entropy
from gpu import device
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import on_device, peak_bytes


def run(scale: Scale, report: Report) -> None:
    logits = torch.randn(scale.rows, scale.vocabulary, device="cuda", dtype=torch.bfloat16).requires_grad_(True)
    tokens = torch.randint(0, scale.vocabulary, (scale.rows,)).cuda()

    def passes(loss: Callable[[Tensor], Tensor]) -> tuple[float, int]:
        def work() -> None:
            logits.grad = None
            loss(logits).backward()

        return on_device(work, scale.repeats), peak_bytes(work)

    def both(x: Tensor) -> Tensor:
        logprobs, entropies = logprobs_and_entropy(x, tokens)
        return entropies.mean() - logprobs.mean()

    plain, most = passes(lambda x: F.cross_entropy(x.float(), tokens))
    # Logits are read twice, their gradient is written once.
    bound = 3 * logits.nbytes / report.device[device.MEMORY] / 1e9
    note = f"({scale.rows}, {scale.vocabulary}) bfloat16, forward and backward"
    for name, loss in (
        ("log-probabilities", lambda x: -gather_logprobs(x, tokens).mean()),
        ("log-probabilities and entropy", both),
    ):
        seconds, memory = passes(loss)
        report.add(name, 1e3 * seconds, "ms", "cross_entropy", 1e3 * plain, note)
        report.add(name, 1e3 * seconds, "ms", "bytes over bandwidth", 1e3 * bound, note)
        report.add(f"{name}, memory", memory / 2**30, "GiB", "cross_entropy", most / 2**30, "with the logits' gradient")
