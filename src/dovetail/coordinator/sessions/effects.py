"""Makes a call of a tool so that its effect happens once, whenever the coordinator dies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.coordinator.store.tool_calls import CallKey, ToolCalls


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the model asked for it."""

    key: CallKey
    name: str
    arguments: Mapping[str, Any]


class NotMade(Exception):
    """The environment knows that a call was never made."""


class MayBeMade(Exception):
    """The environment cannot say whether a call was made."""


class Failed(Exception):
    """The environment failed, and not the model. The message is one sentence."""


# Characters. An answer becomes a part of the prompt.
LONGEST_ANSWER = 1_000_000


def storable(what: str, text: str) -> str:
    """The text that `what` answered. Raises Failed if it cannot be stored."""
    if len(text) > LONGEST_ANSWER:
        raise Failed(f"{what} answered with {len(text):,} characters; return {LONGEST_ANSWER:,} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Failed(
            f"{what} answered with half of a character (a lone surrogate); decode bytes with errors='replace'"
        ) from error
    return text


def finite(given: Any) -> float | None:
    """The finite number that JSON gives, such as a reward. None if it is something else."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class ToolEnvironment(Protocol):
    """What makes calls. Its methods raise Failed."""

    async def make(self, call: ToolCall) -> str:
        """Make the call, and return what the tool answers."""

    async def recall(self, call: ToolCall) -> str:
        """What the tool answered to a call of an earlier coordinator. Raises NotMade or MayBeMade."""

    async def restore(self, call: ToolCall, observation: str) -> None:
        """A call of an earlier coordinator is used again, with this answer. An environment whose state ends with its
        process makes the call anew."""


class EpisodeLost(Exception):
    """A call may have been made or not, and it must not be made twice. Discard the episode, and draw it again in a new
    environment."""


async def observe(calls: ToolCalls, call: ToolCall, environment: ToolEnvironment, repeatable: bool) -> str:
    """What the tool answers. The call is stored before it is made, and the answer before it is returned.

    A call that is stored with its answer is not made again. If its answer is not stored, the environment is asked. If
    it cannot say, the call is made again if it is `repeatable`. Raises EpisodeLost if it is not, Failed, and
    StoreError."""
    known = calls.intend(call.key, call.name, call.arguments)
    if known is not None and known.observation is not None:
        await environment.restore(call, known.observation)
        return known.observation
    found = await environment.make(call) if known is None else await _again(call, environment, repeatable)
    calls.observe(call.key, found)
    return found


async def _again(call: ToolCall, environment: ToolEnvironment, repeatable: bool) -> str:
    """The answer to a call that an earlier coordinator was about to make."""
    try:
        return await environment.recall(call)
    except NotMade:
        pass
    except MayBeMade:
        if not repeatable:
            raise EpisodeLost(
                f"the coordinator died while tool {call.name} was called ({call.key}), and the environment cannot say "
                "whether it was"
            ) from None
    return await environment.make(call)
