"""Builds a stage. Its structure is made on the meta device first. Then exactly this rank's tensors are read."""

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

    It reads only the stage's own tensors. Raises `ModelError` if anything is wrong with the folder."""
    stage = PipelineStage(load_config(ref), ref.head, pp_rank, pp_size)
    stage.cast(dtype)
    stage.to_empty(device=device)
    fill(stage, open_source(ref, stage), {name: name for name, _ in stage.named_parameters()})
    stage.place_buffers(device)
    stage.eval().requires_grad_(False)
    return stage


def open_source(ref: ModelRef, stage: PipelineStage) -> Source:
    """The source of the tensors that `ref` names. Raises `ModelError`."""
    if ref.path is None:
        return Seed(ref.seed, stage.config, stage)
    return Folder(Path(ref.path), stage.family, value_head=ref.head == "lm+value")


def fill(stage: PipelineStage, source: Source, names: dict[str, str]) -> None:
    """Copy the source's tensors into the stage's parameters, sharded or not, and cast them to the parameters' dtype.

    `names` maps each parameter's name to its name in the stage without wrappers. If the source has no value head, it is
    set to 0. If it has no vocabulary projection, the embedding is read (tied checkpoints). Raises `ModelError` if
    another tensor is missing, or if a head differs from the embedding to which it is tied."""
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
    """Raise `ModelError` if a folder's weights have a head that differs from the embedding. transformers would use that
    head."""
    if not isinstance(source, Folder):
        return
    head = source.read("lm_head.weight", shape, box)
    if head is not None and not torch.equal(head, embedding):
        raise ModelError(
            f"{source.path}: config.json says that head and embedding are tied, but the weights hold a different "
            "lm_head.weight; set tie_word_embeddings to false in config.json"
        )


def local_part(parameter: nn.Parameter | Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and the slice of each dimension that it covers. A parameter that is neither
    sharded nor split is covered as a whole."""
    from torch.distributed.tensor import DTensor

    tensor: Any = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    shape, offset = local_box(tensor)
    return tensor.to_local(), tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
