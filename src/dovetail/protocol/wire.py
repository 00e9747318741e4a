"""Encodes named numpy arrays as one safetensors document, without pickle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

CONTENT_TYPE = "application/vnd.dovetail.safetensors"

Arrays = dict[str, NDArray[np.generic]]


def pack(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Serialise named arrays of any shape and numeric dtype."""
    return bytes(_save({name: np.ascontiguousarray(value) for name, value in arrays.items()}))


def unpack(data: bytes) -> Arrays:
    """The inverse of `pack`. Raises `safetensors.SafetensorError` for a malformed document."""
    return dict(_load(data))
