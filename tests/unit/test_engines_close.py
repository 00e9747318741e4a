"""The end of a coordinator whose trainers wait for a command, as they do at the end of every job."""

from __future__ import annotations

import asyncio

import aiohttp

from dovetail.api.messages import JoinRequest
from dovetail.coordinator.engines import Engines, Settings
from dovetail.coordinator.trainer_group import POLL_SECONDS
from dovetail.planner.simple import make_plan
from dovetail.trainer.loop import free_port
from helpers.jobs import tiny_job


def test_a_waiting_trainer_does_not_hold_up_the_end(tmp_path):
    spec = tiny_job().spec
    settings = Settings(tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)
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
        (end,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(end, aiohttp.ClientError), "the trainer notices, and asks again"

    asyncio.run(test())
