"""The real scorer process against a small coordinator: joins, scores, survives the coordinator, stops when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from dovetail.manifest.types import API_VERSION, KIND, Dtype, ScratchModel
from dovetail.protocol.messages import ModelRef, Register
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.wire import pack, unpack
from dovetail.rollout.scoring import scorer
from helpers.patience import PATIENCE

CONFIG = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 4}


class Coordinator:
    """Takes registrations with the right token; everything else is refused."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[Register] = asyncio.Queue()
        self.failing = 1

    async def instances(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        if self.failing:
            self.failing -= 1
            return web.Response(status=503, text="starting")
        await self.seen.put(Register.model_validate_json(await request.read()))
        return web.json_response({})


def environment(tmp_path: Path, coordinator: str, port: int = 0) -> dict[str, str]:
    env = ProcessEnv("job", "r0-scorer", tmp_path, coordinator, "secret", "127.0.0.1", port, 0, "cpu", 0, 1)
    return {**os.environ, **env.write(), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_process_joins_scores_and_stops(tmp_path: Path) -> None:
    async def run() -> None:
        coordinator = Coordinator()
        app = web.Application()
        app.add_routes([web.post("/v1/instances", coordinator.instances)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dovetail.rollout.scoring.scorer",
            "--device",
            "cpu,cpu",
            env=environment(tmp_path, address),
            stderr=subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE):
                first = await coordinator.seen.get()
                assert (first.name, first.kind, first.group) == ("r0-scorer", "scorer", "cpu")
                assert first.ready
                assert first.weight_version is None
                assert first.abilities["device"] == "cpu, cpu"
                assert (await coordinator.seen.get()).incarnation == first.incarnation
                headers = {"Authorization": "Bearer secret"}
                async with aiohttp.ClientSession(headers=headers) as session:
                    ref = ModelRef(head="lm", scratch=ScratchModel(config=CONFIG))
                    body = {"models": {"reference": ref.model_dump()}}
                    async with session.post(f"{first.url}/v1/load", json=body) as response:
                        assert response.status == 200, await response.text()
                    arrays = {
                        "tokens": np.array([[1, 2, 3, 4]], np.int32),
                        "prompt_lengths": np.array([2], np.int32),
                        "response_lengths": np.array([2], np.int32),
                    }
                    url = f"{first.url}/v1/score?want=reference"
                    async with session.post(url, data=pack(arrays)) as response:
                        assert response.status == 200
                        answer = unpack(await response.read())["ref_logprobs"]
                    assert answer.shape == (1, 2)
                    assert (answer < 0).all()
                process.send_signal(signal.SIGTERM)
                _, log = await process.communicate()
            assert process.returncode == 0
            for event in ("scorer.started", "coordinator.unreachable", "coordinator.joined", "scorer.stopped"):
                assert f'"event": "{event}"'.encode() in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await runner.cleanup()

    asyncio.run(run())


def test_settings_come_from_the_job(tmp_path: Path) -> None:
    env = ProcessEnv("job", "s", tmp_path, "http://x", "secret", "127.0.0.1", 0, 0, "v100", 0, 1)
    assert scorer.read_settings(env) == scorer.Settings(1.0, Dtype.AUTO, on_gpu=True)
    groups = [{"name": "v100", "roles": ["rollout"], "dtype": "float16"}]
    job = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "j"},
        "spec": {"groups": groups, "generation": {"temperature": 0.7, "maxTokens": 100}},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert scorer.read_settings(env) == scorer.Settings(0.7, Dtype.FLOAT16, on_gpu=False, room=612)
    # Beside a server that sleeps its weights wait in host memory: always beside trainers, else if vllmArgs say so.
    for more, shared in (
        ({"roles": ["trainer", "rollout"]}, True),
        ({"vllmArgs": ["--enable-sleep-mode"]}, True),
        ({}, False),
    ):
        groups[0] = {"name": "v100", "roles": ["rollout"], "gpu": {"product": "Tesla-V100", "perPod": 1}, **more}
        (tmp_path / "job.json").write_text(json.dumps(job))
        assert scorer.read_settings(env).shared is shared
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json"):
        scorer.read_settings(env)


def test_a_taken_port_and_a_missing_variable_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for key, value in environment(tmp_path, "http://127.0.0.1:9", taken.getsockname()[1]).items():
            monkeypatch.setenv(key, value)
        assert scorer.main(["--device", "cpu"]) == 1
    assert "address already in use" in capsys.readouterr().err
    monkeypatch.delenv("DOVETAIL_TOKEN")
    assert scorer.main([]) == 2
    assert "DOVETAIL_TOKEN" in capsys.readouterr().err
