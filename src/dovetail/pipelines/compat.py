"""Gathers numba, which compiles the kernels if it is installed, and the one private part of it that they need.
tests/unit/pipelines/test_pipelines_simulate.py fails if numba asks for something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import Any

COMPILED = find_spec("numba") is not None
"""Whether numba (the extra `schedules`) is installed. Without it the kernels run several hundred times slower."""
UNCOMPILED_PASSES = 100_000
"""So many passes take a second uncompiled. To import numba and load kernels takes as long, to compile them four."""


class kernel:  # noqa: N801 - a decorator
    """A function that numba compiles when it is first called. It then releases the GIL.

    Importing numba takes a second. A process that only reads or draws schedules does not wait for it. `plain` is the
    function in Python, with the same results."""

    inlined = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self.__doc__ = function.__doc__

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        if not COMPILED:
            return self.plain
        from numba import njit

        options = {"cache": True, "nogil": True, "error_model": "numpy", "forceinline": self.inlined}
        compiled: Callable[..., Any] = njit(**options)(self.plain)
        return compiled

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """Kernels may call each other: numba asks each value that a kernel uses for this attribute (numba 0.65; see
        `numba.core.typing.typeof`). Nothing public says which compiled function a Python object stands for."""
        return self.compiled._numba_type_  # type: ignore[attr-defined]


class light_kernel(kernel):  # noqa: N801 - a decorator
    """A kernel that returns a number and whose first argument is the orders of passes. A process that has little to
    simulate, such as the coordinator of a job without pipelines, runs it uncompiled and does not import numba. The
    results are the same bits."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._left = UNCOMPILED_PASSES

    def __call__(self, orders: Any, *arguments: Any) -> Any:
        if orders.size <= self._left and "numba" not in sys.modules:
            self._left -= orders.size
            return float(self.plain(orders, *arguments))
        return self.compiled(orders, *arguments)


class part(kernel):  # noqa: N801 - a decorator
    """A step of a kernel, which kernels alone call. It is compiled into them, because calls with many arrays would take
    a quarter more time. An uncompiled kernel runs it uncompiled."""

    inlined = True

    def __call__(self, *arguments: Any) -> Any:
        return self.plain(*arguments)
