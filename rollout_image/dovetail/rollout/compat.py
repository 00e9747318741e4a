"""Gathers the parts of vLLM that the plug-ins use beyond its interfaces for plug-ins. vLLM does not promise to keep
them. tests/unit/rollout/test_compat.py says which part has moved.

The functions import vLLM themselves, because a scorer, which has no vLLM, shares this package."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.models.compat import Private
from dovetail.models.layers.packing import ROWS

SEEN = "vLLM 0.32"
PRIVATE = (
    Private(
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
        SEEN,
        "registering a backend twice raises, and vLLM calls plug-ins in each of its processes, forked ones too",
    ),
    Private(
        "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
        SEEN,
        "new weights go through the model's own loader, layer by layer, as in vLLM's own weight-transfer backends",
    ),
    Private("vllm.model_executor.model_loader.reload:finalize_layerwise_reload", SEEN, "the end of such a reload"),
    Private(
        "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
        SEEN,
        "what a reload that broke off left in a fused module must be dropped before the next one",
    ),
    Private(
        "vllm.model_executor.model_loader.reload.layerwise:_layerwise_process",
        SEEN,
        "gpt-oss copies sinks and experts past their loaders, for which a reload waits; their reload is ended by hand",
    ),
    Private(
        "vllm.model_executor.model_loader.reload.meta:materialize_layer",
        SEEN,
        "the same modules need memory for what is copied into them",
    ),
    Private(
        "vllm.v1.worker.gpu_worker:Worker._weight_update_active",
        SEEN,
        "a worker whose update was never finished refuses the next one for ever, and nothing public gives an update up",
    ),
    Private(
        "vllm.v1.sample.logits_processor.builtin:process_dict_updates",
        SEEN,
        "a logits processor keeps its requests by their place in the batch; this follows moves and swaps",
    ),
    Private(
        "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
        SEEN,
        "a CPU worker of a later pipeline stage skips the warm-up that makes room for what the stage before it sends",
    ),
    Private(
        "vllm.distributed.parallel_state:get_pp_group", SEEN, "which pipeline stage this worker is; for that same room"
    ),
    Private(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward",
        SEEN,
        "the model's logits are divided by the sampling temperature through its attribute `scale`",
    ),
    Private(
        "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
        SEEN,
        "which port this worker's KV cache blocks are served on",
    ),
    Private(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
        SEEN,
        "a tied head on CPUs keeps a packed copy of the embedding, which a reload does not renew",
    ),
    Private(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        SEEN,
        "embedding and head of a model, whichever family it is of",
    ),
    Private(
        "vllm.model_executor.layers.utils:cpu_unquantized_gemm",
        SEEN,
        "on CPUs a row of a matrix product has other bits in a step of few rows, so steps are filled up to whole ROWS",
    ),
    Private(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        SEEN,
        "experts on CPUs are computed from packed weights; a reload leaves them unpacked, and their results wrong",
    ),
    Private(
        "vllm.entrypoints.rl.online.metrics:weight_operation_metrics",
        SEEN,
        "our routes replace four of vLLM's and keep its metrics of them",
    ),
    Private(
        "vllm.entrypoints.launchers.api_server.entry:run_server",
        SEEN,
        "`vllm serve` as a call, in a process whose imports are made",
    ),
    Private("vllm.entrypoints.launchers.cli_args:make_arg_parser", SEEN, "the arguments of `vllm serve`"),
    Private("vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args", SEEN, "their check"),
    Private("vllm.logger:configure_logging_from_args", SEEN, "`vllm serve` sets up its logs so"),
    Private("vllm.utils.argparse_utils:FlexibleArgumentParser", SEEN, "the parser that make_arg_parser fills"),
    Private(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        SEEN,
        "vLLM sets spawn for CPU workers here; a fork shares the imports of the server, which take 15 s",
    ),
    Private(
        "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
        SEEN,
        "each server would look through all modules for Triton kernels, for half a CPU second; the forkserver does it",
    ),
    Private(
        "vllm.config:VllmConfig.use_v2_model_runner",
        SEEN,
        "which of its two model runners vLLM has chosen, and so how it draws samples",
    ),
    Private(
        "vllm.config:VllmConfig._verify_aux_output_compatibility",
        SEEN,
        "vLLM refuses to return experts from its V1 runner, the only one on CPUs; our worker does the V2 runner's part",
    ),
    Private(
        "vllm.distributed.aux_output_connector.worker:get_aux_output_connector",
        SEEN,
        "it collects the experts of a step and keeps those of cached prefixes, for a worker with the V1 runner",
    ),
    Private(
        "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens", SEEN, "where the experts of a step are added to its output"
    ),
    Private(
        "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
        SEEN,
        "a request that is aborted leaves its KV cache blocks; one that ends otherwise does not",
    ),
    Private(
        "vllm.transformers_utils.config:with_retry",
        SEEN,
        "a server looks for a config.json beside its tokenizer and waits two seconds for it; a job's has none",
    ),
    Private(
        "vllm.model_executor.models.registry:_LazyRegisteredModel._get_cache_dir",
        SEEN,
        "where vLLM keeps what it found out about models' classes: an image brings it along, which saves ten seconds",
    ),
    Private(
        "vllm.model_executor.models.registry:_LazyRegisteredModel._get_cache_filename", SEEN, "the file of one class"
    ),
    Private(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        SEEN,
        "it imports vLLM for ten seconds to look at a class, lest CUDA begins; on CPUs the server looks itself",
    ),
    Private("vllm.v1.engine.async_llm:AsyncLLM.generate", SEEN, "samples are drawn without an HTTP request for each"),
    Private("vllm.inputs:tokens_input", SEEN, "a prompt of token ids for it"),
    Private("vllm.sampling_params:SamplingParams.flat_logprobs", SEEN, "log-probabilities as numbers, not as objects"),
    Private("vllm.sampling_params:SamplingParams.skip_clone", SEEN, "an eighth of the work for a request is its copy"),
    Private("vllm.envs:enable_envs_cache", SEEN, "the API server would read variables of its environment per request"),
    Private("vllm.logprobs:FlatLogprobs", SEEN, "where these numbers are"),
    Private("vllm.exceptions:VLLMClientError", SEEN, "errors of a request, which no other server would draw either"),
)


def model_infos() -> Path:
    """The folder in which vLLM caches what it has found out about model classes."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    return Path(_LazyRegisteredModel._get_cache_dir())


def find_model_info(architecture: str) -> str:
    """Have vLLM inspect a model class. Returns the name of the result's file in `model_infos()`. Raises LookupError for
    a class that vLLM does not have, and RuntimeError if it cannot be imported here."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    model = ModelRegistry.models.get(architecture)
    if not isinstance(model, _LazyRegisteredModel):
        raise LookupError("vLLM has no class of its own for it")
    model.inspect_model_cls()
    return str(model._get_cache_filename())


def registered_backends() -> Any:
    """The names of the weight-transfer backends that vLLM knows in this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    return WeightTransferEngineFactory._registry.keys()


def forget_partial_loads(model: Any) -> None:
    """Drop the tensors of fused modules that an interrupted reload has left (q without k and v). Otherwise vLLM would
    count them in the next reload, and would take a module for complete too early."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def holds_partial_loads(model: Any) -> bool:
    """Whether the layerwise loader keeps tensors of a fused module (q of qkv) until that module is complete."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return any(get_layerwise_info(module).loaded_weights for module in model.modules())


def begin_reload(model: Any) -> None:
    """Announce that new weights come for `model`, through its `load_weights`."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    initialize_layerwise_reload(model)
    for module in _written_directly(model):
        materialize_layer(module, get_layerwise_info(module))


def loaded_parameters(model: Any) -> list[set[str]]:
    """The names of each parameter that comes from files. Wrapped experts have their router under a second name. Layers
    of latent attention keep products of others beside them, which vLLM computes anew after each load."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    computed = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if is_deferred_attention_layer(module)
        for name in module._parameters
    }
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [found for found in names.values() if not found & computed]


def finish_reload(model: Any, model_config: Any) -> None:
    """Announce that all weights have come."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

    for module in _written_directly(model):
        if (info := get_layerwise_info(module)).can_load():
            _layerwise_process(module, info)
    finalize_layerwise_reload(model, model_config)


def give_update_up(worker: Any) -> None:
    """End a worker's weight update that was begun and not finished, if there is one."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()


def _written_directly(model: Any) -> list[Any]:
    """The modules of a gpt-oss model whose parameters `load_weights` writes directly, without their loaders. A
    layerwise reload waits only for the loaders, and would put the older weights back."""
    if type(model).__name__ != "GptOssForCausalLM":
        return []
    return [module for module in model.modules() if {"sinks", "w13_weight"} & module._parameters.keys()]


def follow_batch(rows: dict[int, Any], batch_update: Any, new: Any) -> None:
    """Update `rows`, by place in the batch, when the batch changes. `new(params, prompt, output)` makes a row."""
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    process_dict_updates(rows, batch_update, new)


def is_vocabulary(module: Any) -> bool:
    """Whether the module is an embedding or a head over the vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding)


def pack_vocabulary(module: Any) -> None:
    """Compute the packed copy again that an embedding or head keeps beside its weight on CPUs. On GPUs there is none. A
    quantised weight is left as vLLM made it, because quantising it twice would spoil it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = module.quant_method
    if isinstance(method, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading(module)


def pack_experts(model: Any) -> None:
    """Pack the experts' weights that a reload has brought (CPU only). vLLM packs them only when it loads the model."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and "w13_weight" in module._parameters:
            experts.process_weights_after_loading(module)


def weight_operation(name: str) -> Any:
    """A context in which vLLM measures a weight operation. `name` is `init`, `start`, `update` or `finish`."""
    from vllm.entrypoints.rl.online.metrics import weight_operation_metrics

    return weight_operation_metrics().record(name)


def parse_serve_arguments(arguments: list[str], program: str) -> Any:
    """Parse and check the arguments of `vllm serve` with vLLM's own code, and set logging up as they say."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser(prog=program)).parse_args(arguments)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    return args


def tensor_parallel_rank() -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def was_aborted(request: Any) -> bool:
    """Whether a request of the engine core ended because its client wanted no more."""
    from vllm.v1.request import RequestStatus

    return request.status is RequestStatus.FINISHED_ABORTED


def uses_v2_runner(config: Any) -> bool:
    """Whether vLLM runs its V2 model runner for this VllmConfig."""
    return bool(config.use_v2_model_runner)


def is_first_stage() -> bool:
    """Whether this worker is its server's first pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_first_rank)


def make_room_for_arrivals(runner: Any, dtype: Any, device: Any) -> None:
    """Make the buffers into which a later pipeline stage receives. vLLM makes them only in a warm-up step. Its CPU
    workers skip that step in eager mode, and then fail at the first real step."""
    if not is_first_stage() and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=dtype, device=device
        )


def experts_collector(model: Any, config: Any, kv_cache_config: Any) -> Any:
    """The object with which vLLM's V2 runner collects the experts of each token."""
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    return get_aux_output_connector(model, config, kv_cache_config)


def allow_experts_on_cpus() -> None:
    """Let vLLM take `--enable-return-routed-experts` without its V2 runner. The worker must then be `ExpertsWorker`."""
    from vllm.config import VllmConfig

    VllmConfig._verify_aux_output_compatibility = lambda self: None


class WrongRequest(ValueError):
    """vLLM will not draw this sample, on no server."""


def keep_environment() -> None:
    """Let vLLM read the variables of its environment only once from now on, as its engine cores do."""
    from vllm.envs import enable_envs_cache

    enable_envs_cache()


async def draw(
    engine: Any, tokens: list[int], fields: dict[str, Any], kv_transfer: dict[str, Any] | None, request_id: str
) -> AsyncGenerator[tuple[list[int], list[float], str | None, Any], None]:
    """Draw a sample with an AsyncLLM. `fields` are those of SamplingParams, with `output_kind` DELTA. Gives new token
    ids and log-probabilities (nats). The last time it also gives the finish reason, and the experts of the tokens
    (tokens, layers, experts of a token) if the server has them. Raises WrongRequest."""
    import msgspec
    from vllm.exceptions import VLLMClientError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    try:
        # These parameters are of this request alone, so vLLM need not copy them deeply.
        params = msgspec.convert({**fields, "flat_logprobs": True, "skip_clone": True}, SamplingParams)
    except (ValueError, TypeError) as error:
        raise WrongRequest(str(error)) from error
    if kv_transfer is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv_transfer}
    begun = False
    try:
        async with aclosing(engine.generate(tokens_input(tokens), params, request_id)) as outputs:
            async for output in outputs:
                begun = True
                (done,) = output.outputs
                # The sampled token is the first of its position. Without new tokens vLLM gives all old positions.
                flat = done.logprobs
                logprobs = [flat.logprobs[at] for at in flat.start_indices] if done.token_ids else []
                yield done.token_ids, logprobs, done.finish_reason, done.routed_experts
    except VLLMClientError as error:
        raise WrongRequest(str(error)) from error
    except (ValueError, TypeError) as error:
        # vLLM checks a request before its first output. A later error is not the request's.
        if begun:
            raise
        raise WrongRequest(str(error)) from error


def run_server(args: Any, http: type, close_seconds: int) -> Any:
    """A coroutine that serves until SIGTERM. Then open connections have `close_seconds` to end. `http` is uvicorn's
    protocol class."""
    from vllm.entrypoints.launchers.api_server.entry import run_server as run

    # A coordinator that does not read for some seconds keeps its connections. Its samples have deadlines of their own.
    return run(args, http=http, timeout_graceful_shutdown=close_seconds, ws_ping_interval=None)


def fork_engine_core() -> None:
    """Make vLLM fork the engine core from this process, so that it shares the imports (CPU only). vLLM would spawn
    it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "forks", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.forks = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process (CPU only). It would start another one, which imports vLLM
    anew."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def read_configs_once() -> None:
    """Let vLLM look once for the config.json of a folder. Where there is none, it would wait two seconds and look
    again."""
    from vllm.transformers_utils import config

    config.with_retry = lambda read, *_, **__: read()


def replace_triton_kernels() -> None:
    """Put vLLM's functions for CPUs in place of its Triton kernels, once for all processes that are forked from this
    one (CPU only). vLLM stumbles over some modules that a server does not import, so call it before their imports."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def fill_rows_on_cpus() -> None:
    """Pad each float32 matrix product to a number of rows that is a multiple of ROWS (CPU only). Without this, a row's
    last bits would depend on the number of rows. So they would depend on the other samples of a decode step, and on
    whether a token is computed in a decode step or in a prefill. It may be called any number of times. Models that are
    built later use it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    original = utils.cpu_unquantized_gemm
    if getattr(original, "fills", False):
        return

    def filled(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        missing = -x.shape[0] % ROWS if x.ndim == 2 and x.dtype == torch.float32 else 0
        if not missing:
            return original(layer, x, weight, bias)
        return original(layer, pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]

    filled.fills = True  # type: ignore[attr-defined]
    utils.cpu_unquantized_gemm = filled


def divide_logits(model: Any, temperature: float) -> None:
    """Have the model's logits divided by `temperature`, after its own scale and soft cap. Only the last pipeline stage
    has logits. Raises ValueError if a model that must be scaled computes its logits in another way."""
    if temperature == 1.0:
        return
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found and get_pp_group().is_last_rank:
        raise ValueError(f"{type(model).__name__} has no LogitsProcessor; set spec.generation.temperature to 1")
    for module in found:
        module.scale /= temperature
