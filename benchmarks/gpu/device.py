"""Measures the device's own limits with matrix products and copies. Other groups compare their figures with these."""

from __future__ import annotations

import torch

from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import on_device

# Other groups find the limits by these names.
FLOPS, MEMORY, TO_DEVICE, TO_HOST = "matmul peak", "memory bandwidth", "host to device", "device to host"


def run(scale: Scale, report: Report) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # The numbers are random, because a product of zeros takes less power and is faster.
    left, right = (torch.randn(scale.product, scale.product, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = on_device(lambda: torch.mm(left, right, out=out), 10)
    report.add(FLOPS, 2 * scale.product**3 / seconds / 1e12, "TFLOP/s", note=f"{scale.product}^3, {dtype}")

    source = torch.randn(scale.copied // 4, device="cuda")
    target = torch.empty_like(source)
    seconds = on_device(lambda: target.copy_(source), 10)
    report.add(MEMORY, 2 * source.nbytes / seconds / 1e9, "GB/s", note="a copy, bytes read and written")

    host = torch.empty(scale.copied // 4, pin_memory=True)
    host.normal_()
    seconds = on_device(lambda: target.copy_(host, non_blocking=True), 5)
    report.add(TO_DEVICE, host.nbytes / seconds / 1e9, "GB/s", note="page-locked")
    seconds = on_device(lambda: host.copy_(target, non_blocking=True), 5)
    report.add(TO_HOST, host.nbytes / seconds / 1e9, "GB/s", note="page-locked")
