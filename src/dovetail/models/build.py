"""Build a stage: structure on the meta device first, then exactly this rank's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.models.compat import local_box
from dovetail.models.config import ModelError, is_tied, load_config
from dovetail.models.model_stage import VALUE_HEAD, PipelineStage
from dovetail.models.source import Folder, Seed, Source
from dovetail.protocol.messages import ModelRef


def build_stage(
    ref: ModelRef,
    pp_rank: int = 0,
    pp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PipelineStage:
    """A stage with its weights, on `device` in `dtype`, in evaluation mode and without gradients.

    Reads only the stage's own tensors. Raises `ModelError` for anything wrong with the folder."""
    stage = PipelineStage(load_config(ref), ref.head, pp_rank, pp_size)
    stage.to(dtype)
    stage.to_empty(device=device)
    fill(stage, open_source(ref, stage), {name: name for name, _ in stage.named_parameters()})
    stage.place_buffers(device)
    stage.eval().requires_grad_(False)
    return stage


def open_source(ref: ModelRef, stage: PipelineStage) -> Source:
    """The tensors that `ref` names."""
    if ref.path is None:
        return Seed(ref.seed, stage.config, stage)
    return Folder(Path(ref.path), stage.family, value_head=ref.head == "lm+value")


def fill(stage: PipelineStage, source: Source, names: dict[str, str]) -> None:
    """Copy the source's tensors into the stage's parameters, sharded or not, casting to their dtype.

    `names` maps a parameter's name to its name in the stage without wrappers. A value head that the source lacks is
    zeroed; a vocabulary projection that it lacks is read from the embedding (tied checkpoints); any other missing
    tensor raises `ModelError`, and so does a head beside a tied embedding that differs from it."""
    parameters = dict(stage.named_parameters())
    for name, plain in names.items():
        parameter = parameters[name]
        local, box = local_part(parameter)
        value = source.read(stage.checkpoint_name(plain), parameter.shape, box)
        if value is None and plain == "lm_head.weight":
            value = source.read(stage.embedding_name, parameter.shape, box)
        if value is None and plain == f"{VALUE_HEAD}.weight":
            value = torch.zeros_like(local)
        if value is None:
            raise ModelError(f"{getattr(source, 'path', 'the model')}: tensor {plain} is missing from the weights")
        if plain == stage.embedding_name and stage.head != "value" and is_tied(stage.config):
            _check_tied(source, value, parameter.shape, box)
        with torch.no_grad():
            local.copy_(value)


def _check_tied(source: Source, embedding: Tensor, shape: torch.Size, box: tuple[slice, ...]) -> None:
    """Raises `ModelError` where a folder's weights have a head that is not the embedding: transformers would use it."""
    if not isinstance(source, Folder):
        return
    head = source.read("lm_head.weight", shape, box)
    if head is not None and not torch.equal(head, embedding):
        raise ModelError(
            f"{source.path}: config.json says that head and embedding are tied, but the weights hold a different "
            "lm_head.weight; set tie_word_embeddings to false in config.json"
        )


def local_part(parameter: nn.Parameter | Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter and what it covers of each dimension (all of it if neither sharded nor split)."""
    from torch.distributed.tensor import DTensor

    tensor: Any = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    shape, offset = local_box(tensor)
    return tensor.to_local(), tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
