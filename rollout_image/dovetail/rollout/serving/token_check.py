"""Middleware of the vLLM server. It checks the job's token on every route, and allows generation only with a complete
set of weights."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dovetail.protocol.messages import PROBE_HEADER
from dovetail.protocol.process.env import TOKEN
from dovetail.rollout.serving.routes import STATE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/metrics", "/ping"})
# These routes run the model. They are refused while its weights are incomplete.
GENERATING = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses")


class RequireToken:
    """ASGI middleware that answers 401 without `Authorization: Bearer <token of the job>`, except on probes and
    metrics."""

    def __init__(self, app: App, token: str | None = None):
        self._app = app
        given = os.environ.get(TOKEN, "") if token is None else token
        if not given:
            raise ValueError(f"environment variable {TOKEN} is empty: the server would be open to anyone")
        self._expected = f"Bearer {given}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for key, value in scope.get("headers", ()) if key == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send, 401, "this route asks for the job's token", [(b"www-authenticate", b"Bearer")])


class RequireWeights:
    """ASGI middleware that answers 503 for generation while no complete version of the weights is loaded, or while it
    has not passed its probe (the probe itself is let through). It also answers 503 while the engine is paused or
    asleep. `SampleConnection` checks the weights of each sample itself."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == "/pause":
            STATE.pause()
        if path == "/resume":
            await self._app(scope, receive, _resuming(send))
            return
        if path in ("/sleep", "/wake_up"):
            await self._to_sleep_or_awake(path == "/sleep", scope, receive, send)
            return
        generates = path.startswith(GENERATING)
        if generates and STATE.asleep:
            await _refuse(send, 503, "this server is asleep", [])
            return
        if generates and STATE.weight_version is None and not _is_probe(scope):
            await _refuse(send, 503, "this server holds no complete version of the weights that passed its probe", [])
            return
        await self._app(scope, receive, send)

    async def _to_sleep_or_awake(self, sleeps: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Record that the engine sleeps before it is told to, and that it is awake after it has said so."""
        before, done = STATE.asleep, False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal done
            if message["type"] == "http.response.start":
                done = message["status"] == 200
                STATE.asleep = sleeps if done else before
            await send(message)

        STATE.asleep = before or sleeps
        try:
            await self._app(scope, receive, sending)
        finally:
            if not done:
                STATE.asleep = before


def _resuming(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            STATE.resume()
        await send(message)

    return sending


def _is_probe(scope: Scope) -> bool:
    """Whether the request is a probe of the version that has arrived."""
    return STATE.arrived is not None and _header(scope, PROBE_HEADER) == str(STATE.arrived)


def _header(scope: Scope, name: str) -> str | None:
    key = name.lower().encode()
    return next((value.decode() for given, value in scope.get("headers", ()) if given == key), None)


class Guard:
    """ASGI middleware for `--middleware`. It checks the token first, and then the weights."""

    def __init__(self, app: App):
        self._app = RequireToken(RequireWeights(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _refuse(send: Send, status: int, message: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})
