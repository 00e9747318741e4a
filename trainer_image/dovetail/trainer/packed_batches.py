"""Turns a batch's arrays into micro-batches. It checks the arrays, splits them over data-parallel ranks, and packs
them.

Everything here is a pure function of the batch. So every rank computes the same split by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.wire import Arrays
from dovetail.trainer.algorithms.balance import partition
from dovetail.trainer.command_errors import BadCommand


def read(arrays: Arrays, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
    """Array `name` as a tensor of `dtype`. None in `shape` stands for any size.

    Raises BadCommand that names the array, if it is missing or has another shape."""
    if name not in arrays:
        raise BadCommand(f"the batch has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    array = arrays[name]
    wanted = " x ".join("?" if size is None else str(size) for size in shape)
    if array.ndim != len(shape) or any(
        size is not None and size != found for size, found in zip(shape, array.shape, strict=False)
    ):
        raise BadCommand(f"batch array {name!r} has shape {list(array.shape)}, expected {wanted}")
    return torch.from_numpy(np.array(array)).to(dtype)


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens. `tokens` (N, T) int64 is right-padded. `lengths` (N,) int64 are each in 1..T.

    `routing` (N, T, layers, experts of a token) int16: the experts that the rollout chose, -1 where they are not known.
    It is None if none are known. `branches` (N, T) bool marks tokens at which a sequence of its own begins, which does
    not see what is before it in its row. It is None without any."""

    tokens: Tensor
    lengths: Tensor
    routing: Tensor | None = None
    branches: Tensor | None = None

    @staticmethod
    def read(arrays: Arrays, prefix: str = "") -> Sequences:
        """The sequences in a batch's arrays, whose names begin with `prefix`. Raises BadCommand."""
        tokens = read(arrays, f"{prefix}tokens", torch.int64, (None, None))
        lengths = read(arrays, f"{prefix}lengths", torch.int64, (tokens.shape[0],))
        return Sequences.checked(tokens, lengths, f"{prefix}lengths")

    @staticmethod
    def checked(tokens: Tensor, lengths: Tensor, name: str) -> Sequences:
        """The sequences. Raises BadCommand for an empty batch, a length outside 1..T or a negative token id."""
        if tokens.shape[0] == 0:
            raise BadCommand("the batch has no sequences")
        if int(lengths.min()) < 1 or int(lengths.max()) > tokens.shape[1]:
            raise BadCommand(f"batch array {name!r} must lie in 1..{tokens.shape[1]}, the width of its tokens")
        if int(tokens.min()) < 0:
            raise BadCommand("the batch holds negative token ids")
        return Sequences(tokens, lengths)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def pack(self, rows: Sequence[int], wanted: Tensor) -> Packed:
        """Pack these rows without their padding. `wanted` (rows, T) bool marks the positions whose outputs are needed.
        None of them may lie beyond its row's length."""
        index = torch.tensor(rows, dtype=torch.int64)
        lengths = self.lengths[index]
        width = int(lengths.max())
        tokens = self.tokens[index, :width]
        inside = torch.arange(width) < lengths.unsqueeze(1)
        places = wanted[:, :width][inside].nonzero().squeeze(1)
        routing = None if self.routing is None else self.routing[index, :width][inside]
        targets = shifted(tokens)[inside][places]
        if self.branches is not None:
            begins = self.branches[index, :width].clone()
            begins[:, 0] = True
            starts = begins[inside].nonzero().squeeze(1)
            lengths = starts.diff(append=lengths.sum().unsqueeze(0))
        return Packed(tokens[inside].unsqueeze(0), tuple(lengths.tolist()), places, targets, routing)


@dataclass(frozen=True)
class Packed:
    """Sequences one after another. `tokens` (1, total) int64 holds them, and their `lengths` add up to total.

    `wanted` (n,) int64: positions in 0..total-1 whose outputs are needed, ascending. `targets` (n,) int64: the token
    after each of them. After a sequence's last token it can be any token. `routing` (total, layers, experts of a
    token): the experts that the rollout chose, or None if they are not known."""

    tokens: Tensor
    lengths: tuple[int, ...]
    wanted: Tensor
    targets: Tensor
    routing: Tensor | None = None

    @property
    def total(self) -> int:
        """The number of tokens."""
        return sum(self.lengths)

    def filled(self, least: int) -> Packed:
        """At least so many tokens: if they are fewer, a sequence of zeros follows, which nobody reads."""
        lacking = least - self.total
        if lacking <= 0:
            return self
        pad = torch.nn.functional.pad
        routing = None if self.routing is None else pad(self.routing, (0, 0, 0, 0, 0, lacking), value=-1)
        return replace(self, tokens=pad(self.tokens, (0, lacking)), lengths=(*self.lengths, lacking), routing=routing)

    def asked(self, own: slice) -> slice:
        """The places in `wanted` of the positions that the tokens `own` hold."""
        first, last = torch.searchsorted(self.wanted, torch.tensor([own.start, own.stop])).tolist()
        return slice(first, last)

    def of(self, own: slice) -> Packed:
        """What a rank computes that has the tokens `own` only. `lengths` are still those of all tokens, and `wanted`
        are places among its own."""
        if own == slice(0, self.total):
            return self
        asked = self.asked(own)
        return Packed(
            self.tokens[:, own],
            self.lengths,
            self.wanted[asked] - own.start,
            self.targets[asked],
            None if self.routing is None else self.routing[own],
        )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait, because CUDA first copies memory that is not page-locked."""
    return tensor.to(device, non_blocking=True)


def moved_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """`moved` for several tensors of one shape. A GPU gets them in one copy."""
    return tensors if device.type == "cpu" else list(moved(torch.stack(tensors), device).unbind())


def unpacked(values: Tensor, where: Tensor) -> Tensor:
    """A table (B, T) with `values` (n,) at the n places that `where` (B, T) bool marks, row by row, and 0 elsewhere."""
    where = moved(where, values.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


def split(lengths: Sequence[int], dp: int, micro: int, packs: bool = True) -> list[list[list[int]]]:
    """The rows of each micro-batch of each data-parallel rank: `result[dp_rank][i]` has exactly `micro` rows.

    Ranks get equally many rows and nearly equally many tokens. The same holds for the micro-batches of a rank, which
    come largest first. For models that do not pack (`ModelFamily.packs`), a micro-batch has rows of similar lengths
    instead, and padding is small. Raises BadCommand if the rows cannot be divided evenly."""
    if len(lengths) % (dp * micro):
        raise BadCommand(
            f"{len(lengths)} sequences cannot be split into micro-batches of {micro} on {dp} data-parallel ranks; "
            "the (mini-)batch size must be a multiple of microBatchSize times dp"
        )
    count = len(lengths) // (dp * micro)
    if not packs:
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        return _dealt([sorted(order[i : i + micro]) for i in range(0, len(order), micro)], lengths, dp)
    result = []
    for rows in partition(lengths, dp, equal_counts=True):
        parts = partition([lengths[row] for row in rows], count, equal_counts=True)
        mine = [[rows[i] for i in part] for part in parts]
        result.append(sorted(mine, key=lambda part: -sum(lengths[row] for row in part)))
    return result


def split_tokens(
    lengths: Sequence[int], dp: int, most: int, count: int | None = None, packs: bool = True
) -> list[list[list[int]]]:
    """The rows of each micro-batch of each data-parallel rank, cut by tokens.

    No micro-batch has more than `most` tokens, and all have nearly equally many. Every rank has the same number of
    micro-batches: the smallest that allows this, or `count` if that is larger. For models that do not pack
    (`ModelFamily.packs`), rows of similar lengths come together, and padding counts.

    For each i the micro-batches `result[d][i]` of all ranks d have similar sizes, because ranks wait for each other at
    each one. They come largest first. Raises BadCommand for a row of more than `most` tokens, and if the number of rows
    is no multiple of `dp`."""
    if not lengths or len(lengths) % dp:
        raise BadCommand(f"{len(lengths)} sequences cannot be shared evenly by {dp} data-parallel ranks")
    if (longest := max(lengths)) > most:
        raise BadCommand(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {most}; see microBatchTokens"
        )
    count = max(count or 1, -(-sum(lengths) // (dp * most)))
    while (parts := (_parts if packs else _similar)(lengths, dp * count, most)) is None:
        count += 1
    return _dealt(parts, lengths, dp)


def _dealt(parts: list[list[int]], lengths: Sequence[int], dp: int) -> list[list[list[int]]]:
    """The parts of each data-parallel rank, the largest first. The i-th parts of all ranks have similar sizes."""
    parts.sort(key=lambda part: (-sum(lengths[row] for row in part), part))
    found: list[list[list[int]]] = [[] for _ in range(dp)]
    for start in range(0, len(parts), dp):
        # The order alternates, so that no rank always gets the larger ones.
        turn = 1 if start // dp % 2 == 0 else -1
        for rank, part in zip(range(dp)[::turn], parts[start : start + dp], strict=True):
            found[rank].append(part)
    return found


def pair_lengths(lengths: Tensor, packs: bool) -> list[int]:
    """The number of tokens of each pair that a pass computes. `lengths` (2n,) has the n chosen sequences, then the
    rejected ones. For models that do not pack, the shorter one is padded to the longer one."""
    chosen, rejected = lengths.chunk(2)
    found: list[int] = (chosen + rejected if packs else 2 * torch.maximum(chosen, rejected)).tolist()
    return found


def micro_batch_count(batches: Iterable[Sequence[int]], dp: int, most: int, packs: bool = True) -> int:
    """The number of micro-batches of a rank that is enough for each mini-batch. `batches` gives the lengths of their
    rows.

    Raises BadCommand as in `split_tokens`."""
    return max(len(split_tokens(lengths, dp, most, packs=packs)[0]) for lengths in batches)


def _parts(lengths: Sequence[int], count: int, most: int) -> list[list[int]] | None:
    """All rows in `count` non-empty parts of nearly equally many tokens, or None if a part would have more than
    `most`."""
    if count == len(lengths):
        return [[row] for row in range(len(lengths))]
    for equal_counts in (False, True):
        parts = partition(lengths, count, equal_counts)
        if all(parts) and max(sum(lengths[row] for row in part) for part in parts) <= most:
            return parts
    return None


def _similar(lengths: Sequence[int], count: int, most: int) -> list[list[int]] | None:
    """All rows in `count` non-empty parts, which have at most `most` tokens when all rows of a part are as long as its
    longest. None if that takes more parts."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= most:
            parts[-1].append(row)
        else:
            parts.append([row])
    if len(parts) > count:
        return None
    while len(parts) < count:  # halve the largest that can be halved
        at = max(range(len(parts)), key=lambda i: ((len(parts[i]) > 1) * len(parts[i]) * lengths[parts[i][0]], -i))
        half = len(parts[at]) // 2
        parts[at : at + 1] = [parts[at][:half], parts[at][half:]]
    return [sorted(part) for part in parts]


@dataclass(frozen=True)
class Padded:
    """Rows of a micro-batch, filled up with repeats. `weights` (rows,) float32 are 0 for the repeats and 1 for the
    others."""

    rows: list[int]
    weights: Tensor


def split_padded(count: int, dp: int, micro: int, at_least: int = 1) -> list[list[Padded]]:
    """Like `split`, for any number of rows. Rows stay in order, and repeats of row 0 with weight 0 fill them up. So
    every rank runs the same number of micro-batches of one size, and at least `at_least`."""
    micro = min(micro, -(-count // dp))
    each = max(at_least, -(-count // (dp * micro)))
    result = []
    for rank in range(dp):
        start = rank * each * micro
        rows = range(start, start + each * micro)
        real = [row if row < count else 0 for row in rows]
        weights = torch.tensor([float(row < count) for row in rows])
        parts = [slice(i, i + micro) for i in range(0, each * micro, micro)]
        result.append([Padded(real[part], weights[part]) for part in parts])
    return result


def padded_tokens(lengths: Sequence[int], dp: int, most: int, packs: bool = True) -> list[list[Padded]]:
    """Like `split_tokens`, for any number of rows. Repeats of row 0 with weight 0 fill them up to a multiple of
    `dp`."""
    real = len(lengths)
    every = [*lengths, *[lengths[0]] * (-real % dp)]

    def part(rows: list[int]) -> Padded:
        weights = torch.tensor([float(row < real) for row in rows])
        return Padded([row if row < real else 0 for row in rows], weights)

    return [[part(rows) for rows in rank] for rank in split_tokens(every, dp, most, packs=packs)]


def generator(*key: int | str) -> torch.Generator:
    """A random generator. Its seed depends on the key alone, so it is the same on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def mini_batches(count: int, size: int, epochs: int, seed: int, step: int) -> Iterator[tuple[int, list[int]]]:
    """(epoch, rows) of every optimizer step of an iteration. In each epoch all rows are permuted with a seed made of
    (seed, step, epoch) and cut into mini-batches. Raises BadCommand unless `size` divides `count`."""
    if count % size:
        raise BadCommand(f"{count} samples cannot be cut into mini-batches of {size}; check ppo.miniBatchSize")
    for epoch in range(epochs):
        order = torch.randperm(count, generator=generator("mini-batches", seed, step, epoch)).tolist()
        for start in range(0, count, size):
            yield epoch, order[start : start + size]


def shifted(tokens: Tensor) -> Tensor:
    """The token that each position predicts, (B, T) for `tokens` (B, T). The last column predicts nothing and is 0."""
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1))
