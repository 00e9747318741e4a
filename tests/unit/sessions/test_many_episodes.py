"""A thousand episodes, and one that takes twenty times as long as the others, over a coordinator's own scheduling."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.sessions.effects import ToolCall
from dovetail.coordinator.store.samples import Key
from dovetail.protocol.sampling import SEED
from dovetail.protocol.wire import LEARNT
from helpers.episode_life import Begun, Life, World, forgetful, thinks, tokenizer
from helpers.generation_job import FAST
from helpers.warped_loop import run_warped

# The clock jumps, and what the test itself takes is little beside this.
TOOL_SECONDS, SLOW = 1000.0, 20
TOKEN_SECONDS = 0.2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_thousand_episodes_of_a_template_that_forgets_encode_no_token_again(tmp_path: Path) -> None:
    """What servers sampled is what is learnt, each token once, and a prompt goes on with the ids that came before."""
    life = Life(tmp_path, World(), thinks, maxTurns=20, maxConcurrent=50)
    life.prompts, life.each, life.most, life.tokenizer, life.seconds = 500, 2, 100_000, forgetful, 3000.0
    asyncio.run(life.run())
    assert {ended.ending for ended in life.ended.values()} == {"answered"}
    assert life.world.most_open == 50
    asked = [request for server in life.servers for request in server.requests]
    assert len(asked) == sum(ended.turns for ended in life.ended.values()), "each turn is drawn once"
    encode = tokenizer()
    sampled, learnt = Counter[tuple[int, bytes]](), Counter[tuple[int, bytes]]()
    for request in asked:
        seed, text = request["sampling_params"]["extra_args"][SEED], encode.decode(request["token_ids"])
        sampled[seed, np.array(encode(thinks(seed, text))["input_ids"], np.int32).tobytes()] += 1
    branches = 0
    for sample in life.found:
        ended = life.ended[sample.key]
        branches += len(ended.branches)
        for number, place in enumerate(ended.branches):
            mask = ended.learnt[place.begin if number else 0 : place.end] == LEARNT
            ids = sample.tokens[place.begin if number else 0 : place.end]
            for part, wrote in zip(*_runs(ids, mask), strict=True):
                if wrote:
                    learnt[sample.seed, part.tobytes()] += 1
    assert branches > 2 * len(life.found), "the template rewrites turns"
    assert learnt == sampled


def _runs(ids: Any, mask: Any) -> tuple[list[Any], list[bool]]:
    """The parts of a sequence that are learnt, or are not."""
    cuts = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    return np.split(ids, cuts), [bool(part[0]) for part in np.split(mask, cuts)]


class Slow(Begun):
    """A tool that takes its time. That of one episode takes SLOW times as long."""

    async def make(self, made: ToolCall) -> str:
        await asyncio.sleep(TOOL_SECONDS * (SLOW if self.sample == Key(1, 5, 1) else 1))
        return await super().make(made)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 1], ids=["room for all", "one turn at a time on each server"])
def test_one_of_sixteen_episodes_takes_twenty_times_as_long(tmp_path: Path, slots: int) -> None:
    """A tool that is waited for holds no place on a server: the iteration takes as long as its longest episode, and
    the other episodes end as if that were not there."""
    life, ends = Life(tmp_path, World(), maxTurns=20), dict[Key, float]()

    class Ended(Slow):
        async def end(self) -> None:
            ends[self.sample] = asyncio.get_running_loop().time()
            await super().end()

    life.prompts, life.each, life.slots, life.step, life.seconds = 8, 2, slots, TOKEN_SECONDS, 1e6
    life.begins, life.settings = Ended, replace(FAST, flush=100.0)

    async def timed() -> float:
        began = asyncio.get_running_loop().time()
        await life.run()
        return began

    began = run_warped(timed())
    assert {ended.ending for ended in life.ended.values()} == {"answered"}
    drawing = TOKEN_SECONDS * sum(len(s.tokens[life.ended[s.key].learnt == LEARNT]) for s in life.found)
    for sample in life.found:
        ended = life.ended[sample.key]
        slow = SLOW if sample.key == Key(1, 5, 1) else 1
        alone = ended.calls * TOOL_SECONDS * slow + TOKEN_SECONDS * int((ended.learnt == LEARNT).sum())
        # With one place on each of two servers a turn waits for those of others, but not for their tools.
        most = 1.05 * alone + (drawing / 2 if slots == 1 else 0.0)
        assert alone <= ends[sample.key] - began <= most, sample.key
