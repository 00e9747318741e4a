"""Episodes with an environment in Python: what the model sampled is what is trained, wherever the coordinator dies."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.sessions.answer_reader import AnswerReader
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.effects import Failed, NotMade, ToolCall, observe
from dovetail.coordinator.sessions.play import AskedTurn, Ending, Played, Player, SampledTurn
from dovetail.coordinator.sessions.python_environment import EnvironmentClass, PythonEpisode
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.store.tool_calls import CallKey
from helpers.chat_templates import byte_tokens, said, shipped, with_ends

SAMPLE = Key(1, 0, 0)


class Guess:
    """A number is to be guessed."""

    def reset(self, secret: int) -> str:
        self.secret, self.tries, self.found = secret, 0, False
        return "The number is between 1 and 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        if not 1 <= number <= 9:
            raise ValueError("the number is between 1 and 9")
        if number == 7 and self.secret == 0:
            raise RuntimeError("the dice fell off the table")
        self.tries += 1
        self.found = number == self.secret
        return "right" if self.found else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return 1.0 / self.tries if self.found else 0.0

    def _unseen(self) -> None: ...


ENVIRONMENT = EnvironmentClass(Guess, "tests:Guess")
ASKED = [said("user", "Guess.")]


class Crash(BaseException):
    """The coordinator dies."""


class Here:
    """An environment in this process, which is new in each life."""

    def __init__(self, begun: PythonEpisode) -> None:
        self.observation, self._begun = begun.observation, begun

    async def make(self, call: ToolCall) -> str:
        return await self._begun.make(call.name, call.arguments)

    async def recall(self, call: ToolCall) -> str:
        raise NotMade

    async def restore(self, call: ToolCall, observation: str) -> None:
        assert await self.make(call) == observation

    async def reward(self) -> float | None:
        return await self._begun.reward()

    async def end(self) -> None: ...


def begun(environment: EnvironmentClass, record: dict[str, Any]) -> Here:
    return Here(asyncio.run(environment.begin(record)))


def guess(number: object) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {json.dumps(number)}}}}}\n</tool_call><|im_end|>'


class Coordinator:
    """Lives that share a folder, and the tokens that were drawn. The model says `answers`, one a turn."""

    def __init__(self, folder: Path, answers: Sequence[str], max_turns: int = 5) -> None:
        self.folder, self.answers, self.max_turns = folder, answers, max_turns
        self.tokenizer = with_ends(byte_tokens(), shipped()["trl: qwen2_5"][0])
        self.drawn: dict[int, SampledTurn] = {}
        self.prompts: dict[int, list[int]] = {}

    def live(self, dies: str = "", secret: int = 5) -> Played:
        """One life, which ends at this place, such as "draw 1" or "stored 0"."""
        store, chat = Store(self.folder), chat_format(self.tokenizer)
        reader = AnswerReader.of(self.tokenizer, chat)
        player = Player(Bridge(chat, self.tokenizer), reader, store.tool_calls, ENVIRONMENT.tools, self.max_turns)

        async def draw(asked: AskedTurn) -> SampledTurn:
            turn, prompt = asked.number, asked.exchange.prompt
            assert turn is not None
            if dies == f"draw {turn}":
                raise Crash
            assert self.prompts.setdefault(turn, list(prompt)) == list(prompt), "a resumed episode asks the same"
            text = self.answers[turn]
            ids = [token for piece in pieces(text) for token in self.tokenizer(piece)["input_ids"]]
            found = self.drawn.setdefault(
                turn, SampledTurn(ids, [-float(turn + 1)] * len(ids), text.endswith("<|im_end|>"))
            )
            if dies == f"drawn {turn}":
                raise Crash
            return found

        try:
            return asyncio.run(player.play(SAMPLE, 0, ASKED, begun(ENVIRONMENT, {"secret": secret}), draw))
        finally:
            store.close()


def pieces(text: str) -> list[str]:
    """The text in pieces that a tokenizer would not choose."""
    body, end = (text.removesuffix("<|im_end|>"), "<|im_end|>") if text.endswith("<|im_end|>") else (text, "")
    mark = "<tool_call>"
    body = body.removeprefix(mark) if (opened := body.startswith(mark)) else body
    closed = body.endswith("</tool_call>")
    body = body.removesuffix("</tool_call>")
    return [*([mark] if opened else []), *body, *(["</tool_call>"] if closed else []), *([end] if end else [])]


GAME = [guess(3), guess(7), guess(5), "I won.<|im_end|>"]


def learnt(played: Played) -> list[int]:
    (branch,) = played.branches
    return branch.tokens[branch.learnt].tolist()


def test_a_game_is_played_to_its_end(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, GAME)
    played = coordinator.live()
    assert played.ending is Ending.ANSWERED
    assert played.reward == pytest.approx(1 / 3)
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["higher", "lower", "right"]
    assert learnt(played) == [token for turn in range(4) for token in coordinator.drawn[turn].tokens]
    (branch,) = played.branches
    text = coordinator.tokenizer.decode(branch.tokens)
    assert "<|im_start|>user\nGuess.\n\nThe number is between 1 and 9.<|im_end|>" in text
    assert '"name": "guess", "description": "Guess the number."' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nright\n</tool_response><|im_end|>\n<|im_start|>assistant\nI won.<|im_end|>"
    )


@pytest.mark.parametrize("dies", [f"{where} {turn}" for where in ("draw", "drawn") for turn in (0, 1, 3)])
def test_a_resumed_episode_is_the_same(tmp_path: Path, dies: str) -> None:
    whole = Coordinator(tmp_path / "whole", GAME).live()
    coordinator = Coordinator(tmp_path / "killed", GAME)
    for place in (dies, "draw 2"):
        with pytest.raises(Crash):
            coordinator.live(place)
    again = coordinator.live()
    assert again.messages == whole.messages
    assert (again.ending, again.reward) == (whole.ending, whole.reward)
    assert learnt(again) == learnt(whole)
    assert again.branches[0].tokens.tolist() == whole.branches[0].tokens.tolist()


@pytest.mark.parametrize(
    ("answers", "ending", "told"),
    [
        ([guess(3)] * 5, Ending.TURNS, ["higher"] * 5),
        ([guess(3), "I do not"], Ending.CUT, ["higher"]),
        (["<tool_call>\nguess(3)\n</tool_call><|im_end|>"], Ending.WRONG_CALL, []),
        ([guess(33), "No.<|im_end|>"], Ending.ANSWERED, ["error: the number is between 1 and 9"]),
        (
            [guess(3).replace("number", "digit"), "No.<|im_end|>"],
            Ending.ANSWERED,
            ["error: guess: missing a required argument: 'number'"],
        ),
        (
            [guess("many"), guess([3]), guess(None), guess("3"), "No.<|im_end|>"],
            Ending.ANSWERED,
            [
                "error: guess: number: Input should be a valid integer, unable to parse string as an integer",
                "error: guess: number: Input should be a valid integer",
                "error: guess: number: Input should be a valid integer",
                "higher",
            ],
        ),
        (
            [guess(3).replace('"guess"', '"_unseen"'), guess(3).replace('"guess"', '"reset"'), "No.<|im_end|>"],
            Ending.ANSWERED,
            [
                "error: there is no tool _unseen; the tools are guess",
                "error: there is no tool reset; the tools are guess",
            ],
        ),
    ],
)
def test_what_the_model_does_wrong_is_its_own(
    tmp_path: Path, answers: list[str], ending: Ending, told: list[str]
) -> None:
    played = Coordinator(tmp_path, answers).live()
    assert played.ending is ending
    assert [message["content"] for message in played.messages if message["role"] == "tool"] == told
    assert played.reward == 0.0
    assert bool(played.why) == (ending is Ending.WRONG_CALL)


def test_what_the_environment_does_wrong_is_not_the_models(tmp_path: Path) -> None:
    with pytest.raises(
        Failed,
        match=r"^tests:Guess.guess raised RuntimeError: the dice fell off the table at .*test_play.py:\d+ in guess$",
    ):
        Coordinator(tmp_path, [guess(7)]).live(secret=0)
    with pytest.raises(Failed, match=r"^tests:Guess.reset raised TypeError: .*'secret'"):
        begun(ENVIRONMENT, {})


class Halves:
    """Its texts have halves of characters, as `os.listdir` gives them for names that are no UTF-8."""

    def reset(self, begins: bool) -> str:
        return "file\udcff" if begins else ""

    def listing(self, raises: bool) -> str:
        """List the files.

        Args:
            raises: Whether it fails.
        """
        if raises:
            raise ValueError("file\udcff")
        return "file\udcff"


def test_a_text_that_cannot_be_stored_is_the_environments_failure(tmp_path: Path) -> None:
    halves = EnvironmentClass(Halves, "m:C")
    with pytest.raises(Failed, match=r"^m:C.reset answered with half of a character .* decode bytes with"):
        begun(halves, {"begins": True})
    store = Store(tmp_path)
    for n, raises in enumerate((True, False)):
        call = ToolCall(CallKey(*SAMPLE, 0, 0, n), "listing", {"raises": raises})
        with pytest.raises(Failed, match=r"^m:C.listing answered with half of a character"):
            asyncio.run(observe(store.tool_calls, call, begun(halves, {"begins": False}), False))
    store.close()


class NoReset:
    def guess(self, number: int) -> str: ...


class NoTool:
    def reset(self) -> None: ...


class NoTypes(NoTool):
    def guess(self, number) -> str:
        """Guess."""
        return str(number)


class NoJson(NoTool):
    def guess(self, number: Path | Store) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        return str(number)


class Bag(NoTool):
    def put(self, counts: dict[str, list[int]], at: tuple[int, int] = (0, 0), tag: str | None = None) -> str:
        """Put things into the bag.

        Args:
            counts: How many.
            at: Where.
            tag: A name.
        """
        return f"{counts} {at} {tag}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"counts": {"a": [1, 2]}, "at": [3, 4]}, "{'a': [1, 2]} (3, 4) None"),
        ({"counts": {}, "tag": None}, "{} (0, 0) None"),
        ({"counts": {"a": [1, "b"]}}, "error: put: counts['a'][1]: Input should be a valid integer, unable to parse"),
        ({"counts": {}, "at": [3]}, "error: put: at[1]: Field required"),
        ({"counts": {}, "tag": 5}, "error: put: tag: Input should be a valid string"),
    ],
)
def test_arguments_have_the_types_of_the_method(arguments: dict[str, Any], told: str) -> None:
    call = ToolCall(CallKey(*SAMPLE, 0, 0, 0), "put", arguments)
    assert asyncio.run(begun(EnvironmentClass(Bag, "m:C"), {}).make(call)).startswith(told)


class Chatty(NoTool):
    def talk(self, characters: int) -> str:
        """Talk.

        Args:
            characters: How much.
        """
        return "a" * characters

    async def leave(self) -> str:
        """Leave."""
        sys.exit(3)


def test_an_answer_that_no_prompt_can_have_and_an_exit_are_failures() -> None:
    episode = begun(EnvironmentClass(Chatty, "m:C"), {})
    assert asyncio.run(episode.make(ToolCall(CallKey(*SAMPLE, 0, 0, 0), "talk", {"characters": 3}))) == "aaa"
    for name, arguments, says in (
        ("talk", {"characters": 1_000_001}, r"^m:C.talk answered with 1,000,001 characters; return 1,000,000 at most$"),
        ("leave", {}, r"^m:C.leave raised SystemExit: 3 at .*test_play.py:\d+ in leave$"),
    ):
        with pytest.raises(Failed, match=says):
            asyncio.run(episode.make(ToolCall(CallKey(*SAMPLE, 0, 0, 0), name, arguments)))


class NoNumber(NoTool):
    def get_reward(self) -> float:
        return float("nan")

    def guess(self) -> int:
        """Guess."""
        return 3


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (NoReset, "must be a class with a method reset"),
        (len, "must be a class with a method reset"),
        (NoTool, "has no public method besides reset and get_reward"),
        (NoJson, r"the argument number of m:C.guess has the type .*, which cannot be read from JSON; take a type that"),
        (NoTypes, "the method guess of m:C is a tool, but its schema cannot be made: .*; give each argument a type"),
    ],
)
def test_a_class_that_is_no_environment_is_named(made: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        assert EnvironmentClass(made, "m:C").tools


def test_a_reward_is_a_number() -> None:
    episode = begun(EnvironmentClass(NoNumber, "m:C"), {})
    assert episode.observation == ""
    with pytest.raises(Failed, match="get_reward returned nan, which is no finite number"):
        asyncio.run(episode.reward())
