"""Splits a stage over tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019, section 3). Ranks share the attention
heads and the MLP of each block, and the vocabulary. Attention and MLP need one all-reduce each in the forward pass, and
one each in the backward pass. Each rank has a copy of norms, learnt positions and value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dovetail.manifest.model_shape import ModelShape
from dovetail.models.config import ModelError
from dovetail.models.layers.vocabulary import share_rows
from dovetail.models.model_stage import PipelineStage


class TensorSplit(NamedTuple):
    """Says how a stage's parameters are split, by name. `shared`: the parameters of which each rank holds a part, with
    the dimension that is split. `partial`: copies whose gradients must be summed over the ranks. All others are copies
    with equal gradients. `experts`: those of experts that are divided over ranks (`layers.expert_ranks`)."""

    shared: Mapping[str, int]
    partial: frozenset[str]
    experts: frozenset[str] = frozenset()


NOTHING = TensorSplit({}, frozenset())


def split_stage(stage: PipelineStage, mesh: Any) -> TensorSplit:
    """Divide the layers and the vocabulary of `stage` over the ranks of `mesh`, which has one dimension. The stage is
    on the meta device. Call it before activation checkpointing and FSDP2. Parameters that are split become DTensors. It
    does nothing for one rank. Raises `ModelError` unless all ranks get as many heads and as much of the MLP."""
    if mesh.size() == 1:
        return NOTHING
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    tp = mesh.size()
    if (why := ModelShape.of(stage.config.to_dict()).split_problem(tp)) is not None:
        raise ModelError(f"tp is {tp}, {why}")
    frozen = {name for name, parameter in stage.named_parameters() if not parameter.requires_grad}
    here = Replicate()
    whole = PrepareModuleInput(input_layouts=(here,), desired_input_layouts=(here,), use_local_output=True)
    by_outputs, by_inputs = ([p.name for p in stage.family.linears if p.split == side] for side in ("out", "in"))
    for layer in stage.layers.values():
        styles: dict[str, Any] = {}
        for name, module in layer.named_modules():
            leaf = name.rpartition(".")[2]
            if isinstance(module, nn.Linear):
                # With an adapter, peft's names of the parts follow the layer's.
                owner, adapter, part = name.removesuffix(".base_layer").partition(".lora_")
                leaf = owner.rpartition(".")[2]
                if leaf not in (*by_outputs, *by_inputs):
                    raise ModelError(f"layer {name} cannot be split over tensor-parallel ranks; set tp to 1")
                # The part of an adapter that has the whole side of its layer is copied: its input is whole, too.
                if adapter and part.startswith("A") == (leaf in by_outputs):
                    styles[name] = whole
                else:
                    styles[name] = ColwiseParallel() if leaf in by_outputs else RowwiseParallel()
            elif leaf == "self_attn":
                # One wrapper for q, k and v, so that the gradients of their input are summed over the ranks together.
                styles[name] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": here}, desired_input_kwarg_layouts={"hidden_states": here}
                )
                if hasattr(module, "num_heads"):  # OPT needs it; others use the width of a head
                    module.num_heads //= mesh.size()
            elif leaf == "mlp":
                styles[name] = PrepareModuleInput(input_layouts=(here,), desired_input_layouts=(here,))
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    for module in (getattr(stage.body, stage.family.embedding, None), getattr(stage, "lm_head", None)):
        if module is not None:
            share_rows(module, mesh)
    named = dict(stage.named_parameters())
    for name in frozen:
        named[name].requires_grad_(False)  # torch makes new parameters
    placed = {name: p.placements[0] for name, p in named.items() if isinstance(p, DTensor)}
    shared = {name: place.dim for name, place in placed.items() if isinstance(place, Shard)}
    # Every rank holds the norms of heads, but its gradient comes only from its own heads.
    return TensorSplit(shared, frozenset(name for name in named if name.split(".")[-2] in stage.family.head_norms))
