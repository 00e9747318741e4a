"""Memory of the null GPU as torch's allocators see it."""

from __future__ import annotations

import os
from typing import Any

import torch
from worker import Place

GIB = 2**30


def accounts(place: Place, conf: str) -> dict[str, Any]:
    """What is allocated, reserved and free, in GiB, after tensors of 1, 2 and 3 GiB, of which the first went before the
    others; then whether 100 GiB are refused, and whether 40 GiB of page-locked memory are zeros after zeros came."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf

    def made(gib: int) -> torch.Tensor:
        return torch.zeros(gib * GIB, dtype=torch.uint8, device="cuda")

    made(1)
    kept = [made(2), made(3)]
    found = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]]
    host = torch.empty(40 * GIB, dtype=torch.uint8, pin_memory=True)
    host[:: 10 * GIB].fill_(1)
    host.copy_(torch.zeros(1, dtype=torch.uint8, device="cuda").expand(40 * GIB).contiguous())
    try:
        made(100)
    except torch.OutOfMemoryError:
        refused = True
    del kept
    return {"gib": [size / GIB for size in found], "refused": refused, "host": int(host[:: 10 * GIB].sum())}
