"""numba where it is installed; without it the kernels run as plain Python, several hundred times slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from numba import njit as _njit

    COMPILED = True
except ImportError:  # the `schedules` extra is not installed
    COMPILED = False


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, keep on disk, and release the GIL while running."""
    return _njit(cache=True, nogil=True)(function) if COMPILED else function
