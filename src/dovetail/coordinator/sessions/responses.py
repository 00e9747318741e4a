"""OpenAI's Responses API in terms of its chat API: the request as a chat request, and the answer as a response. Nothing
is kept from one request to the next, so each must have the whole conversation."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.coordinator.sessions.agent import TurnRefused
from dovetail.coordinator.sessions.episode import ModelExchange

# What names something that was kept, or runs elsewhere.
_KEPT = ("previous_response_id", "conversation", "prompt", "background")
_TEXTS = ("input_text", "output_text")


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that asks for the same. Raises TurnRefused."""
    if kept := next((name for name in _KEPT if body.get(name)), None):
        raise TurnRefused(f"{kept} is set, but nothing is kept between requests; send the whole conversation as input")
    return {
        **body,
        "messages": _messages(body),
        "tools": [_tool(i, each) for i, each in enumerate(_listed(body.get("tools"), "tools"))],
        "max_completion_tokens": body.get("max_output_tokens"),
        "response_format": inner(body, "text").get("format"),
    }


def inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in a request, which may be missing. Raises TurnRefused."""
    found = body.get(name)
    if not isinstance(found, dict | None):
        raise TurnRefused(f"{name} must be an object, or be left out")
    return found or {}


def response(model: str, exchange: ModelExchange) -> dict[str, Any]:
    """The answer of an exchange as a response."""
    answer = exchange.answer
    assert answer is not None
    asked, written = len(exchange.prompt), len(answer.tokens)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if answer.ended else "incomplete",
        "error": None,
        "incomplete_details": None if answer.ended else {"reason": "max_output_tokens"},
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": list(_output(answer.message)),
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + written,
        },
    }


def events(whole: Mapping[str, Any]) -> Iterator[bytes]:
    """The response as server-sent events, each part in one piece."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    told: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for at, item in enumerate(whole["output"]):
        told += _item_events(at, item)
    told.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(told):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()


def _item_events(at: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": at}
    parts = item.get("content", [])
    if parts:
        name, kind, text, place["content_index"] = "text", f"response.{parts[0]['type']}", parts[0]["text"], 0
    else:
        name, kind, text = "arguments", "response.function_call_arguments", item["arguments"]
    empty: dict[str, Any] = {"content": []} if parts else {"arguments": ""}
    yield {"type": "response.output_item.added", "output_index": at, "item": {**item, **empty, "status": "in_progress"}}
    for part in parts:
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **place, "delta": text, "logprobs": []}
    yield {"type": f"{kind}.done", **place, name: text, "logprobs": []}
    for part in parts:
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


def _output(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    done = {"status": "completed"}
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        yield {"type": "reasoning", "id": _id("rs"), "summary": [], "content": [part], **done}
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {"type": "message", "id": _id("msg"), "role": "assistant", "content": [part], **done}
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
        yield {"type": "function_call", "id": _id("fc"), "call_id": call["id"], **function, **done}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request. A thought and calls belong to the assistant's message beside them. Raises
    TurnRefused."""
    found: list[dict[str, Any]] = []
    if body.get("instructions"):
        found.append({"role": "system", "content": body["instructions"]})
    given, thought = body.get("input"), ""
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for i, item in enumerate(_listed(given, "input")):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "reasoning":
            parts = _listed(item.get("content"), f"input.{i}.content")
            thought = "".join(str(part.get("text", "")) for part in parts)
            continue
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant" or thought:
                found.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"))
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise TurnRefused(
                f"input.{i}.type is {json.dumps(kind)[:100]}; messages, reasoning and function calls can be read"
            )
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = thought
        thought = ""
    return found


def _content(given: Any) -> Any:
    """The content of a chat message: texts have another name there."""
    if not isinstance(given, list):
        return given
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in _TEXTS else part
        for part in given
    ]


def _tool(i: int, given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function":
        raise TurnRefused(f"tools.{i}.type is {json.dumps(given.get('type'))[:100]}; only functions can be called here")
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _listed(given: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(given or [], list) or not all(isinstance(each, dict) for each in given or []):
        raise TurnRefused(f"{where} must be a list of objects")
    return list(given or [])


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
