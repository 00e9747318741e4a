"""The routes at which agents ask for the model's turns, as in OpenAI's API. The key says which episode asks.

    POST /v1/chat/completions     an answer of the model, streamed or not
    POST /v1/responses            the same in the form of OpenAI's other API (`responses`)
    POST /inference/v1/generate   the same in token ids, as vLLM's
    GET  /v1/models               the model
    POST /v1/reward {"reward"}    what the episode earned; this one is not OpenAI's

An answer that is streamed comes in one piece. Until it comes, comments keep the connection."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text.conversations import conversation, tools_of
from dovetail.coordinator.sessions import responses
from dovetail.coordinator.sessions.agent import AgentEpisode, TurnRefused, Until
from dovetail.coordinator.sessions.answer_reader import DEPTH, deeper
from dovetail.coordinator.sessions.effects import finite
from dovetail.coordinator.sessions.episode import ModelExchange
from dovetail.manifest.training_types import Generation

MODEL = "actor"
KEEP_SECONDS = 10.0
_LARGEST_BYTES = 64 << 20
# A call is in a message, and this in the request.
_DEPTH = DEPTH + 8
# What would give another distribution than the one that is trained, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "functions": ([],),
}
_NEUTRAL: Mapping[str, Any] = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
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
            "tool_choice": "auto",
            **_NEUTRAL,
        }
        self._length, self._log, self._noted = length, log, set[str]()

    def app(self) -> web.Application:
        """A server of the routes."""
        app = web.Application(client_max_size=_LARGEST_BYTES, middlewares=[_refusing])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._responses),
                web.post("/inference/v1/generate", self._generate),
                web.get("/v1/models", self._models),
                web.post("/v1/reward", self._reward),
                web.route("*", "/{path:.*}", self._unknown),
            ]
        )
        return app

    async def _unknown(self, request: web.Request) -> web.Response:
        said = f"a job has no {request.method} {request.path}; ask at /v1/chat/completions or /v1/responses"
        raise web.HTTPNotFound(text=json.dumps(_error(said)), content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dovetail", "max_model_len": self._length}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await _body(request)
        if (found := finite(body.get("reward"))) is None:
            raise _refusal("reward must be a finite number")
        episode.reward = found
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await _body(request)
        ids, asked = body.get("token_ids"), responses.inner(body, "sampling_params")
        if not isinstance(ids, list) or not ids or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
            raise _refusal("token_ids must be a list of token ids, one at least")
        if body.get("stream"):
            raise _refusal("stream must be left out")
        # The tokens that end a turn are the job's. Log-probabilities are always given.
        found = await episode.ask_ids(ids, self._until({**asked, "stop": None, "logprobs": None}))
        return web.json_response(_generated(found))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode, body = self._episode(request), await _body(request)
        usage = bool(responses.inner(body, "stream_options").get("include_usage"))
        asking = self._ask(episode, body)
        if not body.get("stream"):
            return web.json_response(_completion(await asking))
        return await _streamed(request, asking, lambda found: _chunks(_completion(found), usage))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        episode, body = self._episode(request), await _body(request)
        asking = self._ask(episode, responses.chat_request(body))
        if not body.get("stream"):
            return web.json_response(responses.response(MODEL, await asking))
        return await _streamed(request, asking, lambda found: responses.events(responses.response(MODEL, found)))

    def _until(self, body: Mapping[str, Any]) -> Until:
        """Where a request lets the answer end. What else it asks of the sampling is refused or noted. Raises
        TurnRefused."""
        for name, neutral in _REFUSED.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise TurnRefused(
                    f"{name} is {json.dumps(body[name])[:200]}, which cannot be trained with; leave it out"
                )
        for name, used in self._settings.items():
            # Without tools nothing is called, which is no matter of sampling.
            same = body.get(name) in (None, used) or (name, body.get(name)) == ("tool_choice", "none")
            if not same and name not in self._noted:
                self._noted.add(name)
                self._log("agent.overruled", setting=name, asked=body[name], used=used)
        limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        if not all(type(limit) is int and limit > 0 for limit in limits):
            raise TurnRefused("max_completion_tokens and max_tokens must be whole numbers above 0")
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise TurnRefused("stop must be a text or a list of texts")
        return Until(min(limits, default=None), tuple(stops))

    async def _ask(self, episode: AgentEpisode, body: Mapping[str, Any]) -> ModelExchange:
        """Raises TurnRefused."""
        until = self._until(body)
        try:
            messages = conversation(body.get("messages"), "messages", "the request").messages
            tools = [] if body.get("tool_choice") == "none" else tools_of(body, "the request")
        except DataError as error:
            raise TurnRefused(str(error)) from error
        if not messages:
            raise TurnRefused("messages must not be empty")
        # Arguments of calls are texts in a request, and objects in a message.
        _check_depth([messages, tools])
        return await episode.ask(messages, tools, until)

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
    _check_depth(found)
    return found


def _check_depth(given: Any) -> None:
    """Raises TurnRefused for what the chat template and the store could not write."""
    if deeper(given, _DEPTH):
        raise TurnRefused(f"the request has more than {_DEPTH} objects and lists in each other")


def _error(sentence: str) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}}


def _refusal(sentence: str) -> web.HTTPBadRequest:
    """A client sends what is answered with 400 no second time."""
    return web.HTTPBadRequest(text=json.dumps(_error(sentence)), content_type="application/json")


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TurnRefused as error:
        raise _refusal(str(error)) from error


async def _streamed(
    request: web.Request,
    asking: Coroutine[Any, Any, ModelExchange],
    written: Callable[[ModelExchange], Iterable[bytes]],
) -> web.StreamResponse:
    """The answer as events. Until it is there, comments keep the connection. What is refused at once has the status of
    a refusal."""
    answer = asyncio.ensure_future(asking)
    done, _ = await asyncio.wait({answer}, timeout=KEEP_SECONDS)
    found = answer.result() if done else None
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    while found is None:
        await response.write(b": the model is asked\n\n")
        done, _ = await asyncio.wait({answer}, timeout=KEEP_SECONDS)
        if done and isinstance(refused := answer.exception(), TurnRefused):
            await response.write(_event(json.dumps(_error(str(refused)))))
            return response
        found = answer.result() if done else None
    for event in written(found):
        await response.write(event)
    return response


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


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


def _generated(exchange: ModelExchange) -> dict[str, Any]:
    answer = exchange.answer
    assert answer is not None
    asked, written = len(exchange.prompt), len(answer.tokens)
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": list(answer.tokens), "logprobs": {"content": entries}}
    return {
        "request_id": f"generate-{secrets.token_hex(12)}",
        "model": MODEL,
        "created": int(time.time()),
        "choices": [{**choice, "finish_reason": "stop" if answer.ended else "length"}],
        "usage": {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written},
    }


def _chunks(whole: dict[str, Any], usage: bool) -> Iterator[bytes]:
    (choice,) = whole["choices"]
    head = {**{name: whole[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        *([{**head, "choices": [], "usage": whole["usage"]}] if usage else []),
    ]
    for each in (*map(json.dumps, chunks), "[DONE]"):
        yield _event(each)
