"""The ledger of an episode's tokens. It has the prompt of each turn of the model as ids, and the ids that were sampled.

    prompt of a turn = prompt of the turn before + its sampled ids + ids of the new messages

Where that cannot be, a new branch begins: the template writes earlier turns otherwise, the agent has changed them, or a
turn was cut. A branch is one sequence to train on. Each sampled id is learnt in exactly one branch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.text.chat_template import ASSISTANTS, REASONING, Message
from dovetail.coordinator.sessions.bridge import Bridge, Tools
from dovetail.protocol.wire import BRANCH, LEARNT


@dataclass(frozen=True)
class Sampled:
    """What the model wrote in one turn. `tokens` are the ids as they were sampled, with the end token, and `logprobs`
    (nats) has one for each. `message` is what the agent gets. `ended` says whether an end token or one of the texts
    `stops` ended the turn, and not the limit of its length."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    message: Message
    ended: bool = True
    stops: Sequence[str] = ()


@dataclass(eq=False)
class ModelExchange:
    """One prompt of an episode, and the model's answer to it once there is one. `prompt` has the ids of the whole
    prompt. `before` is the exchange whose ids begin it. It is None where a branch begins. `of_ids`: it was asked for
    with ids, and not with messages."""

    messages: list[Message]
    tools: Tools
    prompt: list[int]
    before: ModelExchange | None
    answer: Sampled | None = None
    said: tuple[str, ...] = field(default=(), repr=False)
    of_ids: bool = False

    @property
    def after(self) -> tuple[str, ...]:
        """The messages with the answer, in the form in which messages are compared."""
        assert self.answer is not None
        return (*self.said, _compared(self.answer.message))


# What the model was asked with in one turn, as JSON. It goes on from the turn `before`, counted from 0, with further
# `messages` or `ids`. Without `before` a branch begins, and messages have their `tools`. The model has `written` so
# many tokens, at most up to the first of the texts `stops`, if there are any.
StoredRequest = dict[str, Any]


@dataclass(frozen=True)
class Branch:
    """One sequence to train on: `tokens` (T,) int32, `learnt` (T,) bool, and `logprobs` (T,) float32 in nats, which is
    0 where nothing is learnt. The last token is learnt."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    logprobs: NDArray[np.float32]

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first one that is learnt."""
        return int(self.learnt.argmax())


class JoinedBranches(NamedTuple):
    """An episode as a sample: `prompt` (P,) and `response` (R,) int32 ids, `logprobs` (R,) float32 in nats, and `marks`
    (R,) uint8 as `protocol.wire.LEARNT` describes them. The prompt of a further branch is a part of the response."""

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    marks: NDArray[np.uint8]


class Episode:
    """The exchanges of one episode with the model. Prompts may be asked for in any order, also before earlier ones are
    answered: an agent may have agents of its own."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.exchanges: list[ModelExchange] = []

    def ask(self, messages: Sequence[Message], tools: Tools = ()) -> ModelExchange:
        """The exchange that answers `messages`. The same messages and tools again are the same exchange, because
        clients send a request again when they do not get its answer. Messages are as `conversations.conversation` makes
        them. An assistant's message is the model's if content and calls are equal. Its thought may be missing, and the
        calls' arguments may be written otherwise. Raises TemplateRefused or NotWritten."""
        said = tuple(map(_compared, messages))
        key = _plain(tools)
        same = [each for each in self.exchanges if _plain(each.tools) == key]
        if (known := next((each for each in same if each.said == said), None)) is not None:
            return known
        earlier = [each for each in same if each.answer is not None and each.after == said[: len(each.after)]]
        found = max(earlier, key=lambda each: len(each.said), default=None)
        made = self._continued(found, messages) if found is not None and len(found.after) < len(said) else None
        if made is None:
            made = ModelExchange(list(messages), tools, self._bridge.opening(messages, tools), None)
        made.said = said
        self.exchanges.append(made)
        return made

    def ask_ids(self, ids: Sequence[int]) -> ModelExchange:
        """The exchange that answers a prompt of token ids. The same ids again are the same exchange. It goes on where
        the ids begin with those of an earlier prompt and its answer. Messages have what was added, as text. Raises
        UnknownToken."""
        prompt = list(ids)
        if (known := next((each for each in self.exchanges if each.prompt == prompt), None)) is not None:
            return known
        before, messages, held = None, list[Message](), 0
        for each in self.answered:
            told = _tokens(each)
            if len(told) > held and prompt[: len(told)] == told and each.answer is not None:
                before, messages, held = each, [*each.messages, each.answer.message], len(told)
        added = {"role": "user", "content": self._bridge.given(prompt[held:])}
        # Ids are not compared with messages.
        made = ModelExchange([*messages, added], (), prompt, before, said=(f"ids {_plain(prompt)}",), of_ids=True)
        self.exchanges.append(made)
        return made

    def _continued(self, before: ModelExchange, messages: Sequence[Message]) -> ModelExchange | None:
        """The exchange that appends to an earlier one. None if that cannot be."""
        answer = before.answer
        if answer is None or not answer.ended or not answer.tokens:
            return None
        turn = len(before.messages)
        # The thoughts that the model wrote count, which the agent may not have sent back.
        whole = [*before.messages, answer.message, *messages[turn + 1 :]]
        new = self._bridge.appended(whole, turn, before.tools, answer.tokens)
        if new is None:
            return None
        return ModelExchange(whole, before.tools, [*before.prompt, *answer.tokens, *new], before)

    @staticmethod
    def answer(exchange: ModelExchange, answer: Sampled) -> None:
        """Note what the model wrote. Raises ValueError for an answer without a log-probability for each token, and for
        a second one that differs."""
        if len(answer.tokens) != len(answer.logprobs):
            raise ValueError(
                f"an answer has {len(answer.tokens)} tokens and {len(answer.logprobs)} log-probabilities; give one each"
            )
        if exchange.answer is not None and exchange.answer != answer:
            raise ValueError("the exchange has another answer already; an episode keeps the first")
        exchange.answer = answer

    @property
    def answered(self) -> list[ModelExchange]:
        """The exchanges in which the model wrote something, as they were asked for."""
        return [each for each in self.exchanges if each.answer is not None and each.answer.tokens]

    def requests(self) -> list[StoredRequest]:
        """What the exchanges with an answer were asked with, to ask for them again (`ask_again`)."""
        numbers = {each: number for number, each in enumerate(self.answered)}
        found = list[StoredRequest]()
        for each in numbers:
            before, answer = each.before, each.answer
            assert answer is not None
            request: StoredRequest = {"written": len(answer.tokens)}
            if before is not None:
                request["before"] = numbers[before]
            if each.of_ids:
                request["ids"] = each.prompt[0 if before is None else len(_tokens(before)) :]
            else:
                request["messages"] = each.messages[0 if before is None else len(before.messages) + 1 :]
                request |= {"tools": list(each.tools)} if before is None else {}
            if answer.stops:
                request["stops"] = list(answer.stops)
            found.append(request)
        return found

    def ask_again(self, request: StoredRequest) -> ModelExchange:
        """The exchange of the next one of `requests`. All before it are answered."""
        before = self.answered[request["before"]] if "before" in request else None
        if "ids" in request:
            return self.ask_ids([*([] if before is None else _tokens(before)), *request["ids"]])
        if before is None:
            return self.ask(request["messages"], request["tools"])
        assert before.answer is not None
        return self.ask([*before.messages, before.answer.message, *request["messages"]], before.tools)

    def before(self, exchange: ModelExchange) -> int:
        """How many tokens of the response come before the answer of an exchange that has none yet: all that the other
        branches hold, and its prompt, less the prompt of the first branch."""
        everyone = [*self.answered, exchange]
        inner = {each.before for each in everyone}
        held = sum(len(_tokens(each)) for each in everyone[:-1] if each not in inner)
        return held + len(exchange.prompt) - min(len(each.prompt) for each in everyone if each.before is None)

    def branches(self) -> list[Branch]:
        """The sequences to train on, the one with the shortest first prompt first. Their order does not depend on the
        order of the exchanges. Exchanges without an answer, or with an empty one, are left out."""
        answered = self.answered
        inner = {each.before for each in answered}
        leaves = sorted(
            (each for each in answered if each not in inner),
            key=lambda each: (_starts(each)[-1], len(each.messages), _tokens(each), _starts(each)),
        )
        learnt = set[ModelExchange]()
        return [_branch(leaf, learnt) for leaf in leaves]


def joined(branches: Sequence[Branch]) -> JoinedBranches:
    """The branches of an episode one after another, as one sample."""
    (first, *_), start = branches, branches[0].prompt_length
    marks = [branch.learnt.astype(np.uint8) * LEARNT for branch in branches]
    for each in marks[1:]:
        each[0] = BRANCH
    tokens, logprobs = (np.concatenate([getattr(b, name) for b in branches]) for name in ("tokens", "logprobs"))
    return JoinedBranches(first.tokens[:start], tokens[start:], logprobs[start:], np.concatenate(marks)[start:])


def _tokens(exchange: ModelExchange) -> list[int]:
    assert exchange.answer is not None
    return [*exchange.prompt, *exchange.answer.tokens]


def _branch(leaf: ModelExchange, learnt: set[ModelExchange]) -> Branch:
    """The sequence that ends with an exchange. What another branch learns is given here. It adds to `learnt`."""
    tokens = np.asarray(_tokens(leaf), np.int32)
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    each: ModelExchange | None = leaf
    while each is not None:
        assert each.answer is not None
        if each not in learnt:
            start = len(each.prompt)
            mask[start : start + len(each.answer.tokens)] = True
            logprobs[start : start + len(each.answer.tokens)] = each.answer.logprobs
            learnt.add(each)
        each = each.before
    return Branch(tokens, mask, logprobs)


def _starts(exchange: ModelExchange | None) -> list[int]:
    """Where the answers of a branch begin, the last one first."""
    found = []
    while exchange is not None:
        found.append(len(exchange.prompt))
        exchange = exchange.before
    return found


def _compared(message: Message) -> str:
    """A message in the form in which two are compared. An assistant's thought and the ids of its calls do not count."""
    left_out = ("tool_calls", *REASONING) if message["role"] in ASSISTANTS else ()
    plain = {name: value for name, value in message.items() if name not in left_out}
    if message["role"] in ASSISTANTS:
        plain["calls"] = [_function(call) for call in message.get("tool_calls") or []]
    return _plain(plain)


def _function(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    return [function["name"], function.get("arguments", {})]


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
