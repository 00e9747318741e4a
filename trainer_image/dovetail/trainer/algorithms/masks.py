"""The meaning of a mask, and the precision in which numbers are added up."""

from __future__ import annotations

import torch
from torch import Tensor


def kept(mask: Tensor) -> Tensor:
    """The mask as bool. Raises ValueError if it holds other numbers than 0 and 1, because a token counts or it does
    not."""
    if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("a mask holds 0 and 1 alone; per-token weights go into `weights`")
    return mask.bool()


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider. The eight significant bits of bfloat16 are too few for sums and differences."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inside(x: Tensor, mask: Tensor) -> Tensor:
    """x in float32 or wider, and 0 outside the mask. Every input goes through it first. So a nan in the padding reaches
    neither the loss nor, through 0 * nan in a backward pass, the gradient."""
    return torch.where(mask, wide(x), 0.0)
