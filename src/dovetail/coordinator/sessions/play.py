"""Plays an episode: the model and an environment's tools in turn. It is the loop of environments that answer calls; an
agent of one's own has a loop of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.coordinator.sessions.answer_reader import AnswerReader, WrongCall
from dovetail.coordinator.sessions.bridge import Bridge, Tools
from dovetail.coordinator.sessions.effects import Failed, ToolCall, ToolEnvironment, observe
from dovetail.coordinator.sessions.episode import Branch, Episode, ModelExchange, Sampled, StoredRequest
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.tool_calls import CallKey, ToolCalls


class SampledTurn(NamedTuple):
    """What the model wrote: the sampled ids with the end token, the log-probability of each (nats), and whether an end
    token ended it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: bool


class AskedTurn(NamedTuple):
    """A turn that the model is asked for. `before` is the number of tokens of the response that come before its answer.
    `number` counts the turns from 0. It is None if turns may be asked for in another order after a death. Then a turn
    is known by its prompt. `most` limits the tokens, if it is given."""

    exchange: ModelExchange
    before: int
    number: int | None = None
    most: int | None = None


class PromptTooLong(Failed):
    """An episode begins with a prompt that is too long."""


def check_opening(turn: AskedTurn, most: int) -> None:
    """Raises PromptTooLong if the episode begins with more than `most` tokens."""
    if not turn.before and (found := len(turn.exchange.prompt)) > most:
        raise PromptTooLong(
            f"the episode begins with {found} tokens, but spec.data.maxPromptTokens is {most}; raise it, because the "
            "tools and all that is said before the model's first turn belong to the prompt"
        )


# Draws an answer. A resumed episode draws the same. It may raise PromptTooLong.
Policy = Callable[[AskedTurn], Awaitable[SampledTurn]]


class Ending(StrEnum):
    """Why an episode ended. All but the first are failures of the model."""

    ANSWERED = "answered"  # the model said something and called no tool
    TURNS = "turns"  # the model called tools in its last turn, too
    CUT = "cut"  # a turn reached the limit of its length
    WRONG_CALL = "wrong call"  # a call could not be read


@dataclass(frozen=True)
class Played:
    """An episode that ended. `requests` says what its turns were asked with (`Episode.requests`). `messages` has all
    messages, the last answer included. `reward` is the environment's, or None if it gives none. `turns` and `calls`
    count what the model did. `why` says what was wrong with a wrong call."""

    branches: list[Branch]
    requests: list[StoredRequest]
    messages: list[Message]
    ending: Ending
    reward: float | None
    turns: int
    calls: int
    why: str = ""


class Begun(Protocol):
    """What the model plays an episode with, once it has begun."""

    async def end(self) -> None:
        """The episode is over, in whatever way. Free what it holds."""


class BegunEnvironment(ToolEnvironment, Begun, Protocol):
    """An environment in an episode that has begun with `observation`."""

    observation: str

    async def reward(self) -> float | None:
        """What the episode earned. None if the environment has no say in that. Raises Failed."""


class Environment(Protocol):
    """The environments of a job, or its agents."""

    @property
    def tools(self) -> Tools:
        """The function schemas of the tools. They are known once it is open."""

    async def open(self) -> None:
        """Get ready. It may be called again. Raises ValueError with one sentence for the user."""

    async def begin(self, episode: str, asked: Sequence[Message], fields: Mapping[str, Any]) -> Begun:
        """Begin an attempt at an episode. Its prompt's record has the messages `asked`, with which the model begins,
        and other `fields`. `episode` is the beginning of the keys of its calls. Raises Failed."""

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
    whose: ClassVar = "environment"

    async def play(
        self, sample: Key, attempt: int, asked: Sequence[Message], environment: BegunEnvironment, policy: Policy
    ) -> Played:
        """Play the episode of a sample that begins with the messages `asked`. Raises EpisodeLost, Failed, StoreError,
        TemplateRefused and NotWritten, and the errors of `policy`."""
        episode, messages = Episode(self.bridge), _opened(asked, environment.observation)
        ending, why, begun = Ending.TURNS, "", len(messages)
        for turn in range(self.max_turns):
            exchange = episode.ask(messages, self.tools)
            drawn = await policy(AskedTurn(exchange, episode.before(exchange), turn))
            message, why = read_turn(self.reader, turn, exchange, drawn.tokens)
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
        return Played(episode.branches(), episode.requests(), messages, ending, earned, turn + 1, calls, why)


def read_turn(
    reader: AnswerReader, turn: int, exchange: ModelExchange, tokens: Sequence[int], stops: Sequence[str] = ()
) -> tuple[Message, str]:
    """The message of a turn, before any of `stops`, and what is wrong with it. A wrong message has no calls."""
    try:
        message = reader.read(exchange.prompt, tokens, exchange.tools, stops)
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
