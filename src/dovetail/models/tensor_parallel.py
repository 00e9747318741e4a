"""Tensor parallelism: each block's attention heads and MLP are shared out over ranks, with one sum after either forward
and one before either backward, and so is the vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3). Norms, learnt
positions and value heads are copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.models.config import ModelError
from dovetail.models.model_stage import PipelineStage
from dovetail.models.vocabulary import share_rows


class TensorSplit(NamedTuple):
    """A stage's parameters by name. `shared`: those of which each rank holds a part, and the dimension that is shared;
    `partial`: copies whose gradients are to be added up over the ranks. Others are copies with the same gradient."""

    shared: Mapping[str, int]
    partial: frozenset[str]


NOTHING = TensorSplit({}, frozenset())


def check_degree(config: Any, tp: int) -> None:
    """Raise `ModelError` unless every rank gets as many heads and as much of the MLP."""
    family = MODEL_FAMILIES[config.model_type]
    if tp > 1 and not family.splits:
        raise ModelError(f"layers of {family.name} models cannot be shared over tensor-parallel ranks; set tp to 1")
    inner = family.inner_field
    for field in ("num_attention_heads", "num_key_value_heads", inner):
        size = getattr(config, field, None)
        if size is not None and size % tp:
            raise ModelError(f"tp {tp} does not divide the model's {field}, {size}; use a tp that does")


def split_stage(stage: PipelineStage, mesh: Any) -> TensorSplit:
    """Share out the layers and the vocabulary of `stage` (on the meta device) over `mesh`, of one dimension; before
    recomputation and FSDP2. What is split becomes DTensors. Does nothing for one rank. Raises `ModelError`
    (`check_degree`)."""
    if mesh.size() == 1:
        return NOTHING
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    check_degree(stage.config, mesh.size())
    here = Replicate()
    by_outputs, by_inputs = stage.family.names("out"), stage.family.names("in")
    for layer in stage.body.layers.values():
        styles: dict[str, Any] = {}
        for name, module in layer.named_modules():
            leaf = name.rpartition(".")[2]
            if isinstance(module, nn.Linear):
                if leaf not in (*by_outputs, *by_inputs):
                    raise ModelError(f"layer {name} cannot be split over tensor-parallel ranks; set tp to 1")
                styles[name] = ColwiseParallel() if leaf in by_outputs else RowwiseParallel()
            elif leaf == "self_attn":
                # Wrapped once for q, k and v, so that their input's gradients are added up over ranks together.
                styles[name] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": here}, desired_input_kwarg_layouts={"hidden_states": here}
                )
                if hasattr(module, "num_heads"):  # OPT's; others go by what a head has
                    module.num_heads //= mesh.size()
            elif leaf == "mlp":
                styles[name] = PrepareModuleInput(input_layouts=(here,), desired_input_layouts=(here,))
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    for module in (getattr(stage.body, stage.family.embedding, None), getattr(stage, "lm_head", None)):
        if module is not None:
            share_rows(module, mesh)
    named = dict(stage.named_parameters())
    placed = {name: p.placements[0] for name, p in named.items() if isinstance(p, DTensor)}
    shared = {name: place.dim for name, place in placed.items() if isinstance(place, Shard)}
    # Norms of each head: every rank holds them, but its gradient is that of its own heads.
    return TensorSplit(shared, frozenset(name for name in named if name.split(".")[-2] in stage.family.head_norms))
