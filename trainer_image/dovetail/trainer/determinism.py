"""Makes the same step give the same bits."""

from __future__ import annotations

import os

import torch


def choose_algorithms(deterministic: bool) -> None:
    """Make torch use only deterministic algorithms, on CPUs always and on GPUs if `deterministic`. On a GPU an
    operation without such an algorithm then fails."""
    gpu = torch.cuda.is_available()
    torch.utils.deterministic.fill_uninitialized_memory = False
    if deterministic or not gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With `warn_only`, flash attention keeps its own backward pass, whose sums differ from run to run.
        torch.use_deterministic_algorithms(True, warn_only=not gpu)
