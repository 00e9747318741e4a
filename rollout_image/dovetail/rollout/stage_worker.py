"""vLLM's worker of a pipeline stage on CPUs: `--worker-cls` of servers with several."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """Has what the stage before it sends room to arrive in. vLLM 0.32 makes that room in a warm-up step only, which
    its CPU workers skip in eager mode, and then fails at the first real step."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        runner: Any = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
