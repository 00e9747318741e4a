"""A coordinator's start on a port that is taken, and its end: with trainers that wait for a command, as they do at the
end of every job, and by errors that a restart may mend or not."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from dovetail.coordinator import main
from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.coordinator.loop.failure import is_final
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.samples.in_flight import GenerationError
from dovetail.coordinator.workers.trainer_group import POLL_SECONDS
from dovetail.manifest.types import Output
from dovetail.operator.reconcile.progress import judged
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.messages import JoinReply, JoinRequest
from dovetail.protocol.process.endings import JOB_FAILED
from dovetail.protocol.process.env import ProcessEnv
from helpers.free_ports import free_port
from helpers.jobs import tiny_job
from helpers.patience import PATIENCE


@pytest.mark.slow
def test_a_waiting_trainer_does_not_hold_up_the_end(tmp_path):
    spec = tiny_job().spec
    settings = CoordinatorSettings(tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)
    rank = JoinRequest(
        name="trainer-0", rank=0, world_size=2, incarnation="a", host="127.0.0.1", port=1, nccl_version=None
    )

    async def wait_for_command():
        url = f"http://127.0.0.1:{settings.port}/v1/trainer/join"
        headers = {"Authorization": "Bearer secret"}
        async with aiohttp.request("POST", url, data=rank.model_dump_json(), headers=headers) as reply:
            return await reply.read()

    async def test():
        time = asyncio.get_running_loop().time
        async with Engines(spec, make_plan(spec), settings, lambda *_, **__: None) as engines:
            waiting = asyncio.create_task(wait_for_command())
            await engines.trainers._wait_change(60)
            assert 0 in engines.trainers._pending
            began = time()
        assert time() - began < POLL_SECONDS / 2
        assert JoinReply.model_validate_json(await waiting).generation is None, "the trainer asks again"

    asyncio.run(test())


@pytest.mark.slow
def test_a_port_that_is_taken_for_a_moment_is_waited_for(tmp_path):
    spec = tiny_job().spec
    said = []

    async def test():
        with socket.create_server(("127.0.0.1", 0)) as other:
            settings = CoordinatorSettings(tmp_path, "secret", "127.0.0.1", other.getsockname()[1], tmp_path)

            def log(event, **_):
                said.append(event)
                if event == "coordinator.port_taken":
                    other.close()

            async with Engines(spec, make_plan(spec), settings, log):
                pass

    asyncio.run(test())
    assert said.count("coordinator.port_taken") == 1
    assert "coordinator.ready" in said


def test_operators_take_the_status_while_the_model_before_sft_answers(tmp_path):
    """Its weights have no number that a job's status on a cluster could hold."""
    spec = tiny_job().spec
    settings = CoordinatorSettings(tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)

    async def test():
        engines = Engines(spec, make_plan(spec), settings, lambda *_, **__: None)
        for version, shown in ((BEFORE_SFT, None), (0, 0)):
            engines.fleet.publish(version)
            assert judged(engines.status())["weight_version"] == shown
        engines.records.close()

    asyncio.run(test())


def test_the_history_of_a_failed_job_is_copied_with_its_end(tmp_path):
    output = tmp_path / "published"
    spec = tiny_job().spec.model_copy(update={"output": Output(path=str(output))})
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def log(event, **fields):
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    settings = CoordinatorSettings(run_dir, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)

    async def test():
        engines = Engines(spec, make_plan(spec), settings, log)
        engines.fail("no such folder")
        await engines.copy_history()
        engines.records.close()

    asyncio.run(test())
    (copied,) = output.glob("runs/*/events.jsonl")
    assert json.loads(copied.read_text().splitlines()[-1])["event"] == "job.failed"


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConnectionError("the hub went away"), False),
        (OSError(errno.EADDRINUSE, "in use"), False),
        (KeyError("score"), False),
        (OSError(errno.ENOSPC, "no space left"), True),
        (ValueError("spec.models.actor: no such folder"), True),
        (TimeoutError("no rollout came up within 900 s"), True),
        (GenerationError("v100-0 refused 1/0/0"), True),
    ],
)
def test_only_what_a_restart_would_repeat_is_final(error, final):
    assert is_final(error) is final


def test_a_crash_of_the_coordinator_is_no_failure_of_the_job(tmp_path, monkeypatch):
    """Python's own exit code for an exception is 1: it is started again, and no summary says that the job failed."""
    environment = ProcessEnv("tiny", "coordinator", tmp_path, "", "t", "127.0.0.1", 0, 0, "", 0, 1)
    for name, value in environment.write().items():
        monkeypatch.setenv(name, value)

    def broken(error):
        async def run(env, log):
            raise error

        monkeypatch.setattr(main, "_run", run)
        return main.main([])

    assert broken(ConnectionError("the hub went away")) == 1
    assert not (tmp_path / "summary.json").exists()
    assert broken(ValueError("no such folder")) == JOB_FAILED
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == "no such folder"


SEARCHING = """
import asyncio, sys, threading
from dovetail.coordinator import main

class Engines:
    def __init__(self, *_): pass
    async def __aenter__(self): return self
    async def __aexit__(self, *_): print("closed", flush=True)
    async def guard(self, work): return await work
    async def run(self):
        print("searching", flush=True)
        await asyncio.to_thread(threading.Event().wait)

main.Engines = Engines
sys.exit(main.main([]))
"""


@pytest.mark.slow
def test_a_coordinator_that_searches_a_schedule_ends_when_it_is_told_to(tmp_path):
    """No thread of a search or a download holds it up, and its records are closed."""
    environment = ProcessEnv("tiny", "coordinator", tmp_path, "", "t", "127.0.0.1", 0, 0, "", 0, 1)
    job = tiny_job()
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text(make_plan(job.spec).model_dump_json(by_alias=True))
    with subprocess.Popen(
        [sys.executable, "-c", SEARCHING], env=os.environ | environment.write(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "searching\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        finally:
            process.kill()
        assert process.stdout.read() == "closed\n"
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["coordinator.started", "coordinator.stopped"]
