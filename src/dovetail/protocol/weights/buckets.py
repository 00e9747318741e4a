"""Plans the buckets of weight transfers, with the place of each tensor in the packed buffers. The functions are pure
and need no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dovetail.protocol.messages import Bucket
from dovetail.protocol.weights.layout import Box, StageRanks, Tensor, volume

ALIGNMENT = 16
# Two int64 words after the last tensor of every bucket on the wire.
CHECKSUM_BYTES = 16
CPU_BUCKET_BYTES = 64 * 2**20
GPU_BUCKET_BYTES = 256 * 2**20

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """The name of a tensor, its torch dtype without the prefix, and its shape. `box` is the part of the tensor that is
    meant, or None for all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None = None

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the part that is meant."""
        return self.shape if self.box is None else tuple(end - start for start, end in self.box)

    @property
    def itemsize(self) -> int:
        """The bytes of one element. Raises ValueError for a dtype that cannot be sent."""
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"tensor {self.name} has dtype {self.dtype}, which weight transfer does not carry")
        return _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of the part that is meant. Raises ValueError for a dtype that cannot be sent."""
        return volume(tuple((0, n) for n in self.extent)) * self.itemsize


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layer_of(name: str) -> str:
    """The decoder layer of a parameter: its name up to the first number. It is '' for embeddings, norms and heads.

    >>> layer_of("model.layers.3.mlp.experts.7.w1")
    'model.layers.3'
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def _parent(name: str) -> str:
    """The module that holds a projection. It holds q, k and v together (or gate and up), and receivers fuse these."""
    return ".".join(name.split(".")[:-2])


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Pack tensors, in the given order, into buckets of at most `bucket_bytes`. A layer stays in one bucket if it fits.
    Otherwise each of its modules does if it fits. A tensor is never split, so a tensor larger than `bucket_bytes` gets
    a larger bucket of its own. Raises ValueError for a repeated name, an unknown dtype or a `bucket_bytes` below the
    alignment."""
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least {ALIGNMENT}")
    specs = list(tensors)
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name} appears twice")
        seen.add(spec.name)

    packed: list[list[TensorSpec]] = []
    filled = 0

    def add(unit: Sequence[TensorSpec]) -> None:
        nonlocal filled
        size = _size(unit)
        if not packed or filled + size > bucket_bytes:
            packed.append([])
            filled = 0
        packed[-1].extend(unit)
        filled += size

    for layer, members in groupby(specs, key=lambda s: layer_of(s.name)):
        unit = list(members)
        if layer and _size(unit) <= bucket_bytes:
            add(unit)
            continue
        for _, siblings in groupby(unit, key=lambda s: _parent(s.name) if layer else s.name):
            module = list(siblings)
            if _size(module) <= bucket_bytes:
                add(module)
            else:
                for spec in module:
                    add([spec])
    return [_bucket(unit) for unit in packed]


def _size(unit: Iterable[TensorSpec]) -> int:
    return sum(aligned(spec.nbytes) for spec in unit)


def _bucket(specs: Sequence[TensorSpec]) -> Bucket:
    offsets = []
    end = 0
    for spec in specs:
        offsets.append(end)
        end += aligned(spec.nbytes)
    return Bucket(
        names=[s.name for s in specs],
        dtypes=[s.dtype for s in specs],
        shapes=[list(s.shape) for s in specs],
        boxes=[list(s.box or ()) for s in specs] if any(s.box is not None for s in specs) else None,
        offsets=offsets,
        nbytes=end,
    )


def bucket_specs(bucket: Bucket) -> list[TensorSpec]:
    """The entries of a bucket, in order."""
    boxes = [None] * len(bucket.names) if bucket.boxes is None else [tuple(box) for box in bucket.boxes]
    return [
        TensorSpec(name, dtype, tuple(shape), box)
        for name, dtype, shape, box in zip(bucket.names, bucket.dtypes, bucket.shapes, boxes, strict=True)
    ]


def share_buckets(
    buckets: Sequence[Bucket],
    ranks: StageRanks,
    tp_dims: Mapping[str, int] | None = None,
    experts: Collection[str] = (),
) -> dict[int, list[Bucket]]:
    """The buckets that each rank of a stage sends, by rank. Ranks that send nothing are left out, except rank 0.

    `tp_dims` gives the dimension of those tensors that tensor-parallel ranks share, and `experts` has those that are of
    divided experts. Every element is sent once, to all receivers, by a rank that holds it (`StageRanks.shares`). Rank
    0's buckets name every tensor, even if its own part is empty."""
    dims = tp_dims or {}
    specs = [spec for bucket in buckets for spec in bucket_specs(bucket)]
    found = ranks.shares([Tensor(s.shape, dims.get(s.name), s.itemsize, s.name in experts) for s in specs])
    boxes: dict[tuple[int, str], list[Box]] = {}
    for spec, parts in zip(specs, found, strict=True):
        for rank, box in sorted(parts, key=lambda part: (part[1], part[0])):
            boxes.setdefault((rank, spec.name), []).append(box)
    senders = {rank for rank, _ in boxes}
    if senders <= {0}:
        return {0: list(buckets)}
    shares = {}
    for rank in sorted({0, *senders}):
        shares[rank] = [
            _bucket(
                [
                    replace(spec, box=box)
                    for spec in bucket_specs(bucket)
                    for box in boxes.get((rank, spec.name), [tuple((0, 0) for _ in spec.shape)] if rank == 0 else [])
                ]
            )
            for bucket in buckets
        ]
    return shares
