"""Shares the rows of the embedding and of the vocabulary projection over tensor-parallel ranks (Megatron-LM, Shoeybi et
al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.models.compat import local_box


class SplitEmbedding(nn.Embedding):
    """An embedding whose weight is a DTensor. Each rank holds some of its rows, and looks up the tokens of these rows.
    The sum over the ranks equals the result of the whole embedding."""

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings (..., H) of token ids `input` (...), int64, as a whole tensor on each rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        weight: Any = self.weight
        first, last = rows_of(weight)
        outside = (input < first) | (input >= last)
        own = self.padding_idx is not None and first <= self.padding_idx < last
        padding = self.padding_idx - first if own and self.padding_idx is not None else None
        found = F.embedding((input - first).masked_fill(outside, 0), weight.to_local(), padding)
        found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        part: Any = DTensor.from_local(found, weight.device_mesh, [Partial()], run_check=False)
        whole: Tensor = part.redistribute(placements=[Replicate()]).to_local()
        scale = getattr(self, "embed_scale", None)  # Gemma's
        return whole if scale is None else whole * scale.to(whole.dtype)


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits of the whole vocabulary, (..., V). They are `hidden` (..., H) times the transpose of `weight` (V, H).
    The weight is a whole tensor or a DTensor of rows."""
    if not hasattr(weight, "device_mesh"):
        return F.linear(hidden, weight)
    from torch.distributed.tensor import DTensor, Replicate

    here: Any = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = F.linear(here, weight)
    whole: Tensor = logits.redistribute(placements=[Replicate()]).to_local()
    return whole


def rows_of(weight: Any) -> tuple[int, int]:
    """The rows of a DTensor that this rank holds, as (first row, row after the last)."""
    shape, offset = local_box(weight)
    return offset[0], offset[0] + shape[0]


def share_rows(module: nn.Module, mesh: Any) -> None:
    """Divide the rows of an embedding's or a projection's weight over the ranks of `mesh`. The weight is on the meta
    device."""
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)  # type: ignore[arg-type]
    module.weight = nn.Parameter(weight)
    if isinstance(module, nn.Embedding):
        module.__class__ = SplitEmbedding
