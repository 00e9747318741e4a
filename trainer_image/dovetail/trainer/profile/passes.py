"""Times of a model's passes: embedding, one layer and head apart, by micro-batch size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F

from dovetail.api.messages import ModelRef
from dovetail.api.profile import ModelTimes, PassTimes
from dovetail.models import Stage, load_config
from dovetail.trainer.measure import SavedBytes

# A model of three stages of one layer: the middle one is a layer alone, the others have one part more.
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
    """Medians of `repeats` passes over random tokens, of random weights of the model's own shapes.

    A layer stands for all layers. Raises ModelError for a model that cannot be used."""
    config = load_config(ref)
    short = _three_layers(config)
    results: dict[str, list[PassTimes]] = {"embedding": [], "layer": [], "head": []}
    stages = [_stage(short, ref, rank, device, dtype) for rank in range(_STAGES)]
    for size in micro_batches:
        first, layer, last = (_measure(stage, size, tokens, device, repeats, clock) for stage in stages)
        rest = {"embedding": _less(first, layer), "layer": layer, "head": _less(last, layer)}
        for part, values in rest.items():
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


def _three_layers(config: Any) -> Any:
    fields = {**config.to_dict(), "num_hidden_layers": _STAGES}
    fields.pop("layer_types", None)
    return type(config).from_dict(fields)


def _stage(config: Any, ref: ModelRef, rank: int, device: torch.device, dtype: torch.dtype) -> Stage:
    stage = Stage(config, ref.head, rank, _STAGES)
    stage.to(dtype)
    stage.to_empty(device=device)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    stage.place_buffers(device)
    stage.train()
    return stage


def _less(whole: dict[str, float], part: dict[str, float]) -> dict[str, float]:
    return {name: max(0.0, whole[name] - part[name]) for name in whole}


def _measure(
    stage: Stage, size: int, tokens: int, device: torch.device, repeats: int, clock: Clock
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in _PARTS}

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
    for turn in range(2 * repeats + 2):
        split = turn % 2 == 1
        inputs = words if stage.is_first else torch.randn(size, tokens, stage.hidden_size, device=device, dtype=dtype)
        if not stage.is_first:
            inputs.requires_grad_(True)
        meter = SavedBytes(stage.parameters())
        with timed("forward"), meter:
            output = _loss(stage(inputs), words, stage) if stage.is_last else stage(inputs)
            output = output.clone() if output._is_view() else output
        gradient = None if stage.is_last else torch.ones_like(output)
        if not split:
            with timed("backward"):
                torch.autograd.backward(output, gradient)
        elif stage.is_first:
            # Nobody waits for the gradient of tokens: the executor computes all of it in the second half.
            with timed("input_gradient"):
                pass
            with timed("weight_gradient"):
                torch.autograd.backward(output, gradient)
        else:
            with timed("input_gradient"):
                given = None if gradient is None else [gradient]
                _, groups = stage_backward_input([output], given, [inputs], iter(weights))
            with timed("weight_gradient"):
                stage_backward_weight(iter(weights), groups)
        seconds["activation_bytes"].append(float(meter.bytes))
        stage.zero_grad(set_to_none=True)
    # The first turn of each kind allocates and warms up.
    return {name: statistics.median(values[2 if name == "forward" else 1 :]) for name, values in seconds.items()}


def _loss(output: Tensor, words: Tensor, stage: Stage) -> Tensor:
    if stage.head == "value":
        return output.square().mean()
    return F.cross_entropy(output.float().flatten(0, 1), words.flatten())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
