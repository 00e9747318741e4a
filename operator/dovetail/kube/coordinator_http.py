"""Sends requests to a job's coordinator. Its answers are not trusted, because a coordinator runs its tenant's code.

Whatever the coordinator answers, the request takes a bounded time and memory. The job's token is sent to no other
address."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import aiohttp

from dovetail.protocol.errors import error_text
from dovetail.protocol.http.client_session import client_session
from dovetail.protocol.process.env import COORDINATOR_PORT

# A page of history has up to 1 MiB, the status of 500 instances about 200 KB, and a trace of a large job a few MiB.
DOCUMENT_BYTES, DOCUMENT_VALUES = 2 << 20, 200_000
TRACE_BYTES = 8 << 20


class NoAnswer(Exception):
    """The coordinator did not answer as it should. The message says what is wrong."""


def pod_url(address: str) -> str:
    """`http://host:port` of the coordinator in the pod with this IP address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{COORDINATOR_PORT}"


def session() -> aiohttp.ClientSession:
    """A client session for coordinators alone. It keeps no cookies."""
    return client_session(cookie_jar=aiohttp.DummyCookieJar())


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    token: str,
    *,
    seconds: float,
    most: int,
    take: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The body of a GET. It has at most `most` bytes, and takes at most `seconds` from the first to the last byte.
    `take` gets the number of bytes that come, before they are kept. If it raises, the request ends. Raises NoAnswer."""
    try:
        async with session.get(
            url,
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            allow_redirects=False,  # the token is only for this address
            auto_decompress=False,  # a kilobyte can become a gigabyte
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as reply:
            encoding = reply.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise NoAnswer(f"the coordinator's answer is compressed ({encoding[:32]!r}), which nobody asked for")
            content = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                take(len(chunk))
                content += chunk
                if len(content) > most:
                    raise NoAnswer(f"the coordinator's answer has more than {most} bytes")
    except TimeoutError as error:
        raise NoAnswer(f"the coordinator did not finish its answer within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(f"the coordinator does not answer: {error_text(error)[:200]}") from error
    if reply.status != 200:
        said = bytes(content[:200]).decode(errors="replace").strip()
        raise NoAnswer(f"the coordinator answers {reply.status}: {said}")
    return bytes(content)


def document(content: bytes, values: int = DOCUMENT_VALUES) -> dict[str, Any]:
    """The JSON object in an answer. Null replaces numbers that are not finite. Raises NoAnswer, also for an answer with
    more than about `values` values, because it would take much more memory than its bytes."""
    # Each value except the first follows one of these.
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > values:
        raise NoAnswer(f"the coordinator's answer has more than {values} values")
    try:
        found = json.loads(content, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("the coordinator's answer is no JSON") from error
    if not isinstance(found, dict):
        raise NoAnswer("the coordinator's answer is no JSON object")
    return found


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
