"""Measures tensors that leave the GPU for a while. These are a scorer's weights and the optimizer's moments."""

from __future__ import annotations

import importlib.util

import torch

from dovetail.manifest.training_types import Optimizer
from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.host_weights import CudaCopies
from dovetail.trainer.engine.optim import AdamW
from gpu import device, models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import by_clock, free


def run(scale: Scale, report: Report) -> None:
    _scorer(scale, report)
    free()
    _moments(scale, report)
    missing = importlib.util.find_spec("vllm") is None
    why = "vLLM is not installed" if missing else "no file has this figure yet"
    report.skip("vLLM's sleep and wake", why)


def _scorer(scale: Scale, report: Report) -> None:
    made = ModelScorer("cuda:0", torch.bfloat16, copies=[CudaCopies(torch.device("cuda:0"))])
    with models.random_weights():
        made.load({"reference": models.reference(scale, scale.few_layers, "lm")})
    assert made.host is not None
    size = sum(p.nbytes for p in made.require("reference").stages[0].parameters())

    def wake() -> None:
        made.bring()
        made.host.use("reference")

    def both() -> None:
        wake()
        torch.cuda.synchronize()
        made.leave()

    asleep = by_clock(both, scale.repeats)
    rate = size / asleep / 1e9
    note = f"{size / 2**30:.2g} GiB, there and gone again"
    report.add("a scorer wakes and sleeps", rate, "GB/s", "host to device", report.device[device.TO_DEVICE], note)


def _moments(scale: Scale, report: Report) -> None:
    hidden, inner = scale.config["hidden_size"], scale.config["intermediate_size"]
    shapes = [(inner, hidden)] * (3 * scale.few_layers)
    weights = {str(i): torch.nn.Parameter(torch.randn(shape, device="cuda")) for i, shape in enumerate(shapes)}
    made = AdamW(weights, Optimizer(offload=True), 1000)

    def step() -> None:
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        made.step(1.0)

    seconds = by_clock(step, scale.repeats)
    size = 8 * sum(weight.numel() for weight in weights.values())
    both = size / report.device[device.TO_DEVICE] / 1e9 + size / report.device[device.TO_HOST] / 1e9
    note = f"moments of {size / 2**30:.2g} GiB come and go"
    report.add("a step with moments on the host", 1e3 * seconds, "ms", "bytes over PCIe", 1e3 * both, note)
