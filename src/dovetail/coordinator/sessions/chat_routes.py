"""The routes at which agents ask for the model's turns, as in OpenAI's API. The key says which episode asks.

    POST /v1/chat/completions     an answer of the model, streamed or not
    GET  /v1/models               the model
    POST /v1/reward {"reward"}    what the episode earned; this one is not OpenAI's

An answer that is streamed comes in one piece. Until it comes, comments keep the connection."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text.conversations import conversation, tools_of
from dovetail.coordinator.sessions.agent import AgentEpisode, TurnRefused
from dovetail.coordinator.sessions.episode import ModelExchange
from dovetail.manifest.training_types import Generation

MODEL = "actor"
KEEP_SECONDS = 10.0
_LARGEST_BYTES = 64 << 20
# What would give another distribution than the one that is trained, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "stop": ([], ""),
    "functions": ([],),
}
_NEUTRAL = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "parallel_tool_calls": True,
    "logprobs": False,
}


class ChatRoutes:
    """Answers the requests of the `episodes`, by their keys. How the model is `sampled` is the job's matter. `log` is
    told which settings of an agent are not used, once for each. `length` is the longest sequence, in tokens."""

    def __init__(self, sampled: Generation, length: int, log: Callable[..., None]) -> None:
        self.episodes: dict[str, AgentEpisode] = {}
        self._settings = {
            "temperature": sampled.temperature,
            "top_p": sampled.top_p,
            "top_k": sampled.top_k,
            "seed": None,
            **_NEUTRAL,
        }
        self._length, self._log, self._noted = length, log, set[str]()

    def app(self) -> web.Application:
        """A server of the routes."""
        app = web.Application(client_max_size=_LARGEST_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.post("/v1/reward", self._reward),
            ]
        )
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dovetail", "max_model_len": self._length}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await _body(request)
        found = body.get("reward")
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise _refusal("reward must be a finite number")
        episode.reward = float(found)
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode, body = self._episode(request), await _body(request)
        try:
            asking = asyncio.ensure_future(self._ask(episode, body))
            done, _ = await asyncio.wait({asking}, timeout=KEEP_SECONDS if body.get("stream") else None)
            if not body.get("stream"):
                return web.json_response(_completion(asking.result()))
            # What is refused at once has the status of a refusal.
            found = asking.result() if done else None
        except TurnRefused as error:
            raise _refusal(str(error)) from error
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while found is None:
            await response.write(b": the model is asked\n\n")
            done, _ = await asyncio.wait({asking}, timeout=KEEP_SECONDS)
            if done and asking.exception() is not None:
                await response.write(_event(_error(str(asking.exception()))))
                return response
            found = asking.result() if done else None
        usage = (body.get("stream_options") or {}).get("include_usage")
        for chunk in _chunks(_completion(found), bool(usage)):
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _ask(self, episode: AgentEpisode, body: Mapping[str, Any]) -> ModelExchange:
        """Raises TurnRefused."""
        for name, neutral in _REFUSED.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise TurnRefused(
                    f"{name} is {json.dumps(body[name])[:200]}, which cannot be trained with; leave it out"
                )
        for name, used in self._settings.items():
            if body.get(name) is not None and body[name] != used and name not in self._noted:
                self._noted.add(name)
                self._log("agent.overruled", setting=name, asked=body[name], used=used)
        limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        if not all(isinstance(limit, int) and limit > 0 for limit in limits):
            raise TurnRefused("max_completion_tokens and max_tokens must be whole numbers above 0")
        try:
            messages = conversation(body.get("messages"), "messages", "the request").messages
            tools = [] if body.get("tool_choice") == "none" else tools_of(body, "the request")
        except DataError as error:
            raise TurnRefused(str(error)) from error
        if not messages:
            raise TurnRefused("messages must not be empty")
        return await episode.ask(messages, tools, min(limits, default=None))

    def _episode(self, request: web.Request) -> AgentEpisode:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (found := self.episodes.get(key)) is None:
            said = _error("the key is that of no episode that is played; use OPENAI_API_KEY")
            raise web.HTTPUnauthorized(text=json.dumps(said), content_type="application/json")
        return found


async def _body(request: web.Request) -> dict[str, Any]:
    """The object in a request. Raises HTTPBadRequest."""
    try:
        found = json.loads(await request.text())
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _refusal("the request is no JSON, or has half of a character (a lone surrogate)") from error
    if not isinstance(found, dict):
        raise _refusal("the request must be an object")
    return found


def _error(sentence: str) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}}


def _refusal(sentence: str) -> web.HTTPBadRequest:
    """A client sends what is answered with 400 no second time."""
    return web.HTTPBadRequest(text=json.dumps(_error(sentence)), content_type="application/json")


def _event(chunk: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _completion(exchange: ModelExchange) -> dict[str, Any]:
    answer = exchange.answer
    assert answer is not None
    message: dict[str, Any] = {**answer.message, "role": "assistant"}
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    reason = "length" if not answer.ended else "tool_calls" if calls else "stop"
    asked, written = len(exchange.prompt), len(answer.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written},
    }


def _chunks(whole: dict[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    (choice,) = whole["choices"]
    head = {**{name: whole[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if usage:
        yield {**head, "choices": [], "usage": whole["usage"]}
