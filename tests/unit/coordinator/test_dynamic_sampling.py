"""DAPO's dynamic sampling: which prompts are replaced, how often, and that a restart changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.loop.experience_maker import IterationPrompts, equal_prompts, replaced_key
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.planner.make_plan import make_plan
from helpers.jobs import tiny_job

PER_PROMPT = 2
FIRST = [PromptRecord(i, f"prompt {i}", [i + 1], {}) for i in range(4)]
# Prompts whose samples all get the same reward.
EASY = {"prompt 1", "prompt 3", "1: other 0"}


def further(number: int, count: int, known: Collection[str]) -> list[PromptRecord]:
    return [PromptRecord(i, f"{number}: other {i}", [10 * number + i], {}) for i in range(count)]


def samples_of(position: int, record: PromptRecord) -> list[NewSample]:
    return [NewSample(position, s, record.token_ids, 100 * position + s) for s in range(PER_PROMPT)]


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    store = Store(folder)
    try:
        yield store
    finally:
        store.close()


def answer(store: Store, records: list[PromptRecord], most: int | None = None) -> list[Key]:
    """Generate and score what is pending, at most so many; an answer's tokens and reward depend on the sample alone."""
    done = []
    for sample in store.samples.samples(1, State.PENDING)[:most]:
        key = sample.key
        (attempt,) = store.samples.assign([Assignment(key, "r", "i", 0, 0)])
        store.samples.record([Delta(key, attempt, 0, [sample.seed % 97], [0.0], "stop")])
        same = records[key.prompt].text in EASY
        store.samples.score([ScoreRow(key, np.zeros(1, np.float32), None, 1.0 if same else float(key.sample))])
        done.append(key)
    return done


def draw(store: Store, rounds: int, crash_after: int | None = None) -> IterationPrompts | None:
    """As `ExperienceMaker.draw`. `crash_after`: stop when so many samples are scored."""
    drawn = IterationPrompts(1, FIRST, store, samples_of, rounds, further)
    store.samples.begin_iteration(1, drawn.samples())
    while True:
        answered = answer(store, drawn.records, crash_after)
        if crash_after is not None:
            crash_after -= len(answered)
            if crash_after <= 0:
                return None
        if not drawn.replace_equal():
            return drawn


def held(store: Store) -> list[tuple[int, int, int, list[int], float | None]]:
    return [(s.key.prompt, s.key.sample, s.seed, s.tokens.tolist(), s.reward) for s in store.samples.experience(1)]


def test_equal_prompts_are_replaced_until_none_is_left(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        drawn = draw(store, 3)
        assert drawn is not None
        assert [drawn.records[p].text for p in drawn.current] == ["prompt 0", "prompt 2", "1: other 1", "2: other 0"]
        assert (drawn.round, drawn.replaced) == (2, 3)
        assert sorted({row[0] for row in held(store)}) == drawn.current == [0, 2, 5, 6]
        assert len(held(store)) == 4 * PER_PROMPT, "the batch has its size"
        assert equal_prompts(store, 1) == []


def test_rounds_are_bounded(tmp_path: Path) -> None:
    for rounds, left in ((0, [1, 3]), (1, [4])):
        with opened(tmp_path / str(rounds)) as store:
            drawn = draw(store, rounds)
            assert drawn is not None
            assert drawn.round == rounds
            assert equal_prompts(store, 1) == left
            assert len(held(store)) == 4 * PER_PROMPT


def test_a_restart_at_any_time_gives_the_same_samples(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as store:
        draw(store, 3)
        wanted = held(store)
    for scored in range(1, 15):
        folder = tmp_path / str(scored)
        with opened(folder) as store:
            draw(store, 3, crash_after=scored)
        with opened(folder) as store:
            draw(store, 3)
            assert held(store) == wanted, scored


def test_an_iteration_is_forgotten_with_its_decisions_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        draw(store, 3)
        wanted = held(store)

        def full(key: str, value: object) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "put", full)
            with pytest.raises(StoreError):
                store.forget(1, [replaced_key(1)])
        assert held(store) == wanted
        store.forget(1, [replaced_key(1)])
        draw(store, 3)
        assert held(store) == wanted


def test_rewards_of_steps_count_as_well(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        drawn = IterationPrompts(1, FIRST, store, samples_of)
        store.samples.begin_iteration(1, drawn.samples())
        answer(store, drawn.records)
        assert equal_prompts(store, 1) == [1, 3]
        store.samples.add_rewards("f", {}, {Key(1, 1, 0): [(1, 0.5)], Key(1, 1, 1): [(1, 0.0)]})
        assert equal_prompts(store, 1) == [3]


def test_a_plan_says_that_it_counts_one_round() -> None:
    ppo = {"samplesPerPrompt": 2, "advantage": "grpo", "dynamicSampling": 3, "lag": "Auto"}
    plan = make_plan(tiny_job(ppo=ppo).spec)
    assert plan.lag == 0
    assert any("one round of generation" in sentence and "up to 3 more" in sentence for sentence in plan.warnings)
