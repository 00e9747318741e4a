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

_BASE = ".base_layer"
_ADAPTER = "default"


def inject(stage: PipelineStage, config: LoRA) -> None:
    """Add adapters to the stage's linear layers (all of a block's, or `target_modules`) and freeze all other weights
    except the value head. It works on the meta device. Raises `ModelError` if no layer has a given name."""
    from peft import inject_adapter_in_model

    adapter = described(stage, config)
    inject_adapter_in_model(adapter, stage.layers, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(f"{VALUE_HEAD}."))


def described(stage: PipelineStage, config: LoRA, **others: Any) -> Any:
    """The adapters of a stage as peft's `LoraConfig` describes them, with `others` of its fields. Raises `ModelError`
    if no layer has a given name."""
    from peft import LoraConfig

    # The base layer of an adapter is called base_layer, and its parts are in lora_A and lora_B.
    modules = [(n, m) for n, m in stage.layers.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n]
    linear = {name.removesuffix(".base_layer").rpartition(".")[2] for name, _ in modules}
    every = [*sorted(linear), *stage.family.of_experts]
    if missing := sorted(set(config.target_modules) - set(every)):
        raise ModelError(f"lora.targetModules: no layer is called {missing[0]!r}; this model has {', '.join(every)}")
    wanted = config.target_modules or sorted(linear)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=[name for name in wanted if name in linear],
        target_parameters=[name for name in wanted if name not in linear] or None,
        bias="none",
        **others,
    )


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
    return name.replace(_BASE, "")


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
    """The update alpha/rank * B A of base weight `name` (Hu et al. 2021, section 4.1), or None without an adapter. That
    of all experts (experts, rows, columns) has one for each.

    The result is float32. `read(name)` gives a parameter's full tensor. It may be a collective, so all ranks of a stage
    must call it in the same order."""
    owner, _, kind = name.rpartition(".")
    while owner.endswith(_BASE):  # one adapter in another, if several parameters of a module have one
        owner = owner.removesuffix(_BASE)
        layer = stage.get_submodule(owner)
        if getattr(layer, "parameter_name", "weight") == kind:
            a, b = (read(f"{owner}.lora_{part}.{_ADAPTER}.weight").float() for part in "AB")
            if not hasattr(layer, "parameter_name"):
                return layer.scaling[_ADAPTER] * (b @ a)
            # peft has the rows of A expert by expert, and the columns of B rank by rank.
            a, b = a.unflatten(0, (layer.num_experts, -1)), b.unflatten(1, (-1, layer.num_experts))
            form = "ore,eri->eio" if layer.get_base_layer().is_transposed else "ore,eri->eoi"
            return layer.scaling[_ADAPTER] * torch.einsum(form, b, a)
    return None
