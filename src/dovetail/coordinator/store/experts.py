"""Converts the experts that a rollout chose for the tokens of a sample (routing replay). They have three forms, which
are the messages of servers, the rows of the store, and one array."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Nobody knows which experts this token got.
UNKNOWN = -1


def checked_rows(data: bytes) -> bytes:
    """The same numpy file, which has the array (tokens, layers, experts of a token) of integers. Raises ValueError for
    any other."""
    rows = _array(data)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(f"experts of shape {rows.shape}, dtype {rows.dtype}")
    return data


def _array(data: bytes) -> NDArray[np.integer]:
    found: NDArray[np.integer] = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def first_wanted(prompt: int, kept: int, reported: int) -> int:
    """The first token for which a server must report experts. `kept` tokens of the response are from earlier servers.
    `reported` is the number of tokens whose experts these servers reported, as `reported_tokens` counts them. No server
    has computed the last kept token yet. This server computes all earlier tokens again, so it also reports the experts
    that a dead server did not report. So the experts of a sample do not depend on when a server dies. The
    log-probabilities come from the first computation."""
    return min(prompt + kept - 1, reported) if kept else 0


def tokens_of(data: bytes) -> int:
    """The number of tokens in a report."""
    return len(_array(data))


def reported_tokens(pieces: Sequence[tuple[int, bytes]]) -> int:
    """The number of tokens with known experts, counted from the first token up to the first gap. `pieces` are those of
    `whole`."""
    end = 0
    for start, data in pieces:
        if start <= end:
            end = max(end, start + tokens_of(data))
    return end


def whole(pieces: Sequence[tuple[int, bytes]], tokens: int) -> NDArray[np.int16] | None:
    """One array (tokens, layers, experts of a token) from the reports of several servers, in order. Each piece has its
    first token. Missing tokens are UNKNOWN, and so is the last token, which no server computes. None if there are no
    reports."""
    result: NDArray[np.int16] | None = None
    for start, data in pieces:
        rows = _array(data)
        if result is None:
            result = np.full((tokens, *rows.shape[1:]), UNKNOWN, np.int16)
        rows = rows[: max(0, tokens - start)]
        result[start : start + len(rows)] = rows
    return result
