"""`python -m MODULE ARGUMENTS`, in a process that has vLLM's imports."""

from __future__ import annotations

import runpy
import sys


def main(arguments: list[str]) -> int:
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0
