"""Encodes named numpy arrays as one safetensors document, without pickle, and gives parts of such a document.

Arrays with a row for each sequence and a column for each token are padded in memory. In a document they have no
padding: their rows follow each other, and the lengths say where each begins. Its metadata names these arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as _load

from dovetail.protocol.messages import BatchPart

CONTENT_TYPE = "application/vnd.dovetail.safetensors"
Array = NDArray[np.generic]
Arrays = dict[str, Array]

# The arrays of a batch of PPO with an entry for each token of prompt and response, and for each token of the response.
OF_SEQUENCE = ("tokens", "routed_experts")
OF_RESPONSE = (
    "rollout_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
    "step_rewards",
    "step_ends",
    "learnt",
    "old_logprobs",
)
# What `learnt` says of a response token: the model sampled it and learns it; or it was told it, and a branch of the
# episode begins there, which is a sequence of its own. It is 0 for all else that the model was told.
LEARNT, BRANCH = 1, 2
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
_NUMPY = {name: np.dtype(dtype) for dtype, name in _DTYPES.items()}
Ranges = list[tuple[int, int]]  # offset and number of bytes


def row_lengths(name: str, arrays: Mapping[str, Array]) -> NDArray[np.int64] | None:
    """The number of entries of each row of the array `name`. None for an array without an entry for each token."""
    of: tuple[str, ...] = ()
    if "prompt_lengths" in arrays and (name in OF_SEQUENCE or name in OF_RESPONSE):
        of = ("prompt_lengths", "response_lengths") if name in OF_SEQUENCE else ("response_lengths",)
    elif name.endswith(("tokens", "loss_mask")):
        of = (name.removesuffix("tokens").removesuffix("loss_mask") + "lengths",)
    found = [arrays.get(each) for each in of]
    if not found or any(each is None or each.ndim != 1 or each.dtype.kind not in "iu" for each in found):
        return None
    if len({len(each) for each in found if each is not None}) > 1:
        return None
    lengths: NDArray[np.int64] = np.sum([each.astype(np.int64) for each in found if each is not None], axis=0)
    return lengths if len(lengths) and lengths.min() >= 0 and lengths.max() > 0 else None


def padded(flat: Array, lengths: NDArray[np.int64], pad: float, rows: Sequence[int] | None = None) -> Array:
    """The rows of `flat`, which follow each other, as a table (N, longest, ...). With `rows`, `flat` has only these of
    the N rows, and the others are 0."""
    here = range(len(lengths)) if rows is None else rows
    shape = (len(lengths), int(lengths.max()), *flat.shape[1:])
    # Memory that is 0 and never touched is not taken.
    table = np.zeros(shape, flat.dtype)
    at = 0
    for row in here:
        length = int(lengths[row])
        table[row, :length] = flat[at : at + length]
        if pad:
            table[row, length:] = pad
        at += length
    return table


class SampleArrays(MutableMapping[str, Array]):
    """The arrays of a batch, by name. Those with an entry for each token are kept without padding. They are padded each
    time that they are asked for. `flat` has them, and `pads` what fills them up."""

    def __init__(self, flat: Arrays, pads: Mapping[str, float]) -> None:
        self._arrays, self.pads = flat, dict(pads)

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        if name not in self.pads:
            return array
        lengths = row_lengths(name, self._arrays)
        assert lengths is not None
        return padded(array, lengths, self.pads[name])

    def __setitem__(self, name: str, value: Array) -> None:
        self.pads.pop(name, None)
        self._arrays[name] = value

    def __delitem__(self, name: str) -> None:
        self.pads.pop(name, None)
        del self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """The bytes that the arrays take in memory."""
        return sum(array.nbytes for array in self._arrays.values())

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __ior__(self, other: Mapping[str, Array]) -> SampleArrays:
        self.update(other)
        return self

    def without_padding(self) -> tuple[Arrays, dict[str, float]]:
        """The arrays as a document has them, and what fills each of those without padding."""
        flat, pads = {}, {}
        for name, array in self._arrays.items():
            if name in self.pads:
                flat[name], pads[name] = array, self.pads[name]
            elif (pad := _pad_of(name, array, self._arrays)) is None:
                flat[name] = array
            else:
                lengths = row_lengths(name, self._arrays)
                assert lengths is not None
                flat[name] = np.concatenate([row[:length] for row, length in zip(array, lengths, strict=True)])
                pads[name] = pad
        return flat, pads


def _pad_of(name: str, array: Array, arrays: Mapping[str, Array]) -> float | None:
    """What fills up the rows of a padded array. None if it must stay as it is."""
    lengths = row_lengths(name, arrays)
    if lengths is None or array.ndim < 2 or array.shape[:2] != (len(lengths), int(lengths.max())):
        return None
    beyond = array[np.arange(array.shape[1])[None, :] >= lengths[:, None]]
    pad = float(beyond.flat[0]) if beyond.size else 0.0
    return pad if (beyond == pad).all() else None


def pieces(arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """The parts of a document, in order. The arrays are not copied."""
    held = arrays if isinstance(arrays, SampleArrays) else SampleArrays(dict(arrays), {})
    flat, pads = held.without_padding()
    ready = {name: np.ascontiguousarray(array) for name, array in flat.items()}
    ready = {name: ready[name] for name in sorted(ready, key=lambda name: (-ready[name].itemsize, name))}
    metadata = {"flat": json.dumps(pads)} if pads else {}
    yield _header({name: (array.dtype, array.shape, array.nbytes) for name, array in ready.items()}, metadata)
    for array in ready.values():
        if array.nbytes:
            yield array.reshape(-1).view(np.uint8).data


def _header(arrays: Mapping[str, tuple[Any, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The header of a document with these arrays: their dtype, shape and bytes, in order."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, size) in arrays.items():
        offsets = [at, at + size]
        described[name] = {"dtype": _DTYPES[np.dtype(dtype).name], "shape": list(shape), "data_offsets": offsets}
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pack(arrays: Mapping[str, Array]) -> bytes:
    """Serialise named arrays of any shape and numeric dtype."""
    return b"".join(pieces(arrays))


def unpack(data: bytes) -> Arrays:
    """The inverse of `pack`. In a part of a document, rows that it does not have are 0. Raises
    `safetensors.SafetensorError` for a malformed document."""
    arrays: Arrays = dict(_load(data))
    metadata = _described(data[: 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    if "flat" not in metadata:
        return arrays
    try:
        pads, some = json.loads(metadata["flat"]), json.loads(metadata.get("some", "[]"))
        rows = json.loads(metadata.get("rows", "[]"))
        return {name: _padded(name, arrays, pads, rows if name in some else None) for name in arrays}
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise SafetensorError(f"the lengths of the rows do not fit the arrays: {error}") from error


def _padded(name: str, arrays: Arrays, pads: Mapping[str, float], rows: Sequence[int] | None) -> Array:
    if name not in pads:
        return arrays[name]
    lengths = row_lengths(name, arrays)
    mine = lengths if lengths is None or rows is None else lengths[np.asarray(rows, np.int64)]
    if lengths is None or mine is None or int(mine.sum()) != len(arrays[name]):
        raise ValueError(f"{name} has another number of entries")
    return padded(arrays[name], lengths, pads[name], rows)


def _described(header: bytes) -> dict[str, Any]:
    found = json.loads(header[8:])
    return found if isinstance(found, dict) else {}


class Document:
    """A document in memory or in a file, of which parts are sent."""

    def __init__(self, source: bytes | Path) -> None:
        """Raises OSError for a file that is gone."""
        self.source = source
        self.size = len(source) if isinstance(source, bytes) else source.stat().st_size

    def read(self, ranges: Ranges) -> bytes:
        """The bytes of these ranges. Raises OSError."""
        if isinstance(self.source, bytes):
            return b"".join(memoryview(self.source)[offset : offset + count] for offset, count in ranges)
        with self.source.open("rb") as file:
            return b"".join(os.pread(file.fileno(), count, offset) for offset, count in ranges)

    def part(self, wanted: BatchPart) -> tuple[bytes, Ranges]:
        """The header of a document with a part of the arrays, and the ranges of this document that follow it.

        Arrays without an entry for each token are always whole. Raises ValueError for a row that there is not, and for
        a malformed document, and OSError."""
        start = 8 + int.from_bytes(self.read([(0, 8)]), "little")
        described = _described(self.read([(0, start)]))
        metadata = described.pop("__metadata__", {})
        pads = json.loads(metadata.get("flat", "{}"))
        arrays = dict(sorted(described.items(), key=lambda item: item[1]["data_offsets"][0]))
        if not pads:
            return b"", [(0, self.size)]
        lengths = {
            name: np.frombuffer(self._bytes(start, at), _NUMPY[at["dtype"]])
            for name, at in arrays.items()
            if name.endswith("lengths")
        }
        sent: dict[str, tuple[Any, Sequence[int], int]] = {}
        ranges: Ranges = []
        for name, at in arrays.items():
            first, end = at["data_offsets"]
            dtype, shape = _NUMPY[at["dtype"]], at["shape"]
            if name in pads and name in wanted.some:
                of = row_lengths(name, lengths)
                if of is None or (wanted.rows and max(wanted.rows) >= len(of)):
                    raise ValueError(f"{name} has no row {max(wanted.rows, default=0)}")
                entry = (end - first) // max(1, shape[0])
                ends = np.cumsum(of) * entry
                mine = [(start + first + int(ends[row] - of[row] * entry), int(of[row]) * entry) for row in wanted.rows]
                ranges += mine
                sent[name] = (
                    dtype,
                    [sum(int(of[row]) for row in wanted.rows), *shape[1:]],
                    sum(count for _, count in mine),
                )
            elif name not in pads or name in wanted.whole:
                ranges.append((start + first, end - first))
                sent[name] = (dtype, shape, end - first)
        more = {"some": json.dumps([n for n in wanted.some if n in sent]), "rows": json.dumps(wanted.rows)}
        kept = json.dumps({name: pad for name, pad in pads.items() if name in sent})
        return _header(sent, {"flat": kept, **more}), _joined(ranges)

    def _bytes(self, start: int, at: Mapping[str, Any]) -> bytes:
        first, end = at["data_offsets"]
        return self.read([(start + first, end - first)])


def _joined(ranges: Ranges) -> Ranges:
    """The same bytes in as few ranges as possible."""
    found: Ranges = []
    for offset, count in ranges:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((offset, count))
    return found
