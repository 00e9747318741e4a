"""Plays an episode with an agent: a program that has a loop and tools of its own, and asks for the model's turns.

It asks with whole conversations. What it asks a second time is the same turn, so a client that sends a request again
gets the answer that is under way, or stored. After a death of the coordinator the program begins anew, and gets what is
stored as long as it asks the same. What its tools do is its own matter."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from dovetail.coordinator.data.text.chat_template import ChatFormat, Message, NotWritten, TemplateRefused
from dovetail.coordinator.sessions.answer_reader import AnswerReader, Unreadable
from dovetail.coordinator.sessions.bridge import Bridge, Tools, UnknownToken
from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.sessions.episode import Episode, ModelExchange, Sampled
from dovetail.coordinator.sessions.play import AskedTurn, Ending, Played, Policy, PromptTooLong, SampledTurn, read_turn
from dovetail.coordinator.store.samples import Key
from dovetail.protocol.process.endings import cancel


class TurnRefused(Exception):
    """A request gets no answer. The message is a sentence for whoever wrote the agent."""


class Until(NamedTuple):
    """Where an answer ends if it does not end before: after `most` tokens, and with the first of the texts `stops`.
    Such a text is sampled and learnt, but the agent does not get it."""

    most: int | None = None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """What the agent asks for: the answer to what `asks` finds in the episode. `answered` gets the exchange, or
    TurnRefused."""

    asks: Callable[[Episode], ModelExchange]
    tools: Tools
    until: Until
    answered: asyncio.Future[ModelExchange]

    def answer(self, exchange: ModelExchange) -> None:
        """Whoever asked may be gone."""
        if not self.answered.done():
            self.answered.set_result(exchange)

    def refuse(self, sentence: str) -> None:
        """As `answer`."""
        if not self.answered.done():
            self.answered.set_exception(TurnRefused(sentence))


class AgentEpisode:
    """An episode that a program plays. `run` gets the key with which the program asks, returns when it has ended well,
    and raises Failed. When it is cancelled, it ends the program. This may take `seconds` from one new turn of the model
    to the next, and from the last one to its end. `reward` is what it says that the episode earned. Until the end the
    episode is `known` by its key."""

    def __init__(
        self, run: Callable[[str], Coroutine[Any, Any, None]], seconds: float, known: dict[str, AgentEpisode]
    ) -> None:
        self.reward: float | None = None
        self._seconds, self._left = seconds, seconds
        self._known, self._key = known, secrets.token_urlsafe(24)
        known[self._key] = self
        self._running = asyncio.create_task(run(self._key))
        self._requests = asyncio.Queue[TurnRequest]()
        self._open = set[TurnRequest]()

    async def ask(self, messages: Sequence[Message], tools: Tools, until: Until) -> ModelExchange:
        """The model's turn after `messages`. Raises TurnRefused."""
        return await self._ask(lambda episode: episode.ask(messages, tools), tools, until)

    async def ask_ids(self, ids: Sequence[int], until: Until) -> ModelExchange:
        """As `ask`, after a prompt of token ids."""
        return await self._ask(lambda episode: episode.ask_ids(ids), (), until)

    async def _ask(self, asks: Callable[[Episode], ModelExchange], tools: Tools, until: Until) -> ModelExchange:
        request = TurnRequest(asks, tools, until, asyncio.get_running_loop().create_future())
        self._requests.put_nowait(request)
        self._open.add(request)
        try:
            return await request.answered
        finally:
            self._open.discard(request)

    async def next_request(self) -> TurnRequest | None:
        """What the agent asks for next. None when it has ended. Raises Failed if it ended badly, and if its time is
        over."""
        clock = asyncio.get_running_loop().time
        began, waiting = clock(), asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({waiting, self._running}, timeout=self._left, return_when=asyncio.FIRST_COMPLETED)
            self._left -= clock() - began
            if self._running.done():
                self._running.result()
                return None
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        raise Failed(
            f"the agent asked for no new turn and did not end within {self._seconds:g} s "
            "(spec.sessions.agent.timeoutSeconds)"
        )

    def answer(self, request: TurnRequest, exchange: ModelExchange) -> None:
        """Answer with a new turn."""
        self._left = self._seconds
        request.answer(exchange)

    async def end(self) -> None:
        """The episode is over, in whatever way. End its program."""
        self._known.pop(self._key, None)
        for request in self._open:
            request.refuse("the episode is over")
        await cancel([self._running])


@dataclass(frozen=True)
class AgentPlayer:
    """Plays episodes of one model with an agent. Without a `reader` calls of tools cannot be read, because of
    `unreadable`."""

    bridge: Bridge
    reader: AnswerReader | None
    max_turns: int
    unreadable: str
    whose: ClassVar = "agent"

    @classmethod
    def of(cls, bridge: Bridge, tokenizer: Any, chat: ChatFormat, max_turns: int) -> AgentPlayer:
        """The player for a tokenizer and its chat format."""
        try:
            return cls(bridge, AnswerReader.of(tokenizer, chat), max_turns, "")
        except Unreadable as error:
            return cls(bridge, None, max_turns, str(error))

    async def play(
        self, sample: Key, attempt: int, asked: Sequence[Message], agent: AgentEpisode, policy: Policy
    ) -> Played:
        """Play the episode to its end, as `Player.play`. Turns are drawn one after another, in the order in which the
        agent asks for them. Raises Failed, StoreError, and the errors of `policy`."""
        episode, why, limit, failure = Episode(self.bridge), "", "", None
        ending = Ending.ANSWERED
        try:
            while (request := await agent.next_request()) is not None:
                try:
                    exchange = self._asked(episode, request)
                except TurnRefused as error:
                    request.refuse(str(error))
                    continue
                if exchange.answer is not None:
                    request.answer(exchange)
                    continue
                if len(episode.answered) == self.max_turns:
                    ending, limit = Ending.TURNS, f"it has had {self.max_turns} turns (spec.sessions.maxTurns)"
                else:
                    until = request.until
                    try:
                        drawn = await policy(AskedTurn(exchange, episode.before(exchange), most=until.most))
                    except PromptTooLong as error:
                        # It may ask with less.
                        request.refuse(str(error))
                        continue
                    if drawn.tokens:
                        answer, why = self.read(len(episode.exchanges) - 1, exchange, drawn, until.stops)
                        episode.answer(exchange, answer)
                        agent.answer(request, exchange)
                        continue
                    ending, limit = Ending.CUT, "no tokens are left of spec.generation.maxTokens"
                request.refuse(f"the episode gets no further turn of the model: {limit}")
        except Failed as error:
            failure = error
        finally:
            await agent.end()
        answered = episode.answered
        if not answered or (failure is not None and agent.reward is None and not limit):
            raise failure or Failed("the agent ended without a turn of the model")
        last = answered[-1]
        assert last.answer is not None
        if agent.reward is not None:
            ending, why = Ending.ANSWERED, ""
        elif not limit:
            ending = Ending.CUT if not last.answer.ended else Ending.WRONG_CALL if why else Ending.ANSWERED
        calls = sum(len(each.answer.message.get("tool_calls", [])) for each in answered if each.answer is not None)
        messages = [*last.messages, last.answer.message]
        told = (episode.branches(), episode.requests(), messages)
        return Played(*told, ending, agent.reward, len(answered), calls, limit or why)

    def _asked(self, episode: Episode, request: TurnRequest) -> ModelExchange:
        """Raises TurnRefused."""
        if request.tools and self.reader is None:
            raise TurnRefused(f"tools cannot be used: {self.unreadable}")
        try:
            return request.asks(episode)
        except (TemplateRefused, NotWritten) as error:
            raise TurnRefused(f"the tokenizer's chat template refuses the messages: {error}") from error
        except UnknownToken as error:
            raise TurnRefused(str(error)) from error

    def read(self, turn: int, exchange: ModelExchange, drawn: SampledTurn, stops: Sequence[str]) -> tuple[Sampled, str]:
        """What was drawn, up to the first of `stops`, with its message, and what is wrong with that. What was not to be
        a call, or is none, is a text."""
        tokens, logprobs, ended = drawn
        if (count := self.bridge.until(tokens, stops)) is not None:
            tokens, logprobs, ended = tokens[:count], logprobs[:count], True
        message: Message = {}
        why = ""
        if self.reader is not None:
            message, why = read_turn(self.reader, turn, exchange, tokens, stops)
        if not message or why or (message.get("tool_calls") and not exchange.tools):
            message = {"role": "assistant", "content": self.bridge.text(tokens, stops)}
        return Sampled(tokens, logprobs, message, ended, stops), why if exchange.tools else ""
