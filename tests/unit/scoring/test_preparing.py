"""Instances are made ready side by side, and scorers load their models so: one that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.samples.scorers import Scorers
from dovetail.coordinator.samples.scoring import Scorer
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.preparing import Preparing
from dovetail.protocol.messages import ModelRef, Register
from helpers.coordinated import job_of
from helpers.fake_vllm import listen
from helpers.generation_job import until
from helpers.jobs import tiny_job
from helpers.records import Records


def of_reference(path: str) -> Any:
    """A job whose scorers hold a reference."""
    sources = SimpleNamespace(reference=lambda: ModelRef(head="lm", path=path))
    spec = tiny_job(ppo={"advantage": "grpo", "samplesPerPrompt": 2}).spec
    return job_of(Records(), spec=spec, plan=SimpleNamespace(rollouts=[]), sources=sources)


@pytest.mark.slow
def test_a_scorer_that_hangs_does_not_keep_others_from_their_models() -> None:
    hanging, asked = asyncio.Event(), []

    async def load(request: web.Request) -> web.Response:
        asked.append(request.url.port)
        if len(asked) == 1:
            await hanging.wait()
        return web.Response(text=json.dumps({}))

    async def scenario() -> None:
        fleet = Fleet(asyncio.get_running_loop().time, lambda *_, **__: None, versioned=())
        app = web.Application()
        app.add_routes([web.post("/v1/load", load)])
        runner, url = await listen(app)

        def come(name: str) -> None:
            fleet.register(
                Register(name=name, kind="scorer", group="r", url=url, incarnation="1", ready=True, abilities={})
            )

        come("r-0-scorer")
        folders = ModelFolders(Path("/run"), {}, Records())
        async with aiohttp.ClientSession() as session:
            models = Scorers(of_reference("x"), fleet, session, folders, False)

            async def hold() -> None:
                while True:
                    await models.load_all()
                    await asyncio.sleep(0)

            holding = asyncio.create_task(hold())
            await until(lambda: bool(asked))
            come("r-1-scorer")
            await until(lambda: models.has_loaded("r-1-scorer", "1"))
            assert not models.has_loaded("r-0-scorer", "1")
            hanging.set()
            await until(lambda: models.has_loaded("r-0-scorer", "1"))
            assert len(asked) == 2, "nobody is asked twice"
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await models.close()
        await runner.cleanup()

    asyncio.run(scenario())


def test_a_scorer_that_comes_back_gets_no_model_that_has_changed(tmp_path: Path) -> None:
    """One scorer of two is started again after somebody has trained the reference further, in its folder."""
    folder, loaded = tmp_path / "reference", []
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")

    async def load(request: web.Request) -> web.Response:
        loaded.append((await request.json())["models"]["reference"]["path"])
        return web.Response(text=json.dumps({}))

    async def scenario() -> None:
        fleet = Fleet(asyncio.get_running_loop().time, lambda *_, **__: None, versioned=())
        app = web.Application()
        app.add_routes([web.post("/v1/load", load)])
        runner, url = await listen(app)

        async def loads(models: Scorers, incarnation: str) -> None:
            facts = {"name": "r-scorer", "group": "r", "url": url, "incarnation": incarnation, "ready": True}
            fleet.register(Register.model_validate({**facts, "kind": "scorer", "abilities": {}}))
            while not models.has_loaded("r-scorer", incarnation):
                await models.load_all()

        async with aiohttp.ClientSession() as session:
            folders = ModelFolders(tmp_path / "run", {"reference": folder}, Records())
            models = Scorers(of_reference(str(folder)), fleet, session, folders, False)
            await loads(models, "1")
            (folder / "model.safetensors").write_bytes(b"trained")
            with pytest.raises(DataError, match=r"spec\.models\.reference: .*/model\.safetensors has changed since"):
                await loads(models, "2")
            await models.close()
        await runner.cleanup()

    asyncio.run(scenario())
    assert loaded == [str(folder)]


def test_what_takes_long_is_asked_for_again_and_not_begun_again() -> None:
    begun: list[str] = []
    gates: dict[str, asyncio.Event] = {}

    async def prepare(scorer: Scorer) -> None:
        begun.append(scorer.name)
        await gates[scorer.name].wait()
        if scorer.name == "bad":
            raise OSError("no room")

    async def scenario() -> Any:
        gates.update({name: asyncio.Event() for name in ("good", "bad", "slow")})
        gates["good"].set()
        preparing: Preparing[Scorer] = Preparing(prepare)
        good, bad, slow = (Scorer(name, "http://x", "1") for name in ("good", "bad", "slow"))
        assert await preparing.ready([good, bad, slow], 0.01) == ([good], [])
        assert [preparing.running(s) for s in (good, bad, slow)] == [False, True, True]
        gates["bad"].set()
        assert await preparing.ready([bad], 1.0) == ([], [(bad, "no room")])
        assert await preparing.ready([good], 1.0) == ([good], [])
        assert begun == ["good", "bad", "slow", "good"], "who was ready may be asleep again"
        assert not preparing.running(Scorer("slow", "http://x", "2")), "this is another process"
        await preparing.close()
        assert not preparing.active

    asyncio.run(scenario())


def test_a_failure_while_another_is_waited_for_is_not_lost() -> None:
    """Else one that fails would be begun again, and never counted as failed."""
    begun: list[str] = []

    async def prepare(scorer: Scorer) -> None:
        begun.append(scorer.name)
        if scorer.name == "bad":
            await asyncio.sleep(0.02)
            raise OSError("no room")
        await asyncio.Event().wait()

    async def scenario() -> None:
        preparing: Preparing[Scorer] = Preparing(prepare)
        bad, slow = Scorer("bad", "http://x", "1"), Scorer("slow", "http://x", "1")
        assert await preparing.ready([bad], 0.0) == ([], [])
        assert await preparing.ready([slow], 0.2) == ([], [])
        assert await preparing.ready([bad], 0.0) == ([], [(bad, "no room")])
        assert begun == ["bad", "slow"]
        assert await preparing.ready([bad], 0.0) == ([], [])
        assert begun == ["bad", "slow", "bad"], "what was told is over"
        await preparing.close()

    asyncio.run(scenario())
