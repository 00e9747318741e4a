"""Times of a model's passes by micro-batch size, for the embedding, one layer and the head separately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.models import Outputs, PipelineStage, load_config
from dovetail.models.derive import resized
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.files.machine_profile import LinkTimes, ModelTimes, PassTimes
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.compat import is_view
from dovetail.trainer.engine.action_measures import SavedBytes
from dovetail.trainer.engine.split_backward import backward_input, backward_weights

# The model has three stages of one layer each. The middle one is only a layer. The others have one part more.
_STAGES = 3
_PARTS = ("forward", "backward", "input_gradient", "weight_gradient", "activation_bytes")
Clock = Callable[[], float]


def measure_model(
    ref: ModelRef,
    micro_batches: Sequence[int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 7,
    clock: Clock = time.perf_counter,
) -> ModelTimes:
    """Medians of `repeats` passes over random tokens, with random weights of the model's own shapes.

    Each micro-batch has as many sequences as `micro_batches` says, each of `tokens` tokens. One layer represents all
    layers. Raises ModelError for a model that cannot be used."""
    config = load_config(ref)
    short = resized(config, _STAGES)
    results: dict[str, list[PassTimes]] = {"embedding": [], "layer": [], "head": []}
    stages = [_stage(short, ref, rank, device, dtype) for rank in range(_STAGES)]
    for size in micro_batches:
        first, layer, last = _measure(stages, size, tokens, device, repeats, clock)
        # The first stage computes all of its backward pass, its layer's too, in the second half.
        both = [sum(halves) for halves in zip(layer["input_gradient"], layer["weight_gradient"], strict=True)]
        without = {**layer, "weight_gradient": both}
        parts = {
            "embedding": {name: _median(first[name], without[name]) for name in _PARTS},
            "layer": {name: _median(layer[name]) for name in _PARTS},
            "head": {name: _median(last[name], layer[name]) for name in _PARTS},
        }
        for part, values in parts.items():
            times = {name: value for name, value in values.items() if name != "activation_bytes"}
            saved = int(values["activation_bytes"])
            results[part].append(PassTimes.model_validate({**times, "micro_batch": size, "activation_bytes": saved}))
    return ModelTimes(
        head=ref.head,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        bytes_per_value=torch.empty((), dtype=dtype).element_size(),
        embedding_times=results["embedding"],
        layer_times=results["layer"],
        head_times=results["head"],
    )


def _stage(config: Any, ref: ModelRef, rank: int, device: torch.device, dtype: torch.dtype) -> PipelineStage:
    stage = PipelineStage(config, ref.head, rank, _STAGES)
    stage.cast(dtype)
    stage.to_empty(device=device)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    stage.place_buffers(device)
    stage.train()
    return stage


def _median(values: Sequence[float], less: Sequence[float] | None = None) -> float:
    """The median of the values, or of their differences to the values measured next to them, and at least 0."""
    taken = values if less is None else [a - b for a, b in zip(values, less, strict=True)]
    return max(0.0, statistics.median(taken))


def _measure(
    stages: Sequence[PipelineStage], size: int, tokens: int, device: torch.device, repeats: int, clock: Clock
) -> list[dict[str, list[float]]]:
    """All repeats of each stage. Stages take turns, so that other load on the machine affects all of them alike."""
    found: list[dict[str, list[float]]] = [{name: [] for name in _PARTS} for _ in stages]
    for turn in range(2 * repeats + 2):
        for stage, seconds in zip(stages, found, strict=True):
            _pass(stage, turn % 2 == 1, size, tokens, device, clock, seconds)
    # The first turn of each kind allocates memory and warms up. Forward passes happen in both kinds.
    skipped = {name: 2 if name in ("forward", "activation_bytes") else 1 for name in _PARTS}
    return [{name: seconds[name][skipped[name] :] for name in _PARTS} for seconds in found]


def _pass(
    stage: PipelineStage,
    split: bool,
    size: int,
    tokens: int,
    device: torch.device,
    clock: Clock,
    seconds: dict[str, list[float]],
) -> None:
    """One forward and backward pass. With `split` the backward pass is in two halves. Appends to `seconds`."""

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        _finish(device)
        start = clock()
        yield
        _finish(device)
        seconds[name].append(clock() - start)

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, stage.config.vocab_size, (size, tokens), generator=generator).to(device)
    weights = [p for p in stage.parameters() if p.requires_grad]
    dtype = weights[0].dtype
    words, lengths = words.view(1, -1), (tokens,) * size
    inputs = words if stage.is_first else torch.randn(*words.shape, stage.hidden_size, device=device, dtype=dtype)
    if not stage.is_first:
        inputs.requires_grad_(True)
    every = torch.arange(words.numel(), device=device)
    meter = SavedBytes(stage.parameters())
    with timed("forward"), meter:
        asked = Predictions(words.flatten()) if stage.is_last else None
        output = stage(inputs, lengths, every if stage.is_last else None, predictions=asked)
        output = _loss(output) if stage.is_last else output
        output = output.clone() if is_view(output) else output
    gradient = None if stage.is_last else torch.ones_like(output)
    if not split:
        with timed("backward"):
            torch.autograd.backward(output, gradient)
    elif stage.is_first:
        # No stage waits for the gradient of tokens, so the executor computes everything in the second half.
        with timed("input_gradient"):
            pass
        with timed("weight_gradient"):
            torch.autograd.backward(output, gradient)
    else:
        with timed("input_gradient"):
            _, groups = backward_input(output, gradient, inputs)
        with timed("weight_gradient"):
            backward_weights(groups)
    seconds["activation_bytes"].append(float(meter.bytes))
    stage.zero_grad(set_to_none=True)


def _loss(output: Tensor | Predicted | Outputs) -> Tensor:
    if isinstance(output, Outputs):
        assert isinstance(output.logits, Predicted)
        return _loss(output.logits) + _loss(output.values)
    return -output.logprobs.mean() if isinstance(output, Predicted) else output.square().mean()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


GIB = 2**30
REPEATS = 7
_SIZES = {"cpu": 1024, "cuda": 8192}
_BYTES = {"cpu": 64 * 2**20, "cuda": GIB}


def hardware_toml(device: torch.device, link: LinkTimes | None, clock: Callable[[], float] = time.perf_counter) -> str:
    """An entry of gpus.toml (`dovetail.gpus.gpu_products`), named like the node label of the product ("cpu" for a CPU).

    `link` holds the times between two GPUs of this machine, if they were measured. `clock` gives seconds."""
    gpu = device.type == "cuda"
    dtypes = [torch.float32]
    if gpu:
        dtypes += [torch.float16] + ([torch.bfloat16] if torch.cuda.get_device_capability(device) >= (8, 0) else [])
    flops = {str(dtype).removeprefix("torch."): _flops(device, dtype, clock) for dtype in dtypes}
    size = _BYTES[device.type] // 4
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    memory = 2 * 4 * size / _seconds(lambda: target.copy_(source), device, clock)
    host = torch.ones(size // 4, pin_memory=True) if gpu else source
    pcie = 4 * len(host) / _seconds(lambda: target[: len(host)].copy_(host), device, clock)
    peer = link.bytes_per_second if gpu and link is not None else 0.0
    name = torch.cuda.get_device_name(device).replace(" ", "-") if gpu else "cpu"
    major, minor = torch.cuda.get_device_capability(device) if gpu else (0, 0)
    table = ", ".join(f"{dtype} = {value / 1e12:.4g}" for dtype, value in flops.items())
    return (
        f'["{name}"]\n'
        'source = "measured by dovetail profile"\n'
        f"tflops = {{ {table} }}\n"
        f"memory_gib = {_memory(device) / GIB:.4g}\n"
        f"memory_gbps = {memory / 1e9:.4g}\n"
        f"nvlink_gbps = {(peer if peer > pcie else 0.0) / 1e9:.4g}\n"
        f"pcie_gbps = {pcie / 1e9:.4g}\n"
        f"capability = [{major}, {minor}]\n"
    )


def _flops(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    size = _SIZES[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device, clock)


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """The median seconds of REPEATS runs, after one warm-up run that does not count."""
    found = []
    for _ in range(REPEATS + 1):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - start)
    return max(statistics.median(found[1:]), 1e-9)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
