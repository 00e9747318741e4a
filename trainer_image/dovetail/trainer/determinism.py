"""The same bits from the same step."""

from __future__ import annotations

import os

import torch


def choose_algorithms(deterministic: bool) -> None:
    """Let torch use deterministic algorithms alone: always on CPUs, on GPUs if `deterministic`. There an operation that
    has none fails."""
    gpu = torch.cuda.is_available()
    torch.utils.deterministic.fill_uninitialized_memory = False
    if deterministic or not gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With `warn_only` the backward pass of flash attention stays as it is, and its sums differ from run to run.
        torch.use_deterministic_algorithms(True, warn_only=not gpu)
