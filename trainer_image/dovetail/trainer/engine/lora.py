"""Low-rank adapters on a stage (peft). For export and publishing they are merged into the base weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.manifest.types import LoRA
from dovetail.models import ModelError, PipelineStage
from dovetail.models.build import local_part
from dovetail.models.model_stage import VALUE_HEAD
from dovetail.models.source import generator

_BASE = ".base_layer."
_ADAPTER = "default"


def inject(stage: PipelineStage, config: LoRA) -> None:
    """Add adapters to the stage's linear layers (all of a block's, or `target_modules`) and freeze all other weights
    except the value head. It works on the meta device. Raises `ModelError` if no layer has a given name."""
    from peft import LoraConfig, inject_adapter_in_model

    adapter = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets(stage, config),
        bias="none",
    )
    inject_adapter_in_model(adapter, stage.layers, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(f"{VALUE_HEAD}."))


def targets(stage: PipelineStage, config: LoRA) -> list[str]:
    """The names of the linear layers that get adapters. Raises `ModelError` if no layer has a given name."""
    modules = stage.layers.named_modules()
    # The base layer of an adapter is called base_layer, and its parts are in lora_A and lora_B.
    found = {n.partition(".lora_")[0].removesuffix(".base_layer") for n, m in modules if isinstance(m, nn.Linear)}
    linear = sorted({name.rpartition(".")[2] for name in found})
    if missing := sorted(set(config.target_modules) - set(linear)):
        raise ModelError(f"lora.targetModules: no layer is called {missing[0]!r}; this model has {', '.join(linear)}")
    return config.target_modules or linear


def initialise(stage: PipelineStage, seed: int) -> None:
    """Initialise the adapters as peft does: A is Kaiming uniform with a = sqrt(5), and B is 0. Each A has a seed of its
    own, so the adapters do not depend on the pipeline split or on sharding."""
    for name, parameter in stage.named_parameters():
        if ".lora_A." in name:
            whole = torch.empty(parameter.shape)
            bound = parameter.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator(seed, name))
            shard, box = local_part(parameter)
            shard.copy_(whole[box])
        elif ".lora_B." in name:
            local_part(parameter)[0].zero_()


def plain_name(name: str) -> str | None:
    """A parameter's name without the wrapping of the adapter. It is None for a parameter of the adapter itself."""
    if ".lora_" in name:
        return None
    return name.replace(_BASE, ".")


def saved_name(name: str) -> str:
    """The name of an adapter's parameter in the files of peft, after its prefix for the whole model."""
    return name.replace(f".{_ADAPTER}.", ".")


def merged(stage: PipelineStage, names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The parameters `names` as (Hugging Face name, tensor), with adapters merged. `read`: see `delta`."""
    for name in names:
        if (plain := plain_name(name)) is not None:
            value, update = read(name), delta(stage, name, read)
            yield plain, value if update is None else (value.float() + update).to(value.dtype)


def delta(stage: PipelineStage, name: str, read: Any) -> Tensor | None:
    """The update alpha/rank * B A of base weight `name` (Hu et al. 2021, section 4.1), or None without an adapter.

    The result is float32. `read(name)` gives a parameter's full tensor. It may be a collective, so all ranks of a stage
    must call it in the same order."""
    owner, found, kind = name.partition(_BASE)
    if not found or kind != "weight":
        return None
    layer = stage.get_submodule(owner)
    a = read(f"{owner}.lora_A.{_ADAPTER}.weight")
    b = read(f"{owner}.lora_B.{_ADAPTER}.weight")
    return layer.scaling[_ADAPTER] * (b.float() @ a.float())
