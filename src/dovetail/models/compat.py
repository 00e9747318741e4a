"""Gathers the private parts of torch and transformers that the models use. These libraries do not promise to keep them.
tests/unit/rollout/test_compat.py fails if one of them has moved.

`PRIVATE` lists each part with the last version that had it, and the reason for using it. The packages that build on
this one have lists of their own (`dovetail.trainer.compat`, `dovetail.rollout.compat`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist


class Private(NamedTuple):
    """A private part of a library. `name`: module:attribute.attribute. `seen`: the last release that had it. `reason`:
    why nothing public can replace it."""

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
    Private(
        "torch._dynamo.config:specialize_float",
        "torch 2.13",
        "with the factor of the scores as a variable torch compiles a part of each layer twice, once in vain; "
        "torch.compiler has no such option",
    ),
    Private(
        "transformers.integrations.moe:grouped_mm_experts_forward",
        "transformers 5.19",
        "on CPUs a scorer fills each expert's tokens up to a multiple before (layers/expert_routing.py)",
    ),
)


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and the offset of this part in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def gloo_group(store: dist.Store, rank: int, world: int, address: str, timeout: timedelta) -> Any:
    """A separate process group over Gloo, which listens at `address`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def prepare_compiler() -> None:
    """Set torch.compile's options. Code that it cannot compile runs uncompiled. Floating-point numbers of layers are
    constants. Importing the compiler takes seconds."""
    import torch._dynamo.config

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.specialize_float = True
