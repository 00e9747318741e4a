"""An environment behind HTTP, in which a number from 1 to 99 is to be guessed: python guess_server.py PORT LOG

It serves the contract of `spec.sessions.environment.url` (docs/environments.md). LOG has a line for each effect, which
is written before the answer. So the server knows after a death of its own what it has done, and makes no call twice."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from aiohttp import web

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "The guess."}},
                "required": ["number"],
            },
        },
    }
]


class Games:
    """The games that are played, and the answers to all calls."""

    def __init__(self, log: Path) -> None:
        self.secrets: dict[str, int] = {}
        self.guesses: dict[str, list[int]] = {}
        self.answers: dict[str, str] = {}
        self.log = log.open("a+")
        self.log.seek(0)
        for line in self.log:
            # A death may have left the beginning of a line, for which nothing was answered.
            with suppress(ValueError):
                self.happen(json.loads(line))
        self.log.write("\n")

    def happen(self, event: dict) -> str:
        """Change the state. The log has what happened, so it is the same after a death."""
        game = event["episode"]
        if "secret" in event:
            self.secrets[game], self.guesses[game] = event["secret"], []
            return ""
        number, secret = event["number"], self.secrets[game]
        self.guesses[game].append(number)
        told = "right" if number == secret else "higher" if number < secret else "lower"
        return self.answers.setdefault(event["key"], told)

    def do(self, event: dict) -> str:
        self.log.write(json.dumps(event) + "\n")
        self.log.flush()
        os.fsync(self.log.fileno())
        return self.happen(event)


def app(games: Games) -> web.Application:
    async def tools(request: web.Request) -> web.Response:
        return web.json_response({"tools": TOOLS})

    async def reset(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["episode"] not in games.secrets:
            games.do({"episode": asked["episode"], "secret": asked["record"]["secret"]})
        return web.json_response({"observation": "The number is between 1 and 99."})

    async def step(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["key"] in games.answers:
            return web.json_response({"observation": games.answers[asked["key"]]})
        if asked["episode"] not in games.secrets:
            raise web.HTTPGone
        number = asked["arguments"].get("number")
        if asked["name"] != "guess" or not isinstance(number, int):
            return web.json_response({"observation": "error: call guess with an integer, the number"})
        told = games.do({"episode": asked["episode"], "key": asked["key"], "number": number})
        return web.json_response({"observation": told})

    async def made(request: web.Request) -> web.Response:
        if request.match_info["key"] not in games.answers:
            raise web.HTTPNotFound
        return web.json_response({"observation": games.answers[request.match_info["key"]]})

    async def result(request: web.Request) -> web.Response:
        game = request.match_info["episode"]
        won = games.secrets[game] in games.guesses[game]
        return web.json_response({"reward": 1 / len(games.guesses[game]) if won else 0.0})

    async def end(request: web.Request) -> web.Response:
        return web.json_response({})

    made_app = web.Application()
    made_app.add_routes(
        [
            web.get("/v1/tools", tools),
            web.post("/v1/reset", reset),
            web.post("/v1/step", step),
            web.get("/v1/steps/{key}", made),
            web.get("/v1/episodes/{episode}/result", result),
            web.delete("/v1/episodes/{episode}", end),
        ]
    )
    return made_app


if __name__ == "__main__":
    web.run_app(app(Games(Path(sys.argv[2]))), host="127.0.0.1", port=int(sys.argv[1]), print=None)
