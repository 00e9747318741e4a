"""vLLM's workers on CPUs. A server has one of them as `--worker-cls`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_worker import CPUWorker

from dovetail.rollout.compat import experts_collector, make_room_for_arrivals


class ExpertsWorker(CPUWorker):
    """The worker of servers of jobs with routing replay: one pipeline stage, without speculative decoding. It reports
    which experts each token got.

    vLLM collects the experts only in its V2 model runner, which CPUs do not have. Its routers, its store for cached
    prefixes and its API do not depend on the runner. So this worker gives them what the V2 runner would give them."""

    _collector: Any = None
    _pending: Any = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._collector = experts_collector(self.model_runner.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._collector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            batch = self.model_runner.input_batch
            count = batch.num_reqs
            self._pending = self._collector.prepare_output(
                SimpleNamespace(
                    req_ids=list(batch.req_ids),
                    query_start_loc_np=self.model_runner.query_start_loc.np[: count + 1].copy(),
                    num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
                )
            )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            # A request that is still in its prompt has no token yet.
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids], np.int32)
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class StageWorker(CPUWorker):
    """The worker of servers with several pipeline stages. It can receive from the stage before it
    (`compat.make_room_for_arrivals`)."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        make_room_for_arrivals(self.model_runner, self.model_config.dtype, self.device)
