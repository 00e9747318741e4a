"""In whatever order samples grow and finish, and scorers answer, fail, leave, die and come back: each sample is scored
exactly once, whole."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Key
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.wire import pack, unpack
from helpers.coordinated import ScorerPool

SAMPLES, SCORERS, PROMPT = 2, 2, 3
NAMES = [f"s{i}" for i in range(SCORERS)]


class Question:
    """A request that a scorer has not answered yet. It is what `session.post` returns."""

    def __init__(self, url: str, data: bytes) -> None:
        self.process, self.route = url.removeprefix("http://").split("/v1/")
        self.lengths: list[int] = unpack(data)["response_lengths"].tolist()
        self.answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.status = 0

    def answer(self, how: str) -> None:
        if how == "breaks":
            self.answered.set_exception(aiohttp.ClientError("broken"))
        elif how == "fails":
            self.answered.set_result((500, b"broken"))
        elif self.route == "begin":
            held = [0 if how == "keeps nothing" else n - 1 for n in self.lengths]
            self.answered.set_result((200, json.dumps({"held": held}).encode()))
        else:
            self.answered.set_result((200, pack({"scores": np.asarray(self.lengths, np.float32)})))

    async def __aenter__(self) -> Question:
        self.status, self.body = await self.answered
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        return

    async def read(self) -> bytes:
        return self.body


class World:
    """Scorers that answer when they are told to. It is the session of `Inference`, too."""

    def __init__(self) -> None:
        self.incarnations = dict.fromkeys(NAMES, 1)
        self.allowed = set(NAMES)
        self.questions: list[Question] = []
        self.growing: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.scored: list[Scores] = []
        self.inference = Inference(
            ScorerPool(self, self.scorers, count=SCORERS, is_gone=self.gone), ["reward"], self.scored.extend
        )

    def gone(self, scorer: Scorer) -> bool:
        return scorer.incarnation != str(self.incarnations[scorer.name])

    def post(self, url: str, *, data: bytes, **_: Any) -> Question:
        self.questions.append(Question(url, data))
        return self.questions[-1]

    def process(self, name: str) -> str:
        return f"{name}-{self.incarnations[name]}"

    def scorers(self) -> list[Scorer]:
        return [Scorer(n, f"http://{self.process(n)}", str(self.incarnations[n]), 10**6) for n in sorted(self.allowed)]

    def open(self, names: Iterable[str] = NAMES) -> list[Question]:
        """What these scorers have been asked and must still answer."""
        asked = {self.process(name) for name in names}
        return [q for q in self.questions if q.process in asked and not q.answered.done()]

    def grow(self, number: int, tokens: int) -> None:
        if number not in self.finished:
            self.growing[number] = self.growing.get(number, 0) + tokens
            self.follow()

    def finish(self, number: int) -> None:
        if number not in self.finished:
            tokens = self.finished[number] = self.growing.pop(number, 0) + 1
            response = np.ones(tokens, np.int32)
            self.inference.add([Finished(Key(1, number, 0), np.full(PROMPT, number, np.int32), response)])
            self.follow()

    def follow(self) -> None:
        found = [Growing(Key(1, i, 0), [i] * PROMPT, [1] * n) for i, n in self.growing.items()]
        self.inference.follow(len(found), lambda: found)

    async def step(self, what: str, number: int, tokens: int) -> None:
        """One thing happens to a sample, to a scorer or to a request. "look": a sample grows, and all is answered."""
        name = NAMES[number % SCORERS]
        if what in ("grow", "look"):
            self.grow(number, tokens)
            await self.settle()
            for question in self.open() if what == "look" else ():
                question.answer("answers")
        elif what == "finish":
            self.finish(number)
        elif what == "leave":
            self.allowed.discard(name)
        elif what == "return":
            self.allowed.add(name)
        elif what == "restart":
            self.incarnations[name] += 1
        elif what == "die":
            for question in self.open([name]):
                question.answer("breaks")
            self.incarnations[name] += 1
            self.allowed.discard(name)
        elif asked := self.open():
            asked[number % len(asked)].answer(what)
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no answer."""
        self.inference.poke()
        for _ in range(12):
            await asyncio.sleep(0)

    async def to_the_end(self) -> None:
        """All samples finish, and healthy scorers answer."""
        self.allowed = set(NAMES)
        for number in range(SAMPLES):
            self.finish(number)
        end = asyncio.create_task(self.inference.finish(1e6))
        for _ in range(6 * SAMPLES):
            await self.settle()
            for question in self.open():
                question.answer("answers")
        await self.settle()
        assert end.done(), f"scored {sorted(s.key.prompt for s in self.scored)} only"
        await end


KINDS = ["look", "grow", "finish", "fails", "keeps nothing", "answers", "die", "leave", "return", "restart"]
STEPS = st.tuples(
    st.sampled_from(KINDS), st.integers(0, SAMPLES - 1), st.sampled_from([RESPONSE_BLOCK + 1, 1, 2 * RESPONSE_BLOCK])
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=8, max_size=30))
def test_each_sample_is_scored_exactly_once(steps: list[tuple[str, int, int]]) -> None:
    async def main() -> World:
        world = World()
        async with world.inference:
            for step in steps:
                await world.step(*step)
            await world.to_the_end()
        return world

    world = asyncio.run(main())
    assert Counter(s.key.prompt for s in world.scored) == Counter(range(SAMPLES))
    assert {s.key.prompt: s.score for s in world.scored} == {k: float(n) for k, n in world.finished.items()}


@pytest.mark.parametrize("how", ["fails", "breaks", "keeps nothing"])
def test_a_sample_that_finishes_while_its_home_looks_again_loses_that_home_and_is_scored(how: str) -> None:
    async def main() -> World:
        world = World()
        world.allowed = {"s0"}
        async with world.inference:
            for step in (("look", 1, RESPONSE_BLOCK + 1), ("grow", 1, RESPONSE_BLOCK)):
                await world.step(*step)
            assert [q.route for q in world.questions] == ["begin", "begin"]
            for step in (("finish", 1, 0), (how, 0, 0)):
                await world.step(*step)
            await world.to_the_end()
        return world

    assert sorted(s.key.prompt for s in asyncio.run(main()).scored) == list(range(SAMPLES))


def test_an_error_is_raised_although_samples_come_after_it() -> None:
    async def main() -> None:
        world = World()

        def refuse(scores: list[Scores]) -> None:
            raise ValueError("the disk is full")

        world.inference._on_scores = refuse
        async with world.inference:
            for step in (("finish", 1, 0), ("answers", 0, 0), ("answers", 1, 0), ("finish", 2, 0)):
                await world.step(*step)
            with pytest.raises(ValueError, match="the disk is full"):
                await asyncio.wait_for(world.inference.finish(900), 30)

    asyncio.run(main())
