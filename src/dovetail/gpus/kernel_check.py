"""Checks whether the installed torch has kernels for the GPUs. Each process that uses GPUs does this first.

This command fails if torch has no kernels for a GPU of that compute capability. The Dockerfiles run it.

    python -m dovetail.gpus.kernel_check 7.0
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from dovetail.gpus.kernels import Capability, capabilities, has_kernels, read_capability, remedy, show
from dovetail.gpus.nvidia_driver import Driver, NoDriver, ask_driver


class GPUGone(OSError):
    """CUDA_VISIBLE_DEVICES names a GPU that the driver no longer has. The message is one sentence."""


def my_capability() -> Capability | None:
    """The lowest compute capability of the GPUs that this process sees. None without GPUs. torch makes no CUDA context
    for this. Raises ValueError if the driver does not work or the installed torch cannot use one of the GPUs. A restart
    does not help then. Raises GPUGone if the process was given a GPU and there is none: a CPU would compute results
    that differ in some bits."""
    try:
        driver = ask_driver()
    except NoDriver:
        return None
    if not driver.devices:
        _refuse_cpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return None
    # Otherwise torch asks the CUDA runtime, which would make a context here. Forked processes could then use no GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if problem := torch_problem(driver, torch.__version__, torch.version.cuda, architectures()):
        raise ValueError(problem)
    return min(device.capability for device in driver.devices)


def _refuse_cpus(given: str) -> None:
    """Raises GPUGone if `given` names a GPU and the installed torch would use it."""
    import torch

    if torch.version.cuda is not None and re.match(r"\s*(\d|GPU-|MIG-)", given):
        raise GPUGone(
            f"CUDA_VISIBLE_DEVICES gave this process GPU {given}, and the driver shows none; see whether nvidia-smi "
            "works on the node, or set it to -1 to compute on CPUs"
        )


def architectures() -> list[str]:
    """The GPU architectures for which the installed torch has kernels, such as sm_80. Empty for a torch without
    CUDA."""
    import torch

    # On a machine without GPUs torch gives no list. Images are built there, so we read torch's build settings instead.
    settings = torch.__config__.show() if torch.version.cuda else ""
    named = re.findall(r"code=\[?((?:sm|compute)_\d+[af]?)\b", settings)
    return torch.cuda.get_arch_list() or list(dict.fromkeys(named))


def torch_problem(driver: Driver, torch: str, cuda: str | None, built_for: Sequence[str]) -> str | None:
    """One sentence on why a torch that was built for `cuda` cannot use one of the GPUs. None if it can. A torch without
    CUDA has no problem, because it works on CPUs."""
    if cuda is None:
        return None
    wanted = int(cuda.split(".")[0])
    if driver.cuda[0] < wanted:
        return (
            f"the NVIDIA driver serves CUDA {show(driver.cuda)}, and torch {torch} is built for CUDA {cuda}; update "
            f"the node's driver to one that serves CUDA {wanted}, or build an image with a torch for CUDA "
            f"{driver.cuda[0]} (docs/images.md)"
        )
    for device in driver.devices if built_for else ():
        if not has_kernels(built_for, device.capability):
            return (
                f"GPU {device.index} ({device.name}) has compute capability {show(device.capability)}, and torch "
                f"{torch} has kernels for {capabilities(built_for)}; {remedy(device.capability)}"
            )
    return None


def main(argv: Sequence[str]) -> int:
    """Check the compute capabilities in the arguments. Returns the exit code: 1 if torch has no kernels for one of
    them, 2 if one is not a compute capability, else 0."""
    import torch

    built = architectures()
    for text in argv:
        try:
            capability = read_capability(text)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if not has_kernels(built, capability):
            there = f"torch {torch.__version__} has kernels for {capabilities(built)}"
            print(f"{there}, not for {text}; {remedy(capability)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
