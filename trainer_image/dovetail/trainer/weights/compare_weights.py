"""Compares two folders of weights bit for bit. They are checkpoints, or exported Hugging Face models."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor

from dovetail.trainer.engine.checkpoint import STATE
from dovetail.trainer.files.safe_metadata import SafeReader


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both folders.

    `elements` of its `size` elements differ, by `largest` at most (absolute). If the tensors cannot be compared by
    elements, `reason` says why instead."""

    name: str
    size: int = 0
    elements: int = 0
    largest: float = 0.0
    reason: str = ""

    def sentence(self) -> str:
        """A sentence that says what differs, without a full stop."""
        if self.reason:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: {self.elements} of {self.size} elements, by {self.largest:.3g} at most"


@dataclass(frozen=True)
class Comparison:
    """The number of compared `tensors`, and their `differences` in the order of the models' layers."""

    tensors: int
    differences: list[Difference]

    def of_model(self, model: str) -> Comparison:
        """The same comparison, with the model's name before the names of its tensors."""
        return replace(self, differences=[replace(each, name=f"{model}/{each.name}") for each in self.differences])


def compare_checkpoints(one: Path, other: Path) -> Comparison:
    """Compare the parameters and optimizer moments of two checkpoint folders.

    They may come from different numbers of ranks. Raises OSError or UnsafeCheckpoint if a folder cannot be read."""
    mine, theirs = _checkpoint(one), _checkpoint(other)
    # Equal checksums mean equal files, so nothing needs to be read.
    if mine.keys() == theirs.keys() and _digests(one) == _digests(other) != {}:
        return Comparison(len(mine), [])
    return _compare(mine, theirs, lambda name: (_read(one, name, mine[name]), _read(other, name, theirs[name])))


def compare_models(one: Path, other: Path) -> Comparison:
    """Compare the safetensors files of two exported models. Raises SafetensorError for a damaged file."""
    mine, theirs = _exported(one), _exported(other)

    def read(name: str) -> tuple[Tensor, Tensor]:
        with safe_open(mine[name], "pt") as a, safe_open(theirs[name], "pt") as b:
            return a.get_tensor(name), b.get_tensor(name)

    return _compare(mine, theirs, read)


def difference(name: str, one: Tensor, other: Tensor) -> Difference | None:
    """The difference between two tensors, or None if they have the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (one, other)]
        return Difference(name, reason=f"{kinds[0]} in one and {kinds[1]} in the other")
    a, b = (t.contiguous().reshape(-1) for t in (one, other))
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    count = int((a.view(bits) != b.view(bits)).sum())
    return Difference(name, a.numel(), count, float((a.double() - b.double()).abs().max()))


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], read: Any) -> Comparison:
    found: list[Difference] = []
    names = sorted(mine.keys() | theirs.keys(), key=_order)
    for name in names:
        if name not in mine or name not in theirs:
            found.append(Difference(name, reason=f"only in the {'second' if name in theirs else 'first'} folder"))
        elif (differs := difference(name, *read(name))) is not None:
            found.append(differs)
    return Comparison(len(names), found)


def _order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A sort key: parameters come before the optimizer's moments, and layer 2 before layer 10."""
    moments = re.search(r"\.(first|second)_moments\.", name) is not None
    return moments, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _checkpoint(folder: Path) -> dict[str, Any]:
    """The metadata of a checkpoint's tensors, by name."""
    return dict(SafeReader(folder).read_metadata().state_dict_metadata)


def _read(folder: Path, name: str, meta: Any) -> Tensor:
    tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # only one process reads
        dcp.load({name: tensor}, storage_reader=SafeReader(folder), no_dist=True)
    return tensor


def _digests(folder: Path) -> dict[str, str]:
    """Checksums of the files that hold tensors, or nothing if the checkpoint has none."""
    files = json.loads((folder / STATE).read_text(encoding="utf-8")).get("files", {})
    return {name: digest for name, digest in files.items() if name != ".metadata"}


def _exported(folder: Path) -> dict[str, Path]:
    """The file of each tensor in a folder and its subfolders."""
    return dict(_tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((name, path) for name in file.keys())  # noqa: SIM118
