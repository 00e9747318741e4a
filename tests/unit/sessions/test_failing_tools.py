"""Tools that fail as infrastructure does, in an iteration of episodes: what they fail is in no baseline."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.sessions import http_environment
from dovetail.coordinator.sessions.http_environment import HttpEnvironment
from dovetail.coordinator.store.episodes import episode_facts
from dovetail.coordinator.store.experience_files import episode_arrays, experience_arrays
from dovetail.coordinator.store.samples import Key, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.protocol.wire import LEARNT
from helpers.episode_life import Life, World
from helpers.example_server import example

pytestmark = pytest.mark.slow

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# What the second call of an episode's meets. The effect may have happened or not.
FAULTS = {
    Key(1, 0, 1): "500 before",
    Key(1, 1, 0): "500 after",
    Key(1, 2, 1): "hangs before",
    Key(1, 3, 0): "hangs after",
    Key(1, 4, 0): "drops after",
    Key(1, 5, 1): "drops after, and it cannot say",
}
# Where nobody can say what became of the call, or it never was.
LOST = {key for key, fault in FAULTS.items() if "before" in fault or "cannot say" in fault}


def middleware() -> Any:
    """The faults of `FAULTS`. They last, but a connection drops once."""
    dropped = set[Key]()

    @web.middleware
    async def faulty(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/v1/step":
            asked = await request.json()
            _, iteration, prompt, sample, _, turn, _ = asked["key"].split("-")
            key = Key(int(iteration), int(prompt), int(sample))
            fault = FAULTS.get(key, "") if int(turn) == 1 else ""
        elif request.path.startswith("/v1/steps/"):
            _, iteration, prompt, sample, *_ = request.path.rpartition("/")[2].split("-")
            key = Key(int(iteration), int(prompt), int(sample))
            return web.Response(status=501) if "cannot say" in FAULTS.get(key, "") else await handler(request)
        else:
            fault, key = "", Key(0, 0, 0)
        answer = await handler(request) if not fault or "after" in fault else web.Response(status=500)
        if fault.startswith("500"):
            return web.Response(status=500, text="the shop is closed")
        if fault.startswith("hangs"):
            await asyncio.sleep(3600)
        if fault.startswith("drops") and key not in dropped:
            dropped.add(key)
            assert request.transport is not None
            request.transport.abort()
        return answer

    return faulty


def test_what_infrastructure_fails_is_in_no_baseline_and_every_discard_has_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_environment, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(http_environment, "TRIES", 2)
    life, log = Life(tmp_path / "run", World(), maxTurns=20, effects="AtMostOnce"), tmp_path / "log"
    life.prompts = 6

    async def main() -> Generated:
        module = example()
        app = module.app(module.Games(log))
        app.middlewares.append(middleware())
        async with TestServer(app) as server:
            environment = HttpEnvironment(str(server.make_url("/")), "run", 3.0)
            life.environment = lambda: environment
            try:
                return await life.run()
            finally:
                await environment.close()

    asyncio.run(main())
    gone = {key: ended for key, ended in life.ended.items() if ended.discarded}
    assert set(gone) == LOST
    assert {ended.ending for ended in gone.values()} == {"environment failed"}
    for key, ended in gone.items():
        says = {"500": "answered 500", "hangs": "gave no answer within 3 s", "drops": "lost its connection"}
        assert says[FAULTS[key].split()[0]] in ended.why
        assert ended.messages[-1]["tool_calls"], "how far it came is kept, with the call that failed"
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    effects = Counter(row["key"] for row in rows if "key" in row)
    assert set(effects.values()) == {1}, "each call has its effect once"
    # A baseline of the others' rewards, as the trainers get it.
    store = Store(tmp_path / "run")
    try:
        for sample in store.samples.samples(1, State.GENERATED):
            store.samples.score([ScoreRow(sample.key, None, None, life.ended[sample.key].reward or 0.0)])
        samples = store.samples.experience(1)
    finally:
        store.close()
    arrays = experience_arrays(samples, 0)
    arrays |= episode_arrays(samples, life.ended, compares=True)
    for row, sample in enumerate(samples):
        alone = any(key.prompt == sample.key.prompt for key in LOST)
        assert (arrays["learnt"][row] == LEARNT).any() == (not alone), sample.key
        if sample.key in LOST:
            assert np.sum(arrays["groups"] == arrays["groups"][row]) == 1
    facts = episode_facts(life.ended, compares=True)
    assert facts["episodes_discarded"] == facts["discarded/environment_failed"] == pytest.approx(len(LOST) / 12)
