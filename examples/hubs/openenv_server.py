"""An environment of OpenEnv 0.10 as a server of environments: python openenv_server.py PORT OPENENV_URL

It runs in a Python of its own (pip install openenv), and serves the contract of `spec.sessions.environment.url`
(docs/environments.md, "A server"). OPENENV_URL has a server of OpenEnv's, which gives each episode a session. A
prompt's record goes to its `reset`. The tools are those of an MCP environment, or one, `act`, with the fields of an
action. What an episode earned is the sum of its steps' rewards."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

# The time that OpenEnv's server has to come back.
AWAY_SECONDS = 100.0
# What the model did wrong. Other errors are failures of the environment.
WRONG_CALLS = ("invalid_args", "tool_not_found")


class EnvironmentFailed(Exception):
    """OpenEnv's server says that it failed."""


class CallRefused(Exception):
    """OpenEnv's server says that the action is wrong."""


@dataclass
class Episode:
    """A session of OpenEnv's, which is a connection, and its calls by their keys. A call goes on if nobody waits for
    its answer any more."""

    session: ClientConnection
    observation: str = ""
    earned: float = 0.0
    done: bool = False
    calls: dict[str, asyncio.Task[str]] = field(default_factory=dict)


def text(observation: Any) -> str:
    """What the model is told."""
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name not in ("metadata", "tool_name")}
        if not observation:
            return ""
        if "result" in observation:  # of a tool
            found = observation["result"]
            observation = found.get("data", found) if isinstance(found, dict) else found
    return observation if isinstance(observation, str) else json.dumps(observation)


class Adapter:
    def __init__(self, url: str) -> None:
        self.url = url
        self.episodes: dict[str, Episode] = {}
        self.beginning = asyncio.Lock()
        self.schema: dict[str, Any] = {}

    async def session(self) -> ClientConnection:
        """A new session. OpenEnv's server may be starting again: then the job waits for it, as long as it waits for an
        answer."""
        away = time.monotonic()
        while True:
            try:
                return await connect(f"{self.url.replace('http', 'ws', 1)}/ws", max_size=64 << 20, proxy=None)
            except ConnectionRefusedError:
                if time.monotonic() - away > AWAY_SECONDS:
                    raise
                await asyncio.sleep(0.5)

    async def ask(self, session: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation, the reward and whether the episode is over. A connection is never made again: it would be
        another session."""
        await session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await session.recv())
        if answer["type"] == "error":
            refused = answer["data"].get("code") == "VALIDATION_ERROR"
            raise (CallRefused if refused else EnvironmentFailed)(answer["data"].get("message"))
        return answer["data"]

    async def over_mcp(self) -> bool:
        """Whether the environment has tools over MCP. `schema` is that of an action then."""
        if not self.schema:
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"{self.url}/schema")
            self.schema = answer.raise_for_status().json()["action"]
        return "tool_name" in self.schema.get("properties", {})

    async def tools(self) -> list[dict[str, Any]]:
        if not await self.over_mcp():
            fields = {name: kind for name, kind in self.schema.get("properties", {}).items() if name != "metadata"}
            parameters = {**self.schema, "properties": fields}
            description = parameters.pop("description", "Act in the environment.")
            return [
                {"type": "function", "function": {"name": "act", "description": description, "parameters": parameters}}
            ]
        async with await self.session() as session:
            found = await self.ask(session, "step", {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in found["observation"]["tools"]
        ]

    async def reset(self, name: str, record: dict[str, Any]) -> str:
        async with self.beginning:
            if name not in self.episodes:
                episode = Episode(await self.session())
                found = await self.ask(episode.session, "reset", {**record, "episode_id": name})
                episode.observation, episode.earned = text(found["observation"]), found["reward"] or 0.0
                self.episodes[name] = episode
        return self.episodes[name].observation

    async def step(self, episode: Episode, name: str, arguments: dict[str, Any]) -> str:
        if episode.done:
            return "error: the episode is over"
        tool = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            found = await self.ask(episode.session, "step", tool if await self.over_mcp() else arguments)
        except CallRefused as error:
            return f"error: {error}"
        if problem := found["observation"].get("error"):
            if problem["error_type"] not in WRONG_CALLS:
                raise EnvironmentFailed(problem["message"])
            return f"error: {problem['message']}"
        episode.earned, episode.done = episode.earned + (found["reward"] or 0.0), found["done"]
        return text(found["observation"])


def app(adapter: Adapter) -> FastAPI:
    made = FastAPI()

    def known(name: str) -> Episode:
        if name not in adapter.episodes:
            raise HTTPException(410)
        return adapter.episodes[name]

    async def answered(call: asyncio.Task[str]) -> dict[str, str]:
        try:
            return {"observation": await asyncio.shield(call)}
        except ConnectionClosed as error:
            # The session is lost, with all that was done in it. The job begins another one.
            raise HTTPException(410, f"OpenEnv's session ended: {error}") from error
        except EnvironmentFailed as error:
            # With 5xx the job would ask again.
            raise HTTPException(422, str(error)) from error

    @made.get("/v1/tools")
    async def tools() -> dict[str, Any]:
        return {"tools": await adapter.tools()}

    @made.post("/v1/reset")
    async def reset(request: Request) -> dict[str, str]:
        asked = await request.json()
        return {"observation": await adapter.reset(asked["episode"], asked["record"])}

    @made.post("/v1/step")
    async def step(request: Request) -> dict[str, str]:
        asked = await request.json()
        episode = known(asked["episode"])
        if asked["key"] not in episode.calls:
            making = adapter.step(episode, asked["name"], asked["arguments"])
            episode.calls[asked["key"]] = asyncio.create_task(making)
        return await answered(episode.calls[asked["key"]])

    @made.get("/v1/steps/{key}")
    async def made_before(key: str) -> dict[str, str]:
        # A key is the name of its episode, a turn and a call.
        episode = known(key.rsplit("-", 2)[0])
        if key not in episode.calls:
            raise HTTPException(404)
        return await answered(episode.calls[key])

    @made.get("/v1/episodes/{name}/result")
    async def result(name: str) -> dict[str, float]:
        return {"reward": known(name).earned}

    @made.delete("/v1/episodes/{name}")
    async def end(name: str) -> dict[str, str]:
        if (episode := adapter.episodes.pop(name, None)) is not None:
            await episode.session.close()
        return {}

    return made


if __name__ == "__main__":
    uvicorn.run(app(Adapter(sys.argv[2].rstrip("/"))), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
