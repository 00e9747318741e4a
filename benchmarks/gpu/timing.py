"""Measures the seconds of work on the device, its memory, and its requests to the device."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]
COUNTED = ("launches", "h2d", "d2h", "synchronisations")


def on_device(work: Work, repeats: int, warm: int = 2) -> float:
    """The seconds between two events around the work. It is the median of `repeats` runs, after `warm` runs that do not
    count."""
    found = []
    for turn in range(warm + repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        if turn >= warm:
            found.append(first.elapsed_time(last) / 1e3)
    return max(statistics.median(found), 1e-9)


def by_clock(work: Work, repeats: int, warm: int = 1) -> float:
    """The seconds until the device is done, the host's work included. It is the median, as in `on_device`."""
    found = []
    for turn in range(warm + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if turn >= warm:
            found.append(time.perf_counter() - start)
    return max(statistics.median(found), 1e-9)


def asked(work: Work) -> dict[str, int]:
    """The numbers of kernel launches, of copies from the host and to it, and of waits for the device. They come from
    torch's profiler. It does not know the null GPU, so there they come from the null GPU's counters."""
    try:
        read = ctypes.CDLL(None).nullgpu_count
    except AttributeError:
        return _profiled(work)
    read.restype = ctypes.c_long
    before = {name: read(name.encode()) for name in COUNTED}
    work()
    torch.cuda.synchronize()
    return {name: read(name.encode()) - before[name] for name in COUNTED}


def _profiled(work: Work) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found = dict.fromkeys(COUNTED, 0)
    for event in profiler.key_averages():
        if event.key.startswith("cu") and "LaunchKernel" in event.key:
            found["launches"] += event.count
        elif event.key.startswith("cuda") and "Synchronize" in event.key:
            found["synchronisations"] += event.count
        elif event.key.startswith("Memcpy HtoD"):
            found["h2d"] += event.count
        elif event.key.startswith("Memcpy DtoH"):
            found["d2h"] += event.count
    return found


def peak_bytes(work: Work) -> int:
    """The most bytes that were allocated on the device during the work, beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def free() -> None:
    """Give back memory that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()
