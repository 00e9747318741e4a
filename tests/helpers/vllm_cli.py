"""`python -m MODULE ARGUMENTS`, in a process that has vLLM's imports."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import ClassVar

from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import Event, Started
from helpers.nursery import NurserySpawner


def main(arguments: list[str]) -> int:
    from dovetail.rollout.compat import fork_engine_core

    fork_engine_core()  # vLLM would spawn it, and it would import all again
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


class VLLMSpawner(NurserySpawner):
    """For tests in place of the ExecSpawner of `served_result`: the same command, forked from a process that has the
    imports, and with its engine in one process."""

    begun: ClassVar[list[int]] = []  # the ids of all processes

    def spawn(self, spec: ProcessSpec) -> None:
        env = {**spec.env, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        super().spawn(replace(spec, module=__name__, arguments=[spec.module, *spec.arguments], env=env))

    def poll(self) -> list[Event]:
        events = super().poll()
        self.begun.extend(event.pid for event in events if isinstance(event, Started))
        return events
