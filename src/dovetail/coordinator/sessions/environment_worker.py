"""A process in which environments live: `python -P -m dovetail.coordinator.sessions.environment_worker PARENT`.

The first request (`user_requests`) is {"folder", "name", "field", "limited", "user"}. It is answered with {"ready":
{"file", "digest"}} or {"refused": sentence}. All others have "seconds", their time limit:

    {"tools": true}                          {"tools"} or {"refused": sentence}
    {"begin": episode, "record"}             {"told"}
    {"call": episode, "name", "arguments"}   {"told"}
    {"reward": episode}                      {"reward": [number or null]}
    {"end": episode}                         {"ended": episode}

Each may be answered with {"failed": sentence}, too."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.sessions.python_environment import EnvironmentClass, PythonEpisode
from dovetail.coordinator.user_code.sandbox import limit_cpu_seconds, limit_this_process
from dovetail.coordinator.user_code.user_requests import Answer, Reply, answer_requests, digest, load_user_code


def _load(order: Mapping[str, Any]) -> tuple[Answer, Reply]:
    """Import the class."""
    if order["limited"]:
        limit_this_process(order["user"])
    environment: EnvironmentClass | None = None
    episodes: dict[int, PythonEpisode] = {}

    def answer(request: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Reply:
        assert environment is not None
        if order["limited"]:
            limit_cpu_seconds(request["seconds"])
        try:
            return loop.run_until_complete(_answer(environment, episodes, request))
        except Failed as error:
            return {"failed": str(error)}

    try:
        environment = load_user_code(
            order["name"], order["field"], order["folder"], lambda found: EnvironmentClass(found, order["name"])
        )
    except ValueError as error:
        return answer, {"refused": str(error)}
    file = getattr(sys.modules[environment.made.__module__], "__file__", None) or ""
    return answer, {"ready": {"file": file, "digest": digest(file)}}


async def _answer(
    environment: EnvironmentClass, episodes: dict[int, PythonEpisode], request: Mapping[str, Any]
) -> Reply:
    if "tools" in request:
        try:
            return {"tools": environment.tools}
        except ValueError as error:
            return {"refused": str(error)}
    if "begin" in request:
        begun = episodes[request["begin"]] = await environment.begin(request["record"])
        return {"told": begun.observation}
    if "call" in request:
        return {"told": await episodes[request["call"]].make(request["name"], request["arguments"])}
    if "reward" in request:
        return {"reward": [await episodes[request["reward"]].reward()]}
    episodes.pop(request["end"], None)
    return {"ended": request["end"]}


if __name__ == "__main__":
    sys.exit(answer_requests(_load))
