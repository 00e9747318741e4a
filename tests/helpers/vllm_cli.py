"""`python -m MODULE ARGUMENTS`, in a process that has vLLM's imports."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from helpers.nursery import NURSERY, Adopted


def main(arguments: list[str]) -> int:
    from dovetail.rollout.compat import fork_engine_core

    fork_engine_core()  # vLLM would spawn it, and it would import all again
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


def started(command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> Adopted:
    """For tests in place of `dovetail.tools.serving.served_result._started`: the same command, forked from a process
    that has the imports, and with its engine in one process."""
    one = {**environment, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return NURSERY.fork(Path(log.name), one, "helpers.vllm_cli", *command[3:])
