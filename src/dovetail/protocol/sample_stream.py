"""The messages with which many samples are drawn over one WebSocket, and the pace of a server's answers.

The coordinator opens one connection to each rollout server (`ROUTE`). It sends requests (`pack_requests`), and the ids
of requests that shall end (`pack_aborts`). The server answers in frames (`pack_rows`). A row has the new tokens of one
request. Each message is a fixed header, JSON for requests and ids, and arrays of 4-byte numbers, little-endian."""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUTE = "/dovetail/samples"
# The maximum bytes of a message. Requests and rows are divided into messages of about PART bytes. Only one long request
# or row makes a longer message.
MOST_BYTES = 1 << 30
PART = 4 << 20

MAGIC = b"DTLS"
VERSION = 1
REQUESTS, ABORTS, ROWS = 1, 2, 3
# The header has MAGIC, VERSION, the kind of message, the number of requests or rows, and the bytes of JSON.
_HEADER = struct.Struct("<4sHHII")

# A row has the place of its reason in REASONS. FAILED means that another server may draw the sample, and REFUSED that
# none will.
FAILED, REFUSED = "failed", "refused"
SERVER_REASONS = (None, "stop", "length", "repetition", "abort")
REASONS = (*SERVER_REASONS, FAILED, REFUSED)
_CODES = {reason: code for code, reason in enumerate(REASONS)}

# Tokens that are drawn in one decode step reach the sender within this time, in seconds.
STEP_SECONDS = 0.002


class FrameError(ValueError):
    """A message is not of this protocol, or not of this version of it."""


@dataclass
class Row:
    """New tokens of a request: ids (T,) as int32, and log-probabilities (T,) as float32 in nats. The last row of a
    request has a `reason`. `extra` then has an error's text, or the experts of the tokens as a numpy file."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    reason: str | None = None
    extra: bytes = b""


def pack_requests(requests: Sequence[tuple[bytes, Sequence[int]]], seconds: float) -> bytes:
    """A message that asks for samples. Each request has its fields as JSON, and its token ids of prompt and response so
    far. `seconds` is the time between two frames from now on."""
    text = b'{"seconds": %s, "requests": [%s]}' % (json.dumps(seconds).encode(), b", ".join(r[0] for r in requests))
    arrays = [np.asarray(tokens, "<i4") for _, tokens in requests]
    lengths = np.array([len(array) for array in arrays], "<u4")
    return _pack(REQUESTS, len(requests), text, lengths, *arrays)


def pack_aborts(ids: Sequence[str]) -> bytes:
    """A message that asks the server to end requests, by the field `request_id`."""
    return _pack(ABORTS, len(ids), json.dumps(list(ids)).encode())


def unpack_asked(
    message: bytes | str | None,
) -> tuple[list[tuple[dict[str, Any], list[int]]], float] | list[str]:
    """The requests of a message with the seconds between two frames, or the ids of requests that shall end. Raises
    FrameError."""
    kind, count, text, at = _head(message)
    assert isinstance(message, bytes)
    try:
        said = json.loads(text)
        if kind == ABORTS:
            return [str(each) for each in said]
        if kind != REQUESTS or len(said["requests"]) != count:
            raise FrameError(f"a message of kind {kind} with {count} requests")
        lengths = np.frombuffer(message, "<u4", count, at).astype(np.int64)
        ends = np.cumsum(lengths)
        tokens = np.frombuffer(message, "<i4", -1, at + 4 * count)
        if len(tokens) != lengths.sum():
            raise FrameError(f"{len(tokens)} token ids where {lengths.sum()} should be")
        rows = [tokens[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)]
        return list(zip(said["requests"], rows, strict=True)), float(said["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, FrameError) else FrameError(f"a message cannot be read: {error}") from error


def pack_rows(rows: Sequence[Row]) -> bytes:
    """A frame with these rows."""
    head = np.array([(row.number, len(row.tokens), _CODES[row.reason], len(row.extra)) for row in rows], "<u4").T.copy()
    arrays: list[array[Any]] = [*(row.tokens for row in rows), *(row.logprobs for row in rows)]
    return _pack(ROWS, len(rows), b"", head, *arrays) + b"".join(row.extra for row in rows)


def unpack_rows(message: bytes | str | None) -> list[Row]:
    """The rows of a frame. Raises FrameError."""
    kind, count, _, at = _head(message)
    assert isinstance(message, bytes)
    if kind != ROWS or len(message) < at + 16 * count:
        raise FrameError(f"a message of kind {kind} and {len(message)} bytes with {count} rows")
    numbers, lengths, codes, extras = np.frombuffer(message, "<u4", 4 * count, at).reshape(4, count).tolist()
    total, at = sum(lengths), at + 16 * count
    if len(message) != at + 8 * total + sum(extras) or max(codes, default=0) >= len(REASONS):
        raise FrameError(f"a frame of {len(message)} bytes with {count} rows and {total} tokens")
    rows, data = [], memoryview(message)
    rest = at + 8 * total
    for number, length, code, extra in zip(numbers, lengths, codes, extras, strict=True):
        end = at + 4 * length
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(data[at:end])
        logprobs.frombytes(data[at + 4 * total : end + 4 * total])
        rows.append(Row(number, tokens, logprobs, REASONS[code], message[rest : rest + extra]))
        at, rest = end, rest + extra
    return rows


def _pack(kind: int, count: int, text: bytes, *arrays: NDArray[Any] | array[Any]) -> bytes:
    return b"".join([_HEADER.pack(MAGIC, VERSION, kind, count, len(text)), text, *(each.tobytes() for each in arrays)])


def _head(message: bytes | str | None) -> tuple[int, int, bytes, int]:
    """The kind, count and JSON of a message, and where its arrays begin."""
    if not isinstance(message, bytes) or len(message) < _HEADER.size:
        raise FrameError("a message is shorter than its header")
    magic, version, kind, count, size = _HEADER.unpack_from(message)
    if magic != MAGIC:
        raise FrameError(f"a message begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"a message is of version {version} of the sample stream; this process speaks {VERSION}")
    at = _HEADER.size + size
    return kind, count, message[_HEADER.size : at], at


class Answers:
    """The answers of a server on one connection. It gathers tokens, and sends them in frames. The first tokens and the
    end of a request are sent at once, and all other tokens every `seconds`. What waits to be sent are at most the
    requests' own tokens. `send` sends a message, and returns when there is room for more."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]], seconds: float = 0.0) -> None:
        self._send, self.seconds = send, seconds
        self._rows: dict[int, Row] = {}
        self._urgent: set[int] = set()
        self._begun: set[int] = set()
        self._some, self._now = asyncio.Event(), asyncio.Event()
        self._sent = 0.0

    def add(
        self,
        number: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        reason: str | None = None,
        extra: bytes = b"",
    ) -> None:
        """Add new tokens of a request. The last call has a `reason`."""
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = Row(number)
        row.tokens.extend(tokens)
        row.logprobs.extend(logprobs)
        row.reason, row.extra = reason, extra
        if number not in self._begun or reason is not None:
            self._begun.add(number)
            self._urgent.add(number)
            self._now.set()
        if reason is not None:
            self._begun.discard(number)
        self._some.set()

    async def run(self) -> None:
        """Send frames until it is cancelled. Raises what `send` raises."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._some.wait()
            due = self._sent + self.seconds
            if clock() < due:
                timer = asyncio.get_running_loop().call_at(due, self._now.set)
                await self._now.wait()
                timer.cancel()
            await asyncio.sleep(STEP_SECONDS)
            if clock() >= due:
                self._sent = clock()
                rows, self._rows = list(self._rows.values()), {}
                self._some.clear()
            else:
                rows = [self._rows.pop(number) for number in self._urgent]
                if not self._rows:
                    self._some.clear()
            self._urgent.clear()
            self._now.clear()
            for part in _parts(rows):
                await self._send(pack_rows(part))


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    parts: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        if parts[-1] and size > PART:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += 16 + 8 * len(row.tokens) + len(row.extra)
    return parts if parts[0] else []
