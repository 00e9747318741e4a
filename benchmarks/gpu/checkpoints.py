"""Measures how a checkpoint is saved and loaded."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from dovetail.trainer.engine import checkpoint
from gpu import device, models
from gpu.report import Report
from gpu.scale import Scale

_BLOCK = 64 * 2**20


def run(scale: Scale, report: Report) -> None:
    folder = Path(tempfile.mkdtemp(prefix="dovetail-bench-"))
    try:
        # If the device has much memory, the checkpoint must still fit on a small disk.
        with models.one_rank() as groups:
            engine = models.engine(groups, scale, max(1, scale.few_layers // 2), ["critic"])
            saved = _seconds(lambda: engine.save(folder / "saved"))
            size = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
            loaded = _seconds(lambda: checkpoint.restore(engine, folder / "saved"))
        rate = size / 1e9
        written, read = _disk(folder / "plain", size)
        note = f"{size / 2**30:.2g} GiB"
        report.add("save", rate / saved, "GB/s", "one file written and flushed", rate / written, note)
        report.add("save", rate / saved, "GB/s", "device to host", report.device[device.TO_HOST], note)
        report.add("load", rate / loaded, "GB/s", "one file read, from the cache", rate / read, note)
        report.add("load", rate / loaded, "GB/s", "host to device", report.device[device.TO_DEVICE], note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(work: object) -> float:
    assert callable(work)
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return max(time.perf_counter() - start, 1e-9)


def _disk(path: Path, size: int) -> tuple[float, float]:
    """The seconds to write and to read as many bytes in one file."""
    block = os.urandom(min(size, _BLOCK))

    def write() -> None:
        with path.open("wb") as file:
            for _ in range(-(-size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb") as file:
            while file.read(_BLOCK):
                pass

    return _seconds(write), _seconds(read)
