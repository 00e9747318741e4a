"""Imports modules once for many processes. A forkserver that has called `preload` forks trainers, scorers and vLLM
servers in about a second. Their imports would take about 15 seconds."""

from __future__ import annotations

import importlib
import os

# Libraries read these when they are imported, so a child cannot set them any more.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}

MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "aiohttp",
    "vllm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.dummy_loader",
    "dovetail.rollout.serving.sampler",
    "dovetail.rollout.weights_vllm",
    "dovetail.rollout.serving.token_check",
    "uvloop",
    "uvicorn",
)


def preload() -> None:
    """Import the modules that trainers, scorers and vLLM servers on CPUs need. It starts no thread and uses no GPU.

    Modules that this installation lacks are skipped. A process that needs such a module reports it."""
    for key, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
