"""Says whether this machine can compile kernels for its GPUs."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec


@cache
def can_compile() -> bool:
    """Whether this machine has Triton, and the C compiler that Triton needs."""
    return find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))
