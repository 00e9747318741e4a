"""Tells a GPU that failed from other errors. After a fault of the memory, of a kernel or of the link, CUDA answers
every later call of the process with the same error. Only a new process can use the GPU again, or find that it is
gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class GPUFailed(RuntimeError):
    """This process can no longer use its GPU. It must end and be restarted."""


def names_cuda(error: BaseException) -> bool:
    """Whether the error comes from CUDA, its libraries or a compiled kernel. A lack of memory does not count."""
    words = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words) and not _memory(error)


def context_is_lost(devices: Sequence[Any] = ()) -> bool:
    """Whether CUDA refuses all further work of this process on one of `devices` (default: the thread's device). It
    waits until the devices have finished their work. Name only devices that the process uses, because others would
    get a CUDA context."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        for device in devices or [torch.cuda.current_device()]:
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
