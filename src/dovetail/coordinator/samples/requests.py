"""Sends requests to vLLM servers, and aborts them. Each sample is one streamed request to `/inference/v1/generate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from pydantic_core import from_json

from dovetail.coordinator.samples.in_flight import GenerationSettings, Work
from dovetail.coordinator.store.experts import rows_of
from dovetail.coordinator.workers.fleet import Instance
from dovetail.manifest.types import Generation
from dovetail.protocol.http.client_session import client_session, resend
from dovetail.protocol.messages import WEIGHTS_HEADER
from dovetail.protocol.sampling import sampling_params

ROUTE = "/inference/v1/generate"
ABORT_ROUTE = "/inference/v1/abort_requests"
ABORT_PREFIX = "generate-tokens-"
DATA = b"data: "
DONE = b"data: [DONE]"
# vLLM sends this value in place of a log-probability that is not a number.
NOT_A_NUMBER = -9999.0
# With these statuses the request itself is wrong, so no server will accept it.
REFUSALS = frozenset({400, 401, 403, 404, 413, 422})

# It is called with the new token ids and their log-probabilities. The last call also has the finish reason, and the
# experts of the tokens if the server sends them.
OnTokens = Callable[[list[int], list[float], str | None, bytes | None], None]


class ServerFailure(Exception):
    """This server did not finish the request. Another one may."""


class RequestRefused(Exception):
    """The server reports that the request itself is wrong."""


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], on_tokens: OnTokens, version: int | None = None
) -> None:
    """Send the request, and pass tokens to `on_tokens` as they arrive. `version` is the version of the weights that
    must draw the sample. Returns after the event with a finish reason. Raises RequestRefused. Raises ServerFailure if
    the server fails, or if the stream ends early or cannot be read."""
    headers = {} if version is None else {WEIGHTS_HEADER: str(version)}
    try:
        async with session.post(url + ROUTE, data=json.dumps(body).encode(), headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(2000)).decode(errors="replace")
                kind = RequestRefused if response.status in REFUSALS else ServerFailure
                raise kind(f"status {response.status}: {_message(text)}")
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                if _take([e[len(DATA) :] for e in events if e.startswith(DATA) and e != DONE], on_tokens):
                    return
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServerFailure(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    raise ServerFailure("the stream ended before the response was complete")


def _take(events: list[bytes], on_tokens: OnTokens) -> bool:
    """Pass on all tokens that were read at once. Returns True if they end the response. Raises ServerFailure."""
    if not events:
        return False
    tokens: list[int] = []
    logprobs: list[float] = []
    reason: str | None = None
    experts: bytes | None = None
    try:
        # This is three times as fast as `json`, which took most of the coordinator's CPU time.
        for data in from_json(b"[" + b",".join(events) + b"]"):
            if "error" in data:
                raise ServerFailure(_message(json.dumps(data)))
            if data["choices"]:
                choice = data["choices"][0]
                new = choice["token_ids"] or []
                tokens += new
                if new:
                    logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                reason = choice["finish_reason"]
                if reason is not None:
                    if (encoded := choice.get("routed_experts")) is not None:
                        experts = rows_of(encoded)
                    break
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerFailure(f"an event of its stream cannot be read: {events[-1][:200]!r}") from error
    if len(tokens) != len(logprobs):
        raise ServerFailure(f"it sent {len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if logprobs and min(logprobs) <= NOT_A_NUMBER:
        raise ServerFailure("its model puts out log-probabilities that are not numbers")
    if tokens or reason is not None:
        on_tokens(tokens, logprobs, reason, experts)
    return reason is not None


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no message"


async def abort(session: aiohttp.ClientSession, url: str, request_ids: Sequence[str], seconds: float) -> str | None:
    """Ask a server to abort requests. Their streams then end with the finish reason `abort`. The time limit is
    `seconds`. Returns an error text, or None."""
    body = {"request_ids": [ABORT_PREFIX + i for i in request_ids]}
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with session.post(url + ABORT_ROUTE, json=body, timeout=timeout) as response:
            return None if response.status == 200 else f"status {response.status}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")


MODEL = "actor"


def body(
    work: Work, generation: Generation, instance: Instance, left: int, interval: int, replay: bool = False
) -> dict[str, Any]:
    """The body of a request for `left` more tokens after the prompt and the tokens so far. `interval` is the number of
    tokens per event. With `replay`, the server must report which experts each token used."""
    sampler = instance.abilities.get("sampler", "counter")
    params = sampling_params(generation, work.seed, left, sampler, generated=len(work.tokens))
    params["stream_interval"] = interval
    if replay:
        params["routed_experts_prompt_start"] = work.experts_from
    return {
        "request_id": work.request_id,
        "model": MODEL,
        "token_ids": work.prompt + work.tokens,
        "sampling_params": params,
        "stream": True,
    }


class Requests:
    """The HTTP connections to all servers. They are opened on first use. Call `close` at the end."""

    def __init__(self, token: str, settings: GenerationSettings, log: Callable[..., None]) -> None:
        self._token = token
        self._settings = settings
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A request has an id and a seed, so one that arrives twice gives the same tokens.
            self._session = client_session(
                middlewares=[resend],
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect),
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            )
        return self._session

    def abort(self, instance: Instance, ids: Sequence[str]) -> None:
        """Ask a server to abort requests. This does not wait for the answer, because the streams show the end."""

        async def send() -> None:
            error = await abort(self.session, instance.url, ids, self._settings.abort)
            self._log("requests.aborted", instance=instance.name, requests=len(ids), error=error)

        task = asyncio.create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Cancel running aborts, and close the connections. It may be called again."""
        await cancel(self._aborts)
        if self._session is not None:
            await self._session.close()
            self._session = None


async def cancel(tasks: Any) -> None:
    """Cancel all tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
