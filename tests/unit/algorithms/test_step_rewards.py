"""Rewards of steps: what a function may return, where they lie in tokens, and what is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.coordinator.rewards.calls import Call
from dovetail.coordinator.rewards.values import WrongRewards, checked
from dovetail.coordinator.rewards.workers import Workers
from dovetail.coordinator.store.samples import Key, NewSample
from dovetail.coordinator.store.step_rewards import last_tokens, step_arrays
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RewardModel

LINES = """\
def lines(prompts, responses, **fields):
    found = []
    for response in responses:
        ends, at = [], 0
        for line in response.splitlines(keepends=True):
            at += len(line)
            ends.append([at, float("good" in line)])
        found.append({"reward": len(ends), "steps": ends})
    return found
"""


def test_what_a_function_may_return() -> None:
    plain = checked([1, 2.5], ["a", "b"])
    assert (plain.rewards, plain.steps) == ([1.0, 2.5], None)
    found = checked([{"reward": 1, "steps": [[3, 0.5], (1, -1)]}, {"steps": []}, 2], ["abc", "", "x"])
    assert found.rewards == [1.0, 0.0, 2.0]
    assert found.steps == [[(1, -1.0), (3, 0.5)], [], []]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"steps": [[4, 1.0]]}, "returned a step that ends at 4 for response 0; its 3 characters count from 1"),
        ({"steps": [[0, 1.0]]}, "ends at 0"),
        ({"steps": [[1.5, 1.0]]}, "ends at 1.5"),
        ({"steps": [1.0]}, "returned step 1.0 for response 0; return [end, reward]"),
        ({"steps": [[1, float("nan")]]}, "returned nan for response 0; return finite numbers"),
        ({"steps": 3}, "returned steps as int for response 0; return [[end, reward], ...]"),
        ({"score": 3}, "returned 'score' for response 0; an object has reward and steps"),
    ],
)
def test_what_it_may_not(value: Any, words: str) -> None:
    with pytest.raises(WrongRewards) as error:
        checked([value], ["abc"])
    assert words in str(error.value)


# Tokens of bytes: 7 and 8 are the halves of one character, 9 is one that is not shown.
PIECES = {1: b"a", 2: b"bc", 3: b"def\n", 7: "é".encode()[:1], 8: "é".encode()[1:], 9: b""}


def text(tokens: NDArray[np.int32]) -> str:
    return b"".join(PIECES[int(t)] for t in tokens).decode(errors="replace")


def test_a_step_ends_at_the_first_token_that_holds_its_last_character() -> None:
    tokens = np.array([1, 2, 3, 7, 8, 1, 9], np.int32)
    shown = text(tokens)
    assert shown == "abcdef\néa"
    for end in range(1, len(shown) + 1):
        (found,) = last_tokens(tokens, [end], text)
        assert len(text(tokens[: found + 1])) >= end
        assert found == 0 or len(text(tokens[:found])) < end
    assert last_tokens(tokens, [99], text) == [len(tokens) - 1]
    assert last_tokens(tokens, [], text) == []


def test_a_token_is_decoded_by_itself_once() -> None:
    """An iteration has millions of tokens, and the coordinator does nothing else meanwhile."""
    alone: list[int] = []

    def counted(tokens: NDArray[np.int32]) -> str:
        alone.extend(tokens.tolist() if len(tokens) == 1 else [])
        return text(tokens)

    lengths: dict[int, int] = {}
    for _ in range(3):
        assert last_tokens(np.array([2, 1, 2, 2], np.int32), [5], counted, lengths) == [2]
    assert alone == [2, 1]


def test_workers_answer_with_steps_and_the_batch_has_them_weighted(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(LINES)
    answers = ["good a\nbad\n", "x"]

    async def ask() -> Any:
        pool = Workers(RewardModel(function="rewards:lines"), tmp_path)
        try:
            (function,) = await pool.open()
            return function, await pool.call(0, Call(1, 0, ["p", "p"], answers))
        finally:
            await pool.close()

    function, answer = asyncio.run(ask())
    assert (answer.rewards, answer.steps) == ([2.0, 1.0], [[(7, 1.0), (11, 0.0)], [(1, 0.0)]])
    store = Store(tmp_path / "run")
    keys = [Key(1, 0, 0), Key(1, 0, 1)]
    store.samples.begin_iteration(1, [NewSample(0, s, [5], s) for s in range(2)])
    store.samples.add_rewards(
        function.title, dict(zip(keys, answer.rewards, strict=True)), dict(zip(keys, answer.steps, strict=True))
    )
    store.samples.add_rewards("plain", dict.fromkeys(keys, 1.0))
    steps = store.samples.steps(1)
    assert steps == {key: {"lines": of} for key, of in zip(keys, answer.steps, strict=True)}

    class Answered:
        def __init__(self, key: Key, said: str) -> None:
            self.key, self.tokens = key, np.frombuffer(said.encode(), np.uint8).astype(np.int32)

    samples: Any = [Answered(key, said) for key, said in zip(keys, answers, strict=True)]
    made = step_arrays(samples, steps, {"lines": 0.5, "plain": 1.0}, lambda t: bytes(t.tolist()).decode())
    assert np.flatnonzero(made["step_ends"][0]).tolist() == [6, 10]
    assert made["step_rewards"][0, [6, 10]].tolist() == [0.5, 0.0]
    assert np.flatnonzero(made["step_ends"][1]).tolist() == [0]
    assert step_arrays(samples, {}, {}, str) == {}
    store.samples.forget(1)
    assert store.samples.steps(1) == {}
    store.close()
