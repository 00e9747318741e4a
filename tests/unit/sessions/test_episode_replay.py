"""`dovetail debug replay --session`: a stored episode is played again from the store, and what differs is named."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.sessions.agent import AgentEpisode, AgentPlayer, Until
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.play import SampledTurn
from dovetail.coordinator.store.samples import Key
from dovetail.protocol.errors import RunError, UsageError
from dovetail.tools.episode_replay import kept_episode, play_again
from helpers.episode_life import END, TOOLS, Life, Model, World, forgetful, thinks, tokenizer


def replayed(folder: Path, key: Key, life: Life, says: Any = None) -> tuple[list[str], list[list[int]]]:
    """What is told of an episode that is played again, and the prompts that were asked."""
    kept, told, prompts = kept_episode(folder, key), list[str](), list[list[int]]()
    tokens, chat = life.tokenizer(), chat_format(life.tokenizer())

    async def draw(prompt: list[int], most: int) -> SampledTurn:
        prompts.append(prompt)
        ids, written = Model("r0", says or life.says, life.tokenizer).turn(kept.sample.seed, prompt)
        ids = ids[written:]
        return SampledTurn(ids[:most], [-1.0] * len(ids[:most]), len(ids) <= most)

    asyncio.run(play_again(kept, AgentPlayer.of(Bridge(chat, tokens), tokens, chat, 99), draw, told.append))
    return told, prompts


def asked(life: Life) -> set[tuple[int, ...]]:
    return {tuple(request["token_ids"]) for server in life.servers for request in server.requests}


@pytest.mark.slow
@pytest.mark.parametrize(("most", "ends"), [(400, {"answered"}), (75, {"cut"})], ids=["whole turns", "cut turns"])
def test_the_episodes_of_an_environment_are_played_again(tmp_path: Path, most: int, ends: set[str]) -> None:
    """With a template that begins branches, and with turns that are cut."""
    life = Life(tmp_path, World(), thinks, maxTurns=20, maxTokens=most)
    life.tokenizer = forgetful
    asyncio.run(life.run())
    endings, prompts = set(), set[tuple[int, ...]]()
    for key, ended in life.ended.items():
        told, made = replayed(tmp_path, key, life)
        assert len(told) == ended.turns
        assert sum(" of a new branch " in line for line in told) == len(ended.branches) - 1
        endings.add(ended.ending)
        prompts |= set(map(tuple, made))
    assert endings == ends
    assert prompts == asked(life), "each prompt is that of a turn in the run"


class Editors:
    """Agents that go on with messages, edit what they asked, ask with token ids, and stop at texts."""

    tools = ()

    def __init__(self) -> None:
        self.known: dict[str, AgentEpisode] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self, episode: str, asked: Any, fields: Mapping[str, Any]) -> AgentEpisode:
        return AgentEpisode(self._run, 1000.0, self.known)

    async def _run(self, key: str) -> None:
        ask = partial(self.known[key].ask, tools=TOOLS, until=Until())
        messages: list[Any] = [{"role": "user", "content": "Guess."}]
        first = await ask(messages)
        assert first.answer is not None
        (made,) = first.answer.message["tool_calls"]
        told = [first.answer.message, {"role": "tool", "content": "lower", "tool_call_id": made["id"]}]
        await ask([*messages, *told])
        await ask([{"role": "user", "content": "Guess again."}, *told])
        by_ids = await self.known[key].ask_ids([first.prompt[0], *first.prompt], Until(5))
        assert by_ids.answer is not None
        # It goes on with a turn that was cut.
        await self.known[key].ask_ids([*by_ids.prompt, *by_ids.answer.tokens], Until())
        # It stops a turn at a text, and goes on from there.
        now = {"role": "user", "content": "Guess now."}
        stopped = await ask([now], until=Until(stops=("number",)))
        assert stopped.answer is not None
        go_on = {"role": "user", "content": "Go on."}
        await ask([now, stopped.answer.message, go_on])
        # It stops another one, in the midst of a conversation, and writes the text at which it stopped to the answer.
        again = await ask([*messages, *told, go_on], until=Until(stops=("number",)))
        assert again.answer is not None
        whole = {"role": "assistant", "content": again.answer.message["content"] + "number"}
        await ask([*messages, *told, go_on, whole, go_on])
        # It stops one where the call ends, with a token of the template.
        last = {"role": "user", "content": "A last guess."}
        closed = await ask([last], until=Until(stops=("</tool_call>",)))
        assert closed.answer is not None
        await ask([last, closed.answer.message, go_on])


@cache
def with_marks() -> Any:
    """The tokenizer, in which what opens and closes a call are tokens, as published ones have it."""
    made = copy.deepcopy(tokenizer())
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [tokenizer, with_marks], ids=["calls are text", "calls have marks"])
def test_the_episodes_of_an_agent_are_played_again(tmp_path: Path, tokens: Any) -> None:
    life = Life(tmp_path, World(), most=99999, maxTurns=20, agent={"command": ["a"]})
    life.environment, life.tokenizer = Editors, tokens
    asyncio.run(life.run())
    prompts = set[tuple[int, ...]]()
    for key, ended in life.ended.items():
        told, made = replayed(tmp_path, key, life)
        assert len(told) == ended.turns == 11
        prompts |= set(map(tuple, made))
    assert prompts == asked(life)


def changed(folder: Path, statement: str, values: Sequence[Any] = ()) -> None:
    with sqlite3.connect(folder / "store.sqlite") as db:
        assert db.execute(statement, values).rowcount == 1


@pytest.mark.slow
def test_the_first_difference_is_named(tmp_path: Path) -> None:
    life, key = Life(tmp_path, World(), maxTurns=20), Key(1, 0, 0)
    asyncio.run(life.run())
    with pytest.raises(RunError, match=r"^turn 0: token 0 is \d+ drawn again, and \d+ in the run$"):
        replayed(tmp_path, key, life, says=lambda seed, text: f"Another word.{END}")
    kept = kept_episode(tmp_path, key)
    ids = kept.sample.prompt_tokens.copy()
    ids[5] += 1
    where = " WHERE iteration=1 AND prompt_index=0 AND sample_index=0"
    changed(tmp_path, f"UPDATE samples SET prompt=?{where}", [ids.tobytes()])
    said = f"turn 0: token 5 of the prompt is {ids[5] - 1} made again, and {ids[5]} in the run"
    with pytest.raises(RunError, match=said):
        replayed(tmp_path, key, life)
    changed(tmp_path, f"UPDATE samples SET prompt=?{where}", [kept.sample.prompt_tokens.tobytes()])
    marks = kept.episode.learnt.copy()
    marks[-1] = 0
    changed(tmp_path, f"UPDATE episodes SET learnt=?{where}", [marks.tobytes()])
    with pytest.raises(RunError, match="but the mask that was trained is not what they make"):
        replayed(tmp_path, key, life)


@pytest.mark.slow
def test_an_episode_that_cannot_be_played_again_is_refused(tmp_path: Path) -> None:
    world = World()
    world.fails = {(1, 1)}
    asyncio.run(Life(tmp_path, world, maxTurns=20).run())
    with pytest.raises(UsageError, match=r"has no episode 0/7 of iteration 1\. A run keeps the episodes since its old"):
        kept_episode(tmp_path, Key(1, 0, 7))
    with pytest.raises(UsageError, match=r"^episode 1/1 of iteration 1 was discarded \(environment failed: the dice"):
        kept_episode(tmp_path, Key(1, 1, 1))
    changed(tmp_path, "DELETE FROM turn_requests WHERE prompt_index=0 AND sample_index=0")
    with pytest.raises(UsageError, match="was drawn by a release that did not keep what its turns were asked with"):
        kept_episode(tmp_path, Key(1, 0, 0))


def test_an_episode_is_named_by_two_numbers(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["debug", "replay", str(tmp_path), "--iteration", "1", "--session", "three"])
    assert (result.exit_code, "it takes the numbers of prompt and sample, such as 3/0" in result.output) == (2, True)
