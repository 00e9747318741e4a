"""Scorers look at unfinished samples when they have nothing else to do, and finish what they have begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.samples.streams import LOOK_TOKENS, Growing, Streams
from dovetail.coordinator.store.samples import Key
from dovetail.fusion.profile import STREAMED_PER_SCORER
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.messages import Span
from dovetail.protocol.wire import pack, unpack
from helpers.coordinated import ScorerPool
from helpers.patience import PATIENCE

PROMPT = 5
LEAST = STREAMED_PER_SCORER


def growing(number: int, tokens: int) -> Growing:
    return Growing(Key(1, number, 0), [number] * PROMPT, [8] * tokens)


@given(st.lists(st.lists(st.integers(0, 90), min_size=6, max_size=6), min_size=1, max_size=12), st.integers(1, 900))
def test_a_sample_has_one_home_and_scorers_keep_within_their_room(steps: list[list[int]], room: int) -> None:
    """Six samples grow by so many tokens a step, and two scorers look at them in turn."""
    streams, lengths = Streams(), [0] * 6
    homes: dict[Key, tuple[str, str]] = {}
    seen: dict[Key, int] = {}
    for number, step in enumerate(steps):
        lengths = [n + more for n, more in zip(lengths, step, strict=True)]
        scorer = (f"s{number % 2}", "1")
        everyone = [growing(i, n) for i, n in enumerate(lengths)]
        chosen = streams.take(scorer, room, everyone, idle=2)
        homes = {key: home for key, home in homes.items() if streams.home(key) is not None}
        for each in chosen:
            assert homes.setdefault(each.key, scorer) == scorer
            assert seen.get(each.key, 0) < each.blocks or streams.home(each.key) is None
            assert each.blocks < len(each.response)
            streams.held(scorer, each.key, PROMPT, each.blocks)
            seen[each.key] = each.blocks
            assert streams.seen(each.key) == PROMPT + each.blocks
        mine = [key for key, home in homes.items() if home == scorer]
        assert sum(streams.seen(key) for key in mine) <= room
    before = {key for key in homes if streams.home(key) is not None}
    streams.stay({("s0", "1")})
    lost = {key for key in before if streams.home(key) is None}
    assert lost == {key for key in before if homes[key] == ("s1", "1")}
    assert not any(streams.home(growing(i, 0).key) == ("s1", "1") for i in range(6))


def test_a_look_is_as_long_as_a_batch_and_leaves_some_for_other_scorers() -> None:
    streams = Streams()
    many = [growing(i, RESPONSE_BLOCK + i) for i in range(2, 11)]
    chosen = streams.take(("s0", ""), 10**6, many, idle=3)
    # A third of them, the longest.
    assert [each.key.prompt for each in chosen] == [10, 9, 8]
    assert sum(len(each.prompt) + each.blocks for each in chosen) <= LOOK_TOKENS
    more = [growing(i, 2 * RESPONSE_BLOCK + 9) for i in range(30, 36)]
    assert len(streams.take(("s2", ""), 10**6, more, idle=1)) == 1
    long = [growing(i, 9 * RESPONSE_BLOCK) for i in (20, 21)]
    assert [each.key.prompt for each in streams.take(("s1", ""), 10**6, long, idle=1)] == [20]


class RemembersPrefixes:
    """A scorer's routes. `slow`: an answer waits for it. `held`: by prompt, response tokens that it has seen."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.looks: list[dict[int, int]] = []
        self.scored: list[dict[int, int]] = []
        self.fail = False
        self.url = ""

    def _read(self, arrays: dict[str, np.ndarray]) -> list[tuple[bytes, int, int]]:
        prompts, responses = arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
        assert set(prompts) == {PROMPT}
        rows = zip(arrays["tokens"], responses, strict=True)
        return [(row[:PROMPT].tobytes(), int(row[0]), n) for row, n in rows]

    async def begin(self, request: web.Request) -> web.Response:
        if self.fail:
            return web.Response(status=500, text="broken")
        found = self._read(unpack(await request.read()))
        self.looks.append({number: n for _, number, n in found})
        self.held.update((key, n - 1) for key, _, n in found)
        return web.json_response({"held": [n - 1 for _, _, n in found]})

    async def score(self, request: web.Request) -> web.Response:
        arrays = unpack(await request.read())
        self.scored.append({number: n - self.held.pop(key, 0) for key, number, n in self._read(arrays)})
        lengths = arrays["response_lengths"]
        full = np.ones((len(lengths), int(lengths.max())), np.float32)
        return web.Response(body=pack({"scores": lengths.astype(np.float32), "ref_logprobs": full, "values": full}))


class World:
    def __init__(self, inference: Inference, scorers: list[RemembersPrefixes], names: list[Scorer]) -> None:
        self.inference, self.fakes, self.names = inference, scorers, names
        self.allowed = list(names)
        self.found: dict[Key, Scores] = {}
        self.spans: list[Span] = []

    def grow(self, lengths: dict[int, int]) -> None:
        self.inference.follow(len(lengths), lambda: [growing(i, n) for i, n in lengths.items()])
        self.inference.poke()

    def finish(self, number: int, tokens: int) -> None:
        done = Finished(Key(1, number, 0), np.full(PROMPT, number, np.int32), np.full(tokens, 8, np.int32))
        self.inference.add([done])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - scorers know nothing of the test
                await asyncio.sleep(0.01)


def play(scenario: Callable[[World], Coroutine[Any, Any, None]], count: int = 2, room: int = 10**6) -> World:
    worlds: list[World] = []

    async def main() -> None:
        fakes = [RemembersPrefixes() for _ in range(count)]
        runners, names = [], []
        for index, fake in enumerate(fakes):
            app = web.Application()
            app.add_routes([web.post("/v1/begin", fake.begin), web.post("/v1/score", fake.score)])
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            names.append(Scorer(f"s{index}", f"http://127.0.0.1:{runner.addresses[0][1]}", "1", room))
            runners.append(runner)
        try:
            async with aiohttp.ClientSession() as session:
                inference = Inference(
                    ScorerPool(
                        session, lambda: world.allowed, lambda scorer, reason: world.allowed.remove(scorer), count
                    ),
                    ["reference", "reward", "critic"],
                    lambda scores: world.found.update((s.key, s) for s in scores),
                    lambda span: world.spans.append(span),
                )
                world = World(inference, fakes, names)
                worlds.append(world)
                async with inference:
                    await scenario(world)
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(main())
    return worlds[0]


def test_what_a_scorer_has_seen_is_left_out_when_the_sample_is_finished() -> None:
    async def scenario(world: World) -> None:
        world.grow({1: RESPONSE_BLOCK, 2: 3})
        world.grow({1: RESPONSE_BLOCK + 1, 2: 3})
        await world.until(lambda: any(fake.looks for fake in world.fakes))
        world.grow({1: 2 * RESPONSE_BLOCK + 30, 2: 30})
        await world.until(lambda: sum(len(fake.looks) for fake in world.fakes) == 2)
        world.finish(2, 40)
        world.finish(1, 2 * RESPONSE_BLOCK + 40)
        await world.inference.finish(20)

    world = play(scenario)
    (home,) = [fake for fake in world.fakes if fake.looks]
    # The first token of a new block has come each time; the second sample never had one.
    assert home.looks == [{1: RESPONSE_BLOCK + 1}, {1: 2 * RESPONSE_BLOCK + 1}]
    assert {number: n for fake in world.fakes for one in fake.scored for number, n in one.items()} == {1: 40, 2: 40}
    assert {k.prompt: s.score for k, s in world.found.items()} == {1: 2.0 * RESPONSE_BLOCK + 40, 2: 40.0}
    # The simulator learns from the tokens that were computed.
    assert sum(span.args["tokens"] for span in world.spans) == 2 * PROMPT + 2 * RESPONSE_BLOCK + 40 + 40


@pytest.mark.parametrize("why", ["fails", "leaves", "restarts"])
def test_a_sample_that_lost_its_home_is_scored_whole_by_another(why: str) -> None:
    async def scenario(world: World) -> None:
        world.grow({1: RESPONSE_BLOCK + 5})
        await world.until(lambda: any(fake.looks for fake in world.fakes))
        at = next(index for index, fake in enumerate(world.fakes) if fake.looks)
        if why == "fails":
            world.fakes[at].fail = True
            world.grow({1: 2 * RESPONSE_BLOCK + 5})
            await world.until(lambda: len(world.allowed) == 1)
        elif why == "leaves":
            del world.allowed[at]
        else:
            name = world.names[at]
            world.allowed = [Scorer(name.name, name.url, "2", name.room)]
            world.fakes[at].held.clear()
        world.finish(1, 2 * RESPONSE_BLOCK + 9)
        await world.inference.finish(20)

    world = play(scenario)
    assert {k.prompt: s.score for k, s in world.found.items()} == {1: 2.0 * RESPONSE_BLOCK + 9}
    assert [one for fake in world.fakes for one in fake.scored] == [{1: 2 * RESPONSE_BLOCK + 9}]


@pytest.mark.parametrize(("room", "count"), [(0, 1), (10**6, 2 * LEAST + 1)])
def test_nobody_looks_without_room_or_before_the_tail(room: int, count: int) -> None:
    async def scenario(world: World) -> None:
        world.grow(dict.fromkeys(range(count), RESPONSE_BLOCK + 1))
        world.finish(77, 3)
        await world.inference.finish(20)

    assert not any(fake.looks for fake in play(scenario, room=room).fakes)


def test_the_longest_come_first_be_they_finished_or_not() -> None:
    order: list[str] = []

    async def scenario(world: World) -> None:
        for number in (1, 2, 3):
            world.finish(number, 100 * number)
        world.grow({8: 4 * RESPONSE_BLOCK + 1, 9: RESPONSE_BLOCK + 1})
        await world.inference.finish(20)
        await world.until(lambda: len(world.fakes[0].looks) == 2)
        order.extend("look" if "unfinished" in span.args else "finished" for span in world.spans)

    (fake,) = play(scenario, count=1).fakes
    assert fake.looks == [{8: 4 * RESPONSE_BLOCK + 1}, {9: RESPONSE_BLOCK + 1}]
    assert fake.scored == [{3: 300}, {2: 200, 1: 100}]
    assert order == ["finished", "look", "finished", "look"]
