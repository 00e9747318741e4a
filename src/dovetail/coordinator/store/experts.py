"""The experts that a rollout chose for the tokens of a sample (routing replay), as servers send them, as the store
keeps them, and as one array."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Nobody knows which experts this token got.
UNKNOWN = -1


def rows_of(encoded: str) -> bytes:
    """A server's answer as a file of numpy's: (tokens, layers, experts of a token) whole numbers. Raises ValueError."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    rows = _array(data)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(f"experts of shape {rows.shape}, dtype {rows.dtype}")
    return data


def _array(data: bytes) -> NDArray[np.integer]:
    found: NDArray[np.integer] = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def first_wanted(prompt: int, kept: int) -> int:
    """The first token whose experts a server shall say, if `kept` tokens of the response are from servers before.

    These said what they knew of all tokens but the last, which no server has computed yet. What this server computes of
    them again is not what their log-probabilities come from."""
    return prompt + kept - 1 if kept else 0


def whole(pieces: Sequence[tuple[int, bytes]], tokens: int) -> NDArray[np.int16] | None:
    """(tokens, layers, experts of a token) from what servers said, one after the other: each piece has its first token.
    UNKNOWN where none did, and for the last token, which no server computes. None if no server said anything."""
    result: NDArray[np.int16] | None = None
    for start, data in pieces:
        rows = _array(data)
        if result is None:
            result = np.full((tokens, *rows.shape[1:]), UNKNOWN, np.int16)
        rows = rows[: max(0, tokens - start)]
        result[start : start + len(rows)] = rows
    return result
