"""Finds C libraries of NVIDIA that torch has already loaded."""

from __future__ import annotations

import ctypes


def library(soname: str, function: str) -> ctypes.CDLL:
    """The library that this process already uses for `function`, or else the one called `soname`. Raises OSError if it
    is not found."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, function) else ctypes.CDLL(soname)
