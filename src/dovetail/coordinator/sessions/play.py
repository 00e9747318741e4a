"""Plays an episode: the model and an environment's tools in turn. It is the loop of environments that answer calls; an
agent of one's own has a loop of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.coordinator.sessions.answer_reader import AnswerReader, WrongCall
from dovetail.coordinator.sessions.bridge import Bridge, Tools
from dovetail.coordinator.sessions.effects import ToolCall, ToolEnvironment, observe
from dovetail.coordinator.sessions.episode import Branch, Episode, Sampled
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.tool_calls import CallKey, ToolCalls


class SampledTurn(NamedTuple):
    """What the model wrote: the sampled ids with the end token, the log-probability of each (nats), and whether an end
    token ended it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: bool


# Draws the answer to a prompt (ids) in a turn, which counts from 0. A resumed episode draws the same.
Policy = Callable[[int, Sequence[int]], Awaitable[SampledTurn]]


class Ending(StrEnum):
    """Why an episode ended. All but the first are failures of the model."""

    ANSWERED = "answered"  # the model said something and called no tool
    TURNS = "turns"  # the model called tools in its last turn, too
    CUT = "cut"  # a turn reached the limit of its length
    WRONG_CALL = "wrong call"  # a call could not be read


@dataclass(frozen=True)
class Played:
    """An episode that ended. `messages` has all messages, the last answer included. `reward` is the environment's, or
    None if it gives none. `turns` and `calls` count what the model did. `why` says what was wrong with a wrong call."""

    branches: list[Branch]
    messages: list[Message]
    ending: Ending
    reward: float | None
    turns: int
    calls: int
    why: str = ""


class BegunEnvironment(ToolEnvironment, Protocol):
    """An environment in an episode that has begun with `observation`."""

    observation: str

    async def reward(self) -> float | None:
        """What the episode earned. None if the environment has no say in that. Raises Failed."""

    async def end(self) -> None:
        """The episode is over, in whatever way. Free what it holds."""


class Environment(Protocol):
    """The environments of a job."""

    @property
    def tools(self) -> Tools:
        """The function schemas of the tools. They are known once it is open."""

    async def open(self) -> None:
        """Get ready. It may be called again. Raises ValueError with one sentence for the user."""

    async def begin(self, episode: str, record: Mapping[str, Any]) -> BegunEnvironment:
        """Begin an attempt at an episode, with the fields of its prompt's record. `episode` is the beginning of the
        keys of its calls. Raises Failed."""

    async def close(self) -> None:
        """End what was started."""


@dataclass(frozen=True)
class Player:
    """Plays episodes of one model with one kind of environment, which has these `tools`. `repeatable` says whether a
    call may be made twice if nobody knows whether it was made."""

    bridge: Bridge
    reader: AnswerReader
    calls: ToolCalls
    tools: Tools
    max_turns: int
    repeatable: bool = False

    async def play(
        self, sample: Key, attempt: int, asked: Sequence[Message], environment: BegunEnvironment, policy: Policy
    ) -> Played:
        """Play the episode of a sample that begins with the messages `asked`. Raises EpisodeLost, Failed, StoreError,
        TemplateRefused and NotWritten, and the errors of `policy`."""
        episode, messages = Episode(self.bridge), _opened(asked, environment.observation)
        ending, why, begun = Ending.TURNS, "", len(messages)
        for turn in range(self.max_turns):
            exchange = episode.ask(messages, self.tools)
            drawn = await policy(turn, exchange.prompt)
            message, why = self._read(turn, exchange.prompt, drawn)
            episode.answer(exchange, Sampled(drawn.tokens, drawn.logprobs, message, drawn.ended))
            messages = [*messages, message]
            if not drawn.ended or why or not message.get("tool_calls"):
                ending = Ending.CUT if not drawn.ended else Ending.WRONG_CALL if why else Ending.ANSWERED
                break
            for n, call in enumerate(message["tool_calls"]):
                key = CallKey(*sample, attempt, turn, n)
                made = ToolCall(key, call["function"]["name"], call["function"]["arguments"])
                found = await observe(self.calls, made, environment, self.repeatable)
                answer = {"role": "tool", "content": found, "name": made.name, "tool_call_id": call["id"]}
                messages.append(answer)
        earned, calls = await environment.reward(), sum(m["role"] == "tool" for m in messages[begun:])
        return Played(episode.branches(), messages, ending, earned, turn + 1, calls, why)

    def _read(self, turn: int, prompt: Sequence[int], drawn: SampledTurn) -> tuple[Message, str]:
        """The message, and what is wrong with it. A wrong message has no calls."""
        try:
            message = self.reader.read(prompt, drawn.tokens, self.tools)
        except WrongCall as error:
            return {"role": "assistant", "content": ""}, str(error)
        calls: list[Mapping[str, Any]] = message.get("tool_calls", [])
        named = [{**call, "id": f"call{turn:03}{n:02}"} for n, call in enumerate(calls)]
        return {**message, **({"tool_calls": named} if named else {})}, ""


def _opened(asked: Sequence[Message], observation: str) -> list[Message]:
    """The messages with what the environment says at the beginning. It belongs to the user's last message, if there is
    one, because many templates want turns that alternate."""
    if not observation:
        return list(asked)
    if asked and asked[-1]["role"] == "user":
        return [*asked[:-1], {**asked[-1], "content": f"{asked[-1]['content']}\n\n{observation}"}]
    return [*asked, {"role": "user", "content": observation}]
