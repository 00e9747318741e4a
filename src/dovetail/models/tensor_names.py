"""Gives the names that a stage's tensors have in files. transformers keeps a layer's experts in two parameters. Files
hold the matrices of each expert separately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from dovetail.manifest.model_families import ModelFamily


def stacked(family: ModelFamily, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Says how files hold `name`, a parameter of all experts (experts, rows, columns). Returns the beginning of the
    experts' names, and the names of the matrices whose rows make up one expert. Returns None for other parameters."""
    owner, _, kind = name.rpartition(".")
    if family.experts is None or not owner.endswith(".experts") or kind not in family.experts.matrices:
        return None
    return owner, family.experts.matrices[kind]


def saved_name(family: ModelFamily, name: str) -> str:
    """The name that a tensor has in files, if these hold it as a whole."""
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
