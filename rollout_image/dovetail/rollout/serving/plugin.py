"""The entry point of `vllm.general_plugins`. vLLM calls `register` in each of its processes."""

from __future__ import annotations

import multiprocessing

from dovetail.protocol.process.endings import die_with_parent


def register() -> None:
    """Register the weight-transfer backend `dovetail`, pad matrix products on CPUs (`compat.fill_rows_on_cpus`), and
    wait for no file of a local folder. It may be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from dovetail.rollout.compat import fill_rows_on_cpus, read_configs_once, registered_backends
    from dovetail.rollout.weights_vllm import BACKEND

    if BACKEND not in registered_backends():
        WeightTransferEngineFactory.register_engine(
            BACKEND, "dovetail.rollout.weights_vllm", "DovetailWeightTransferEngine"
        )
    fill_rows_on_cpus()
    read_configs_once()
    # Engine cores and workers must not outlive a killed API server.
    process = multiprocessing.current_process()
    if multiprocessing.parent_process() is not None and process.name.startswith(("EngineCore", "VllmWorker", "Worker")):
        die_with_parent()
