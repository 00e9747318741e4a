"""An environment behind HTTP, with state and effects of its own. It speaks this contract, in JSON:

    GET    /v1/tools                                                   {"tools": [...]}, function schemas as OpenAI's
    POST   /v1/reset {"episode", "record"}                             {"observation"}; a second time the same
    POST   /v1/step {"episode", "key", "name", "arguments"}            {"observation"}
    GET    /v1/steps/KEY                                               {"observation"}; 404: the call was never made
    GET    /v1/episodes/EPISODE/result                                 {"reward": number or null}
    DELETE /v1/episodes/EPISODE                                        anything

A step also has its key in the header `Idempotency-Key`. 410 says that the server does not know the episode any more.
Any other status than 200 is a failure of the environment. A wrong call of the model is answered with an observation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.coordinator.sessions.bridge import Tools
from dovetail.coordinator.sessions.effects import EpisodeLost, Failed, MayBeMade, NotMade, ToolCall, finite, storable
from dovetail.protocol.http.client_session import client_session

FIELD = "spec.sessions.environment.url"
# How often a request is sent that may be sent again, and seconds before the second time. They double each time.
TRIES = 6
BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 8.0
_LONGEST_BYTES = 16 << 20
_GONE = 410


class Unanswered(Exception):
    """A request got no answer, or the server says that it failed. The message is a verb phrase. `sent` says whether the
    server may have got it. `status` is the HTTP status, or 0."""

    def __init__(self, what: str, sent: bool, status: int = 0) -> None:
        super().__init__(what)
        self.sent, self.status = sent, status

    @property
    def passing(self) -> bool:
        """Whether another try may succeed: the connection failed, or the server did."""
        return self.status == 0 or self.status >= 500


class HttpEnvironment:
    """The environments of a job (`Environment`) at a `url`. A request must be answered within `seconds`. The names of
    episodes begin with `run`, because several runs may share a server."""

    def __init__(self, url: str, run: str, seconds: float) -> None:
        self.url, self._run, self.seconds = url.rstrip("/"), run, seconds
        self._session: aiohttp.ClientSession | None = None
        self._tools: Tools | None = None

    @property
    def tools(self) -> Tools:
        """The tools, as in OpenAI's API. They are known once it is open."""
        assert self._tools is not None
        return self._tools

    @property
    def known(self) -> bool:
        """Whether the server has answered."""
        return self._tools is not None

    async def open(self) -> None:
        """Ask for the tools. It may be called again. Raises ValueError with one sentence."""
        if self.known:
            return
        try:
            found = (await self.safely("GET", "/v1/tools"))["tools"]
            names = [tool["function"]["name"] for tool in found]
        except (Failed, EpisodeLost) as error:
            raise ValueError(f"{FIELD}: {error}") from error
        except (KeyError, TypeError) as error:
            what = "does not answer with a list of function schemas"
            raise ValueError(f"{FIELD}: {self.url}/v1/tools {what}") from error
        if not names:
            raise ValueError(f"{FIELD}: {self.url}/v1/tools has no tool")
        self._tools = found

    async def begin(self, episode: str, asked: Sequence[Message], fields: Mapping[str, Any]) -> HttpEpisode:
        """Begin an episode, or find it again after a death. Raises Failed."""
        name = f"{self._run}-{episode}"
        answer = await self.safely("POST", "/v1/reset", {"episode": name, "record": dict(fields)})
        return HttpEpisode(self, name, self._run, observation(answer, "/v1/reset"))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def safely(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request that may be sent again. Raises Failed and EpisodeLost."""
        tries = Tries(self.seconds, self.known)
        while True:
            try:
                return await self.once(method, path, body)
            except Unanswered as error:
                if error.status == _GONE:
                    raise EpisodeLost(f"{method} {self.url}{path} {error}") from error
                if not await tries.another(error):
                    often = f", {tries.made} times" if tries.made > 1 else ""
                    raise Failed(f"{method} {self.url}{path} {error}{often}") from error

    async def once(self, method: str, path: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
        """The answer to one request. Raises Unanswered."""
        if self._session is None:
            self._session = client_session(timeout=aiohttp.ClientTimeout(total=self.seconds))
        headers = {"Idempotency-Key": key} if key is not None else {}
        try:
            async with self._session.request(method, self.url + path, json=body, headers=headers) as answer:
                body_read = bytearray()
                async for part in answer.content.iter_chunked(1 << 16):
                    body_read += part
                    if len(body_read) > _LONGEST_BYTES:
                        raise Unanswered(f"answered with more than {_LONGEST_BYTES:,} bytes", True, answer.status)
                text = body_read.decode(errors="replace")
                if answer.status != 200:
                    said = " ".join(text.split())[:200]
                    raise Unanswered(f"answered {answer.status}" + (f": {said}" if said else ""), True, answer.status)
                return json.loads(text)
        except TimeoutError as error:
            what = f"gave no answer within {self.seconds:g} s (spec.sessions.environment.timeoutSeconds)"
            raise Unanswered(what, True) from error
        except aiohttp.ClientConnectorError as error:
            raise Unanswered(f"cannot connect: {error.os_error}", False) from error
        except aiohttp.ClientError as error:
            raise Unanswered(f"lost its connection ({type(error).__name__})", True) from error
        except (ValueError, RecursionError) as error:
            raise Unanswered("answered with what is no JSON", True, 200) from error


class Tries:
    """The tries of a request, of which `made` have failed. Who was `known` before and now accepts no connection has
    `seconds` to come back. What fails otherwise is tried TRIES times."""

    def __init__(self, seconds: float, known: bool) -> None:
        self.made = 0
        self._seconds, self._known, self._failed = seconds, known, 0
        self._clock = asyncio.get_running_loop().time
        self._away_since: float | None = None

    async def another(self, error: Unanswered) -> bool:
        """Whether the request may be tried again. It waits before."""
        self.made += 1
        if not error.passing:
            return False
        if error.sent or not self._known:
            self._failed, self._away_since = self._failed + 1, None
            if self._failed == TRIES:
                return False
        elif self._away_since is None:
            self._away_since = self._clock()
        elif self._clock() - self._away_since > self._seconds:
            return False
        await asyncio.sleep(min(_LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (self.made - 1)))
        return True


class HttpEpisode:
    """One episode (`BegunEnvironment`). Its state is the server's, so a coordinator that comes back finds it."""

    def __init__(self, environment: HttpEnvironment, name: str, run: str, observed: str) -> None:
        self.observation = observed
        self._environment, self._name, self._run = environment, name, run

    async def make(self, call: ToolCall) -> str:
        """Make the call. If its answer is lost, the server is asked for it. The call is sent again only if the server
        never got it. Raises Failed and EpisodeLost."""
        key = f"{self._run}-{call.key}"
        step = {"episode": self._name, "key": key, "name": call.name, "arguments": dict(call.arguments)}
        tries = Tries(self._environment.seconds, self._environment.known)
        while True:
            try:
                return observation(await self._environment.once("POST", "/v1/step", step, key), "/v1/step")
            except Unanswered as error:
                if error.status == _GONE:
                    raise self._lost() from error
                if not await tries.another(error):
                    raise self._failed(call, error) from error
                if error.sent:
                    try:
                        return await self.recall(call)
                    except NotMade:
                        pass
                    except MayBeMade:
                        raise self._failed(call, error) from error

    async def recall(self, call: ToolCall) -> str:
        """What the tool answered. Raises NotMade, EpisodeLost, and MayBeMade if the server cannot be asked."""
        path = f"/v1/steps/{quote(f'{self._run}-{call.key}', safe='')}"
        tries = Tries(self._environment.seconds, self._environment.known)
        while True:
            try:
                return observation(await self._environment.once("GET", path), path)
            except Unanswered as error:
                if error.status == 404:
                    raise NotMade from error
                if error.status == _GONE:
                    raise self._lost() from error
                if not await tries.another(error):
                    raise MayBeMade from error

    async def restore(self, call: ToolCall, observed: str) -> None:
        """Ask the server whether it still has the state that the call made. Raises Failed and EpisodeLost."""
        try:
            found = await self.recall(call)
        except NotMade as error:
            raise self._lost() from error
        except MayBeMade as error:
            raise Failed(f"the environment cannot be asked for {call.key} after a death") from error
        if found != observed:
            raise EpisodeLost(f"the environment answers {call.key} otherwise than before the coordinator died")

    async def reward(self) -> float | None:
        """What the episode earned. None if the environment does not say. Raises Failed and EpisodeLost."""
        path = f"/v1/episodes/{quote(self._name, safe='')}/result"
        answer = await self._environment.safely("GET", path)
        if isinstance(answer, dict) and answer.get("reward") is None:
            return None
        found = finite(answer["reward"]) if isinstance(answer, dict) else None
        if found is None:
            raise Failed(f"GET {path} answers with no finite reward")
        return found

    async def end(self) -> None:
        """Tell the server that it may forget the episode. If it can't be told, it must do so by itself."""
        try:
            await self._environment.once("DELETE", f"/v1/episodes/{quote(self._name, safe='')}")
        except Unanswered:
            return

    def _lost(self) -> EpisodeLost:
        return EpisodeLost(f"the environment does not know episode {self._name} any more")

    def _failed(self, call: ToolCall, error: Unanswered) -> Failed:
        return Failed(f"the environment {error}, when tool {call.name} was called ({call.key})")


def observation(answer: Any, path: str) -> str:
    """The observation in an answer. Raises Failed."""
    found = answer.get("observation") if isinstance(answer, dict) else None
    if not isinstance(found, str):
        raise Failed(f"{path} answered without an observation, which is a text")
    return storable(path, found)
