"""Work that takes long for thousands of long samples is done in slices, or in another thread than the event loop's."""

from __future__ import annotations

import asyncio
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.text.texts import FEW_TOKENS, Texts
from dovetail.coordinator.loop.experience_maker import ExperienceAssembly, ExperienceMaker, IterationPrompts
from dovetail.coordinator.samples.dispatch import Speeds
from dovetail.coordinator.samples.in_flight import GenerationSettings, InFlight, Work
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import AT_ONCE, Store, in_slices
from dovetail.coordinator.workers.fleet import Fleet

PROMPTS, EACH = 5, 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def generated(store: Store, iteration: int, prompts: int = PROMPTS, each: int = EACH) -> list[Key]:
    new = [NewSample(p, s, [7], p * each + s) for p in range(prompts) for s in range(each)]
    store.samples.begin_iteration(iteration, new)
    keys = [Key(iteration, n.prompt, n.sample) for n in new]
    attempts = store.samples.assign([Assignment(key, "r", "i", 0, 0) for key in keys])
    store.samples.record(
        [Delta(k, a, 0, [1 + k.prompt, k.sample], [0.0, 0.0], "stop") for k, a in zip(keys, attempts, strict=True)]
    )
    return keys


def scored(store: Store, iteration: int) -> list[Key]:
    keys = generated(store, iteration)
    zeros = np.zeros(2, np.float32)
    store.samples.score([ScoreRow(key, zeros, zeros, float(key.prompt)) for key in keys])
    return keys


def states(store: Store, iteration: int) -> dict[State, int]:
    return store.samples.counts(iteration)


def test_an_iteration_is_marked_in_slices_also_after_a_death_in_the_middle(tmp_path: Path) -> None:
    store = Store(tmp_path)
    scored(store, 1)
    assert not store.samples.advance(1, State.IN_BATCH, 3)
    assert states(store, 1) == {State.IN_BATCH: 3, State.SCORED: 7}
    with pytest.raises(StoreError, match="7 are scored"):
        store.samples.advance(1, State.TRAINED)
    store.close()  # the coordinator dies here, and comes back
    store = Store(tmp_path)
    assert len(store.samples.experience(1)) == 10
    steps = 0
    while not store.samples.advance(1, State.IN_BATCH, 3):
        steps += 1
    assert (steps, states(store, 1)) == (2, {State.IN_BATCH: 10})
    assert store.samples.advance(1, State.IN_BATCH, 3)
    assert store.samples.advance(1, State.TRAINED)
    assert states(store, 1) == {State.TRAINED: 10}
    store.close()


def test_old_iterations_are_deleted_in_slices(store: Store) -> None:
    for iteration in (1, 2, 3):
        store.samples.add_rewards("f", dict.fromkeys(scored(store, iteration), 1.0))
    steps = 1
    while not store.samples.forget_before(3, 6):
        assert store.samples.counts(3) == {State.SCORED: 10}
        steps += 1
    assert steps == 4
    assert store.samples.counts(1) == store.samples.counts(2) == store.samples.rewards(2) == {}
    assert len(store.samples.rewards(3)) == 10
    assert store.samples.forget_before(3)


def test_the_loop_goes_on_between_slices() -> None:
    turns: list[str] = []

    def change(rows: int) -> bool:
        assert rows == AT_ONCE
        turns.append("slice")
        return turns.count("slice") == 3

    async def other() -> None:
        while turns.count("slice") < 3:
            turns.append("other")
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(in_slices(change), other())

    asyncio.run(main())
    assert turns == ["slice", "other", "slice", "other", "slice"]


def in_thread(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await asyncio.to_thread(function)

    return asyncio.run(main())


def test_another_thread_reads_what_was_committed_and_changes_nothing(store: Store) -> None:
    scored(store, 1)
    here = store.samples.experience(1)
    there = in_thread(lambda: store.samples.experience(1))
    assert [(s.key, s.tokens.tolist(), s.reward) for s in there] == [(s.key, s.tokens.tolist(), s.reward) for s in here]
    with store._db.transaction():
        store.samples.advance(1, State.IN_BATCH)
        assert in_thread(lambda: store.samples.counts(1)) == {State.SCORED: 10}
    assert in_thread(lambda: store.samples.counts(1)) == {State.IN_BATCH: 10}
    with pytest.raises(StoreError):
        in_thread(lambda: store.samples.advance(1, State.TRAINED))
    assert states(store, 1) == {State.IN_BATCH: 10}


class Tokenizer:
    """Its texts are digits. `threads`: where they were made."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def decode(self, tokens: list[int], **_: Any) -> str:
        self.threads.add(threading.get_ident())
        return "".join(map(str, tokens))


@pytest.mark.parametrize(("length", "elsewhere"), [(FEW_TOKENS, False), (FEW_TOKENS + 1, True)])
def test_long_texts_are_decoded_in_another_thread_in_the_order_in_which_they_are_asked_for(
    length: int, elsewhere: bool
) -> None:
    tokenizer, done = Tokenizer(), list[str]()

    async def main() -> None:
        texts = Texts(tokenizer)

        async def one(number: int) -> None:
            done.append((await texts.later(np.full(length, number, np.int32))).text)

        await asyncio.gather(*(one(number) for number in range(9)))
        texts.close()

    asyncio.run(main())
    assert done == [str(number) * length for number in range(9)]
    assert (threading.get_ident() not in tokenizer.threads) == elsewhere


def test_an_experience_with_steps_is_made_in_another_thread_with_the_same_bits(store: Store) -> None:
    tokenizer = Tokenizer()
    keys = scored(store, 1)
    store.samples.add_rewards("f", dict.fromkeys(keys, 1.0), {key: [(1, 0.5), (2, -1.0)] for key in keys})
    calls: Any = SimpleNamespace(functions=[SimpleNamespace(title="f", weight=2.0)])
    assembly = ExperienceAssembly(store, Texts(tokenizer), 0, calls, False)
    prompts = [PromptRecord(i, f"prompt {i}", [7], {}) for i in range(PROMPTS)]
    here = assembly.experience(1, 0, prompts)
    tokenizer.threads.clear()

    maker = ExperienceMaker.__new__(ExperienceMaker)
    maker._assembly = assembly
    maker._spec = SimpleNamespace(  # type: ignore[assignment]
        ppo=SimpleNamespace(weight_version=lambda iteration: 0, ptx_coef=0.0)
    )
    there = asyncio.run(maker.experience(IterationPrompts(1, prompts, store, lambda *_: [])))
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads
    assert there.responses == here.responses == [f"{1 + key.prompt}{key.sample}" for key in keys]
    assert there.arrays.keys() == here.arrays.keys() >= {"step_rewards", "step_ends"}
    assert all(there.arrays[name].tobytes() == here.arrays[name].tobytes() for name in here.arrays)
    with pytest.raises(StoreError, match="of weight version 0, not 4"):
        assembly.experience(1, 4, prompts)


def test_samples_with_new_tokens_are_stored_in_slices(store: Store) -> None:
    """A sample that must go elsewhere does so when its own tokens are stored."""
    reasons = ["stop", "length", "abort", "stop", None]
    store.samples.begin_iteration(1, [NewSample(0, s, [7], s) for s in range(5)])
    keys = [Key(1, 0, s) for s in range(5)]
    attempts = store.samples.assign([Assignment(key, "r", "i", 0, 0) for key in keys])
    fleet = Fleet(lambda: 0.0, lambda *_, **__: None)
    flying = InFlight(store, fleet, lambda *_, **__: None, lambda: 0.0, GenerationSettings(), Speeds())
    for key, attempt, reason in zip(keys, attempts, reasons, strict=True):
        tokens, logprobs = array("i", [1, 2]), array("f", [0, 0])
        work = Work(key, array("i", [7]), 0, tokens, logprobs, 0, 99, attempt, "r", "i", reason=reason)
        flying.begin(work, 0.0, 0.0)
        if reason is None:
            flying.changed(work, 0.0)
        else:
            flying.ended(work)
    for finished, elsewhere, left in (([0, 1], [], True), ([3], [2], True), ([], [], False)):
        assert [work.key.sample for work in flying.flush(2)] == finished
        assert flying.late == left
        assert [work.key.sample for work in flying.sort_out()] == elsewhere
    assert len(flying) == 1
    found = store.samples.samples(1)
    assert [sample.state for sample in found] == [
        State.GENERATED,
        State.GENERATED,
        State.PENDING,
        State.GENERATED,
        State.GENERATING,
    ]
    assert [sample.tokens.tolist() for sample in found] == [[1, 2]] * 5


@pytest.mark.parametrize("part", ["flush", "sort_out", "counts"])
def test_a_turn_of_drawing_costs_what_changed_and_not_what_is_in_flight(store: Store, part: str) -> None:
    """Counts the calls of a turn in which one sample of many has a new token."""

    def calls(samples: int, iteration: int) -> int:
        store.samples.begin_iteration(iteration, [NewSample(s, 0, [7], s) for s in range(samples)])
        keys = [Key(iteration, s, 0) for s in range(samples)]
        attempts = store.samples.assign([Assignment(key, "r", "i", 0, 0) for key in keys])
        fleet = Fleet(lambda: 0.0, lambda *_, **__: None)
        flying = InFlight(store, fleet, lambda *_, **__: None, lambda: 0.0, GenerationSettings(), Speeds())
        for key, attempt in zip(keys, attempts, strict=True):
            work = Work(key, array("i", [7]), 0, array("i"), array("f"), 0, 99, attempt, "r", "i")
            flying.begin(work, 0.0, 0.0)
        work.tokens.append(5)
        work.logprobs.append(-1.0)
        flying.changed(work, 0.0)
        found = 0

        def count(*_: object) -> None:
            nonlocal found
            found += 1

        sys.setprofile(count)
        try:
            {"flush": flying.flush, "sort_out": flying.sort_out, "counts": lambda: flying.counts}[part]()
        finally:
            sys.setprofile(None)
        if part == "flush":
            assert [len(s.tokens) for s in store.samples.samples(iteration)] == [0] * (samples - 1) + [1]
        return found

    assert calls(1000, 2) == calls(10, 1)
