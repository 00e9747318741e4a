"""Reads a stage's tensors from safetensors files, or makes them from a seed. Tensors are read in parts, so that a rank
that holds a shard reads only its shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.manifest.model_families import ModelFamily
from dovetail.manifest.model_families.family import saved_as
from dovetail.manifest.model_families.support import TEXT_PREFIX
from dovetail.models.config import ModelError
from dovetail.models.model_stage import VALUE_HEAD, VALUE_HEAD_FILE, PipelineStage
from dovetail.protocol.process.pulse import PROGRESS


class Source(Protocol):
    """Gives a checkpoint's tensors by name."""

    def read(self, name: str, shape: torch.Size, box: tuple[slice, ...]) -> Tensor | None:
        """The part `box` of tensor `name`, on the CPU and in any floating dtype. None if there is no such tensor.

        `shape`: the full shape that the tensor must have. `box`: one slice for each dimension. Raises `ModelError` if
        the shape differs."""
        ...


WHOLE = "model.safetensors"


class Folder:
    """Reads the safetensors files of a Hugging Face folder, with or without an index.

    Raises `ModelError` for a folder that has only pickle weights, for a missing shard, and for a shape that differs."""

    def __init__(self, path: Path, family: ModelFamily, value_head: bool = False) -> None:
        """`value_head`: also read the folder's separate value head, if it has one."""
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, tuple[Any, str]] = {}  # the file and its name of a tensor
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(f.name for f in path.glob("*.safetensors") if f.name != "adapter_model.safetensors")
            # transformers does the same. Other files may hold an average of the weights, or the weights in another
            # format.
            files = [WHOLE] if WHOLE in files else files
        if not files:
            if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
                raise ModelError(
                    f"{path}: only pickle weights are there, which can run code when read; convert them to safetensors"
                )
            raise ModelError(f"{path}: no *.safetensors weights")
        if value_head and (path / VALUE_HEAD_FILE).is_file():
            files.append(VALUE_HEAD_FILE)
        for file in files:
            if not (path / file).is_file():
                raise ModelError(f"{path}: {file} is named by the index but missing")
            try:
                handle = safe_open(str(path / file), framework="pt", device="cpu")
            except Exception as error:  # SafetensorError is not exported in a stable place
                raise ModelError(f"{path}/{file}: not a complete safetensors file: {error}") from error
            for key in handle.keys():  # noqa: SIM118 - not a mapping
                self._files[key.replace(TEXT_PREFIX, "", 1)] = handle, key
        self._family = family
        # Checkpoints of the bare backbone (`OPTModel`, `LlamaModel`) lack the `model.` prefix.
        self._prefix = family.body.partition(".")[0] + "."
        self._bare = bool(self._files) and not any(key.startswith(self._prefix) for key in self._files)

    def read(self, name: str, shape: torch.Size, box: tuple[slice, ...]) -> Tensor | None:
        found = stacked(self._family, name)
        if found is not None and self._key(name) not in self._files:
            return self._experts(*found, shape, box)
        if (other := self._key(saved_name(self._family, name))) in self._files:
            return self._read(other, name, shape, box)
        return self._read(self._key(name), name, shape, box)

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix) if self._bare else name

    def _experts(self, owner: str, parts: tuple[str, ...], shape: torch.Size, box: tuple[slice, ...]) -> Tensor | None:
        """The part `box` of the parameter of all experts, from each expert's matrices. None if a matrix is missing."""
        rows = torch.Size([shape[1] // len(parts), shape[2]])
        everything = (slice(None), slice(None))
        experts = []
        for number in range(*box[0].indices(shape[0])):
            names = [f"{owner}.{number}.{part}" for part in parts]
            found = [self._read(self._key(name), name, rows, everything) for name in names]
            if any(matrix is None for matrix in found):
                return None
            experts.append(torch.cat([matrix for matrix in found if matrix is not None])[box[1:]])
        return torch.stack(experts) if experts else torch.empty(0, *shape[1:])[:, *box[1:]]

    def _read(self, key: str, name: str, shape: torch.Size, box: tuple[slice, ...]) -> Tensor | None:
        """Reads the tensor `key` of the files. `name`: its name in a message."""
        if key not in self._files:
            return None
        file, there = self._files[key]
        part = file.get_slice(there)
        found = tuple(part.get_shape())
        if found != tuple(shape):
            raise ModelError(f"{self.path}: {name} has shape {found}, config.json asks for {tuple(shape)}")
        values: Tensor = part[box] if found else file.get_tensor(there)
        PROGRESS.made()
        return values


class Seed:
    """Makes random weights as Hugging Face initialises these families. Matrices are normal with the configuration's
    standard deviation. Biases, sinks and the padding row are 0. The weights of norms are 1, or 0 if the family adds 1.

    Each tensor has its own generator, which is seeded by (seed, name). So it does not depend on the pipeline split, nor
    on the other tensors of a rank."""

    def __init__(self, seed: int, config: Any, stage: PipelineStage) -> None:
        self._seed = seed
        self._std = float(getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02)
        self._pad = getattr(config, "pad_token_id", None)
        self._norm = torch.zeros if stage.family.norm_offset else torch.ones
        self._ones = tuple(f".{name}" for name in stage.family.vectors)
        self._single = stage.family.single
        self._embedding = stage.embedding_name
        self._tied_copy = stage.tied_copy

    def read(self, name: str, shape: torch.Size, box: tuple[slice, ...]) -> Tensor | None:
        owner, _, kind = name.rpartition(".")
        is_embedding = name in (self._embedding, self._tied_copy)
        if (single := next((v for n, v in self._single.items() if name.endswith(f".{n}")), None)) is not None:
            values = torch.full(shape, single)
        elif len(shape) == 1 and name.endswith(self._ones):
            values = torch.ones(shape)
        elif kind.endswith("bias") or kind == "sinks" or owner == VALUE_HEAD:
            values = torch.zeros(shape)
        elif len(shape) > 1:
            values = torch.empty(shape)
            values.normal_(0.0, self._std, generator=generator(self._seed, self._embedding if is_embedding else name))
            if is_embedding and self._pad is not None:
                values[self._pad] = 0.0
        else:
            values = self._norm(shape)
        return values[box]


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose state is a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def stacked(family: ModelFamily, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Says how files hold `name`, a parameter of all experts (experts, rows, columns). Returns the beginning of the
    experts' names, and the names of the matrices whose rows make up one expert. Returns None for other parameters."""
    owner, _, kind = name.rpartition(".")
    if not owner.endswith(".experts") or kind not in family.matrices:
        return None
    return saved_name(family, owner), family.matrices[kind]


def saved_name(family: ModelFamily, name: str) -> str:
    """The name that a tensor or module has in files, if these hold it as a whole."""
    name = saved_as(family.renamed, name)
    return f"{family.saved_head}.{name.removeprefix('lm_head.')}" if name.startswith("lm_head.") else name


def in_files(family: ModelFamily, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a stage as files hold them."""
    for name, tensor in tensors:
        if (found := stacked(family, name)) is None:
            yield saved_name(family, name), tensor
            continue
        owner, parts = found
        for number, expert in enumerate(tensor.unbind(0)):
            for part, matrix in zip(parts, expert.chunk(len(parts), 0), strict=True):
                yield f"{owner}.{number}.{part}", matrix
