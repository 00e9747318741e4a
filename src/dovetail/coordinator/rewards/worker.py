"""A process that calls reward functions: `python -P -m dovetail.coordinator.rewards.worker PARENT`.

The first request (`user_requests`) is {"folder", "functions": [{"name", "field"}]}. The others are {"function":
number, "prompts", "responses", "fields"}. The first answer is {"ready": [...]} (`values.describe`) or {"refused":
sentence}. The others are {"rewards", "steps"}, {"wrong": what} or {"raised": ...} (`raised`)."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dovetail.coordinator.rewards.values import WrongRewards, checked, describe
from dovetail.coordinator.user_code.user_requests import (
    OWN,
    Answer,
    Reply,
    answer_requests,
    load_user_code,
    raised,
)


def _load(order: Mapping[str, Any]) -> tuple[Answer, Reply]:
    """Import the functions."""
    functions, ready = [], []

    def use(function: Callable[..., Any]) -> None:
        ready.append(describe(function))
        functions.append(function)

    def call(request: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Reply:
        return _call(functions[request["function"]], request, loop)

    try:
        for wanted in order["functions"]:
            load_user_code(wanted["name"], wanted["field"], order["folder"], use)
    except ValueError as error:
        return call, {"refused": str(error)}
    return call, {"ready": ready}


def _call(function: Callable[..., Any], request: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Reply:
    try:
        # A function may change its arguments, and the check needs the responses.
        result = function(request["prompts"], list(request["responses"]), **request["fields"])
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_awaited(result))
        found = checked(result, request["responses"])
        return {"rewards": found.rewards, "steps": found.steps}
    except WrongRewards as error:
        return {"wrong": str(error)}
    # SystemExit is caught too. A function that calls sys.exit() must not look like a worker that has ended normally.
    except BaseException as error:
        return {"raised": raised(error, {__file__, *OWN})}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


if __name__ == "__main__":
    sys.exit(answer_requests(_load))
