"""vLLM's worker of a pipeline stage on CPUs. Servers with several stages have it as `--worker-cls`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from dovetail.rollout.compat import make_room_for_arrivals


class StageWorker(CPUWorker):
    """A worker that can receive from the stage before it (`compat.make_room_for_arrivals`)."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        make_room_for_arrivals(self.model_runner, self.model_config.dtype, self.device)
