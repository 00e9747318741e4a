"""This machine's figures in the planner's format, measured with a large matrix product, a copy and a message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dovetail.protocol.files.machine_profile import LinkTimes

GIB = 2**30
REPEATS = 7
_SIZES = {"cpu": 1024, "cuda": 8192}
_BYTES = {"cpu": 64 * 2**20, "cuda": GIB}


def hardware_toml(device: torch.device, link: LinkTimes | None, clock: Callable[[], float] = time.perf_counter) -> str:
    """An entry of gpus.toml (`dovetail.gpus.gpu_products`), named like the node label of the product ("cpu" for a CPU).

    `link` holds the times between two GPUs of this machine, if they were measured. `clock` gives seconds."""
    gpu = device.type == "cuda"
    dtypes = [torch.float32]
    if gpu:
        dtypes += [torch.float16] + ([torch.bfloat16] if torch.cuda.get_device_capability(device) >= (8, 0) else [])
    flops = {str(dtype).removeprefix("torch."): _flops(device, dtype, clock) for dtype in dtypes}
    size = _BYTES[device.type] // 4
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    memory = 2 * 4 * size / _seconds(lambda: target.copy_(source), device, clock)
    host = torch.ones(size // 4, pin_memory=True) if gpu else source
    pcie = 4 * len(host) / _seconds(lambda: target[: len(host)].copy_(host), device, clock)
    peer = link.bytes_per_second if gpu and link is not None else 0.0
    name = torch.cuda.get_device_name(device).replace(" ", "-") if gpu else "cpu"
    major, minor = torch.cuda.get_device_capability(device) if gpu else (0, 0)
    table = ", ".join(f"{dtype} = {value / 1e12:.4g}" for dtype, value in flops.items())
    return (
        f'["{name}"]\n'
        'source = "measured by dovetail profile"\n'
        f"tflops = {{ {table} }}\n"
        f"memory_gib = {_memory(device) / GIB:.4g}\n"
        f"memory_gbps = {memory / 1e9:.4g}\n"
        f"nvlink_gbps = {(peer if peer > pcie else 0.0) / 1e9:.4g}\n"
        f"pcie_gbps = {pcie / 1e9:.4g}\n"
        f"capability = [{major}, {minor}]\n"
    )


def _flops(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    size = _SIZES[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device, clock)


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """The median seconds of REPEATS runs, after one warm-up run that does not count."""
    found = []
    for _ in range(REPEATS + 1):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - start)
    return max(statistics.median(found[1:]), 1e-9)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
