"""What a mask means, and where numbers are added up in more than their own precision."""

from __future__ import annotations

import torch
from torch import Tensor


def kept(mask: Tensor) -> Tensor:
    """The mask as bool. Raises ValueError for a soft one: a token counts or it does not."""
    if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("a mask holds 0 and 1 alone; per-token weights go into `weights`")
    return mask.bool()


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider: bfloat16's eight bits are too few to subtract or sum in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inside(x: Tensor, mask: Tensor) -> Tensor:
    """x in float32 or wider, and 0 outside the mask. Done to every input first: a nan in the padding must reach neither
    the loss nor, through 0 * nan in a backward pass, the gradient."""
    return torch.where(mask, wide(x), 0.0)
