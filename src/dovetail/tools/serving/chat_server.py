"""A model that replies through an OpenAI-compatible server, such as vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.protocol.errors import RunError, error_text
from dovetail.protocol.http.outside_client import outside_client
from dovetail.tools.serving.chat import DialogueTooLong, Sampling

CONNECT_SECONDS = 10.0
# The longest time between two pieces of a reply. A busy server lets requests wait.
PIECE_SECONDS = 300.0
# How servers say that a dialogue is longer than the model takes.
_TOO_LONG = ("context length", "maximum context", "max_model_len", "too long", "longer than")


class ServedModel:
    """A model on a server. `url`: the server's address, with or without /v1. `model`: its name there. None: the first
    model that the server lists. `key`: sent as a bearer token. `stop`: strings that end a reply. Raises RunError if the
    server does not answer, or has no such model."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, stop: Sequence[str] = ()) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = outside_client(self.url, key, httpx2.Timeout(PIECE_SECONDS, connect=CONNECT_SECONDS))
        self._stop = list(stop)
        try:
            names = self._names()
            if model is not None and model not in names:
                raise RunError(f"the server at {self.url} has no model {model!r}; it has: {', '.join(names)}")
            if not names:
                raise RunError(f"the server at {self.url} has no model")
        except BaseException:
            self.close()
            raise
        self.model = model or names[0]

    def close(self) -> None:
        self._http.close()

    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        """See `Replier`. It also raises DialogueTooLong."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
        }
        if self._stop:
            body["stop"] = self._stop
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._refuse(response)
                yield from _pieces(response.iter_lines())
        except httpx2.HTTPError as error:
            raise RunError(f"the server at {self.url} did not finish its reply: {error_text(error)}") from error

    def _names(self) -> list[str]:
        try:
            response = self._http.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RunError(f"no server answers at {self.url}: {error_text(error)}") from error
        if response.status_code != 200:
            self._refuse(response)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"what answers at {self.url} is not an OpenAI-compatible server") from error

    def _refuse(self, response: httpx2.Response) -> None:
        if response.status_code == 401:
            raise RunError(f"the server at {self.url} wants another key; set OPENAI_API_KEY to the server's")
        said = _message(response)
        if response.status_code == 400 and any(words in said for words in _TOO_LONG):
            raise DialogueTooLong(f"the dialogue is too long for the model: {said}")
        raise RunError(f"the server at {self.url} answered {response.status_code}: {said}")


def _message(response: httpx2.Response) -> str:
    """The server's own error message."""
    try:
        document = response.json()
        error = document.get("error", document)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError):
        return response.text.strip()[:400] or "nothing"


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text of a stream of server-sent events. Raises RunError for an error in the stream."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise RunError(f"the server ended its reply: {event['error'].get('message', event['error'])}")
            pieces = [choice["delta"].get("content") or "" for choice in event.get("choices", [])]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RunError(f"the server sent something that is not a reply: {data[:200]}") from error
        yield from (piece for piece in pieces if piece)
