"""The boxes of examples/agent behind HTTP (docs/environments.md, "A server"): python box_server.py PORT LOG

LOG has a line for each effect, which is written before the answer. So the server knows after a death of its own what it
has done."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

OPEN = {
    "type": "function",
    "function": {
        "name": "open",
        "description": "Open a box.",
        "parameters": {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]},
    },
}


def app(log: Path) -> web.Application:
    things: dict[str, dict[str, str]] = {}
    answers: dict[str, str] = {}

    def happen(event: dict[str, Any]) -> None:
        if "things" in event:
            things[event["episode"]] = event["things"]
        else:
            answers[event["key"]] = event["told"]

    def do(event: dict[str, Any]) -> None:
        with log.open("a") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
        happen(event)

    with log.open("a+") as file:
        file.seek(0)
        for line in file:
            # A death may have left the beginning of a line, for which nothing was answered.
            with suppress(ValueError):
                happen(json.loads(line))
        file.write("\n")

    async def tools(request: web.Request) -> web.Response:
        return web.json_response({"tools": [OPEN]})

    async def reset(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["episode"] not in things:
            do({"episode": asked["episode"], "things": asked["record"]["things"]})
        return web.json_response({"observation": ""})

    async def step(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["key"] not in answers:
            held, box = things[asked["episode"]], asked["arguments"].get("box")
            do({"key": asked["key"], "told": f"a {held[box]}" if box in held else "error: there is no such box"})
        return web.json_response({"observation": answers[asked["key"]]})

    async def made(request: web.Request) -> web.Response:
        if request.match_info["key"] not in answers:
            raise web.HTTPNotFound
        return web.json_response({"observation": answers[request.match_info["key"]]})

    async def result(request: web.Request) -> web.Response:
        return web.json_response({"reward": None})

    async def end(request: web.Request) -> web.Response:
        return web.json_response({})

    found = web.Application()
    found.add_routes(
        [
            web.get("/v1/tools", tools),
            web.post("/v1/reset", reset),
            web.post("/v1/step", step),
            web.get("/v1/steps/{key}", made),
            web.get("/v1/episodes/{episode}/result", result),
            web.delete("/v1/episodes/{episode}", end),
        ]
    )
    return found


if __name__ == "__main__":
    web.run_app(app(Path(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
