"""vLLM's engine on the null GPU, with Dovetail's plug-ins. vLLM's build for CPUs has all of its Python, so its CUDA
platform, GPU worker and model runners run. Its native operations and its management library are stand-ins here."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from programs.trainer import counts
from worker import PATIENCE, Place

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "dovetail",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "DOVETAIL_TOKEN": "a-test-token",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
EXPERTS = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# Compiled parts of vLLM's CUDA build.
ABSENT = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._C", "vllm.vllm_flash_attn")
QUESTIONS = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_sparse_scaled_mm_supported",
)
NVML = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": object(),
    "nvmlDeviceGetCudaComputeCapability": (8, 0),
    "nvmlDeviceGetName": "NVIDIA A100 (null)",
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetIndex": 0,
    "nvmlDeviceGetNumaNodeId": 0,
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30),
    "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="0000:01:00.0"),
}


class Absent(types.ModuleType):
    """A module whose functions do nothing."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def become_cuda() -> set[str]:
    """Make vLLM believe that it is the CUDA build, and import it. Returns the names of native operations that it asks
    for, which then do nothing; names are added as they come."""
    import torch
    import torch._dynamo
    import torch._ops
    import vllm.platforms
    import vllm.third_party.pynvml as nvml

    # TORCH_COMPILE_DISABLE comes too late for what is imported already.
    torch._dynamo.config.disable = True
    for name, answer in NVML.items():
        setattr(nvml, name, lambda *_, answer=answer: answer)
    vllm.platforms.vllm_version_matches_substr = lambda _: False
    for name in ABSENT:
        sys.modules[name] = Absent(name)
    library = torch.library.Library("_C", "FRAGMENT")
    for name in QUESTIONS:
        library.define(f"{name}(int c) -> bool")
        library.impl(name, lambda _: False, "CompositeExplicitAutograd")
    library.define("get_cuda_view_from_cpu_tensor(Tensor t) -> Tensor")
    library.impl("get_cuda_view_from_cpu_tensor", lambda t: torch.empty_like(t, device="cuda"), "CPU")

    import numpy as np
    import triton.runtime.cache
    import vllm.config.logging
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.llm
    import vllm.logger
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.worker.gpu.async_utils as outputs
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker

    # What each engine would do for itself: set hundreds of loggers, and read all of Triton's files for a hash.
    vllm.logger.configure_logging(vllm.config.logging.LoggingConfig())
    triton.runtime.cache.triton_key()
    # It imports models that need torchvision.
    vllm.v1.worker.gpu_worker.kernel_warmup = lambda *_: None
    get_output = outputs.AsyncOutput.get_output

    def sampled(self: Any) -> Any:
        """The GPU would say how many tokens it has sampled: one a request."""
        self.copy_event.synchronize()
        self.num_sampled_tokens_np = np.ones_like(self.num_sampled_tokens_np)
        if self.pending_aux_output is not None:  # experts
            self.pending_aux_output.num_sampled = self.num_sampled_tokens_np
        return get_output(self)

    outputs.AsyncOutput.get_output = sampled
    asked: set[str] = set()
    find = torch._ops._OpNamespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if not self.name.startswith(("_C", "_moe_C")) or name.startswith("__"):
                raise
            asked.add(name)
            return lambda *_, **__: library  # which must live on

    torch._ops._OpNamespace.__getattr__ = operation
    return asked


def runners(place: Place) -> dict[str, Any]:
    """What an engine with each of vLLM's model runners did, and what the V2 runner says of experts. All are forked from
    one import of vLLM."""
    os.environ |= ENVIRONMENT | {"TRITON_LIBCUDA_PATH": os.environ["LD_LIBRARY_PATH"]}
    for name, config in (("model", MODEL), ("experts", EXPERTS)):
        (place.folder / name).mkdir()
        (place.folder / name / "config.json").write_text(json.dumps(config))
    asked = become_cuda()
    gc.collect()
    gc.freeze()  # else a collection would copy what is shared
    gc.collect = lambda *_: 0  # vLLM collects garbage a dozen times an engine, and there is memory enough
    children = {}
    for runner in ("V1", "V2", "experts"):
        children[runner] = os.fork()
        if children[runner]:
            continue
        status = 1
        try:
            found = experts(place.folder) if runner == "experts" else engine(place.folder, runner)
            (place.folder / f"{runner}.json").write_text(json.dumps(found | {"operations": sorted(asked)}))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    ends = {runner: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for runner, pid in children.items()}
    assert not any(ends.values()), ends
    return {runner: json.loads((place.folder / f"{runner}.json").read_text()) for runner in children}


def engine(folder: Path, runner: str) -> dict[str, Any]:
    """An engine takes weights, samples two responses, keeps the blocks of one that is aborted, and fetches them."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    from dovetail.protocol.sampling import COUNTER_SAMPLER
    from dovetail.rollout.kv.kv_config import prepare
    from dovetail.rollout.serving.routes import sampler_of

    kv = prepare("127.0.0.1", False, 1, "bfloat16 x 1", 4096)
    llm = made(
        folder / "model",
        kv_transfer_config=json.loads(kv.arguments[1]),
        enable_prefix_caching=False,
        logits_processors=[COUNTER_SAMPLER] if runner == "V1" else None,
    )
    own = {"temperature": 0.0, "extra_args": {"dt_seed": 7, "dt_temperature": 0.7, "dt_top_k": 5, "dt_top_p": 0.9}}
    drawn: Any = own if runner == "V1" else {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 7}

    def params(count: int) -> Any:
        return SamplingParams(max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False, **drawn)

    worker = llm.llm_engine.model_executor.driver_worker.worker
    received = receive(worker, MODEL)
    before = counts()
    prompts: Any = [{"prompt_token_ids": [3, 4, 5, 6]}, {"prompt_token_ids": [7, 8]}]
    lengths = [len(each.outputs[0].token_ids) for each in llm.generate(prompts, params(5), use_tqdm=False)]
    used = {name: value - before[name] for name, value in counts().items()}
    return {
        "platform": type(current_platform).__name__,
        "runner": type(worker.model_runner).__module__,
        "sampler": sampler_of(llm.llm_engine.vllm_config),
        "lengths": lengths,
        "used": used,
        "received": received,
        "moved": move(llm.llm_engine, params(50), kv.ability),
    }


def experts(folder: Path) -> dict[str, Any]:
    """An engine with experts, as a server of a job with routing replay has it; which runner it chose by itself, and the
    shapes of what it says of two responses."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    from vllm import SamplingParams

    llm = made(folder / "experts", enable_return_routed_experts=True)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    prompts: Any = [{"prompt_token_ids": [3, 4, 5, 6]}, {"prompt_token_ids": [7, 8]}]
    params = SamplingParams(max_tokens=5, logprobs=0, ignore_eos=True, detokenize=False, temperature=0.7, seed=7)
    answers = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    return {
        "runner": type(worker.model_runner).__module__,
        "shapes": [list(each.routed_experts.shape) for each in answers],
        "dtype": str(answers[0].routed_experts.dtype),
        "received": receive(worker, EXPERTS),
    }


def made(model: Path, **more: Any) -> Any:
    """vLLM's engine for the model in this folder, without what the null GPU cannot do."""
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config={"backend": "dovetail"},
        compilation_config={"custom_ops": ["none"], "mode": 0},
        attention_config={"backend": "TRITON_ATTN"},
        **more,
    )


def receive(worker: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Give the worker a version of the weights, as a transfer brings them: how many tensors came, which version is
    served, how many tensors the model has, and those whose memory is another one than before."""
    import torch

    from dovetail.models import build_stage
    from dovetail.models.source import in_files
    from dovetail.protocol.messages import ModelRef, Offer, Receive
    from dovetail.rollout.weights_vllm import LOADED

    class Arriving:
        count = 0

        def receive(self, *_: Any) -> Iterator[tuple[str, torch.Tensor]]:
            config = {k: v for k, v in model.items() if k not in ("architectures", "model_type", "dtype")}
            scratch: Any = {"architecture": model["model_type"], "config": config}
            stage = build_stage(ModelRef(head="lm", scratch=scratch, seed=1))
            for name, tensor in in_files(stage.family, stage.named_parameters()):
                self.count += 1
                yield name, tensor.to("cuda")

        def close(self) -> None:
            """Nothing is open."""

    def places() -> dict[str, int]:
        loaded = worker.get_model()
        return {name: tensor.data_ptr() for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers())}

    transfer, before = worker.weight_transfer_engine, places()
    transfer._receiver = arriving = Arriving()
    offer = Offer(version=3, epoch=1, backend="gloo", segments=[])
    message = Receive(offer=offer, rank_offset=1, world_size=2).model_dump(mode="json")
    worker.start_weight_update()
    worker.update_weights({"receive": message})
    worker.finish_weight_update()
    after = places()
    moved = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return {"tensors": arriving.count, "version": LOADED.version, "places": len(after), "moved": moved}


def move(engine: Any, params: Any, ability: Any) -> dict[str, int]:
    """Abort a response whose blocks are to be kept, and go on with it as another server would, which fetches them."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from dovetail.protocol.messages import HOLD, PULL, KVHold, KVPull

    prompt = list(range(40))

    def begin(name: str, key: str, message: Any) -> None:
        asked = params.clone()
        asked.extra_args = {**(asked.extra_args or {}), "kv_transfer_params": {key: message.model_dump(mode="json")}}
        engine.add_request(name, {"prompt_token_ids": prompt}, asked)

    begin("first", HOLD, KVHold(key="k", weights=3, min_tokens=0))
    for _ in range(3):
        engine.step()
    engine.abort_request(["first"])
    for _ in range(3):
        engine.step()
    kept = get_kv_transfer_group()._working._held.nbytes
    before = counts()
    begin("second", PULL, KVPull(key="k", host=ability.host, ports=ability.ports, weights=3))
    tokens = 0
    end = time.monotonic() + PATIENCE
    while not tokens and time.monotonic() < end:
        tokens = max((len(each.outputs[0].token_ids) for each in engine.step()), default=0)
    brought = counts()["h2d_bytes"] - before["h2d_bytes"]
    return {"kept": kept, "brought": brought, "tokens": tokens}
