"""What the models use of torch that torch does not promise to keep. tests/unit/test_compat.py says what has moved.

`PRIVATE` lists each with the version it was seen in and the reason; the modules of the packages that build on this one
(`dovetail.trainer.compat`, `dovetail.rollout.compat`) have a list of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist


class Private(NamedTuple):
    """Something without a promise. `name` is module:attribute.attribute, `seen` the release that it was last seen in,
    `reason` why nothing public does."""

    name: str
    seen: str
    reason: str


PRIVATE = (
    Private(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "torch 2.13",
        "to_local() gives a rank's shard, but nothing public says which part of the whole tensor it is",
    ),
    Private(
        "torch.distributed:ProcessGroupGloo._Options",
        "torch 2.13",
        "weights travel between jobs' processes in groups beside the default one, with an address and a deadline each; "
        "new_group knows only ranks of the default group",
    ),
    Private(
        "torch._dynamo.config:suppress_errors",
        "torch 2.13",
        "a layer that torch.compile cannot compile shall run as it is; torch.compiler has no such option",
    ),
)


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a DTensor, and where it begins in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def gloo_group(store: dist.Store, rank: int, world: int, address: str, timeout: timedelta) -> Any:
    """A process group of its own over Gloo, listening at `address`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def run_what_does_not_compile() -> None:
    """Let torch.compile run what it cannot compile as it is. The compiler takes seconds to import."""
    import torch._dynamo.config

    torch._dynamo.config.suppress_errors = True
