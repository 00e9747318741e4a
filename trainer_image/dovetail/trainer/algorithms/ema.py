"""Exponential moving average of parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def ema_update(averages: Iterable[Tensor], parameters: Iterable[Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * parameter, in place, pair by pair, in the average's dtype.

    Start the averages as copies of the parameters. Then no bias correction is needed. Keep them in float32, because in
    bfloat16 a step of 1 - decay < 2^-8 is lost. Raises ValueError for a decay outside [0, 1] or for different numbers
    of tensors."""
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"ema must be between 0 and 1, not {decay}")
    with torch.no_grad():
        for average, parameter in zip(averages, parameters, strict=True):
            average.lerp_(parameter.detach().to(device=average.device, dtype=average.dtype), 1.0 - decay)
