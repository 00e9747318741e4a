"""Imports modules once for many processes. A forkserver that has called `preload` forks trainers, scorers and vLLM
servers in about a second. Their imports would take about 15 seconds."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence

# Libraries read these when they are imported, so a child cannot set them any more.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}

TRAINING = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "aiohttp",
    "dovetail.trainer.main",
    "dovetail.trainer.rank.life",
)
SERVING = (
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
    # A server imports these when it makes its routes, its engine and its first batch.
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "model_hosting_container_standards.sagemaker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "dovetail.rollout.scoring.scorer",
    "dovetail.rollout.serving.routes",
    "dovetail.rollout.serving.sampler",
    "dovetail.rollout.serving.token_check",
    "dovetail.rollout.serving.vllm_server",
    "dovetail.rollout.weights_vllm",
    "fastapi.staticfiles",
    "setproctitle",
    "uvloop",
    "uvicorn",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)


def preload() -> None:
    """Import the modules that trainers, scorers and vLLM servers on CPUs need. It starts no thread and uses no GPU.

    Modules that this installation lacks are skipped. A process that needs such a module reports it."""
    _import(TRAINING + SERVING)
    with contextlib.suppress(ImportError):
        from dovetail.rollout.compat import replace_triton_kernels

        replace_triton_kernels()


def preload_trainers() -> None:
    """Import the modules that trainers on CPUs need, as `preload` does, for a job without rollouts."""
    _import(TRAINING)


def _import(modules: Sequence[str]) -> None:
    for key, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
