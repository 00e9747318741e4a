"""What files call the tensors that a stage holds. transformers keeps a layer's experts in two parameters; files hold
each expert's matrices by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from dovetail.manifest.model_families import ModelFamily


def stacked(family: ModelFamily, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Of a parameter (experts, rows, columns) that files hold apart: what the names of its experts begin with, and the
    names of the matrices whose rows make up one expert's. None for others."""
    owner, _, kind = name.rpartition(".")
    if family.experts is None or not owner.endswith(".experts") or kind not in family.experts.apart:
        return None
    return owner, family.experts.apart[kind]


def saved_name(family: ModelFamily, name: str) -> str:
    """The name in files of a tensor that files hold whole."""
    return f"{family.saved_head}.{name.removeprefix('lm_head.')}" if name.startswith("lm_head.") else name


def in_files(family: ModelFamily, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A stage's tensors as files hold them."""
    for name, tensor in tensors:
        if (found := stacked(family, name)) is None:
            yield saved_name(family, name), tensor
            continue
        owner, parts = found
        for number, expert in enumerate(tensor.unbind(0)):
            for part, matrix in zip(parts, expert.chunk(len(parts), 0), strict=True):
                yield f"{owner}.{number}.{part}", matrix
