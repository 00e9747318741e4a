"""The entry point of `vllm.general_plugins`. vLLM calls `register` in each of its processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def register() -> None:
    """Register the weight-transfer backend `dovetail`, and pad matrix products on CPUs (`compat.fill_rows_on_cpus`). It
    may be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from dovetail.rollout.compat import fill_rows_on_cpus, registered_backends
    from dovetail.rollout.weights_vllm import BACKEND

    if BACKEND not in registered_backends():
        WeightTransferEngineFactory.register_engine(
            BACKEND, "dovetail.rollout.weights_vllm", "DovetailWeightTransferEngine"
        )
    fill_rows_on_cpus()
    # Engine cores and workers must not outlive a killed API server.
    process = multiprocessing.current_process()
    if multiprocessing.parent_process() is not None and process.name.startswith(("EngineCore", "VllmWorker", "Worker")):
        die_with_parent()
