"""How the operator asks coordinators: beside its work, each at its own pace, a silent one at nobody's cost."""

import asyncio
import contextlib
import itertools

import aiohttp
from aiohttp import web

from dovetail.kube import coordinator_http, names
from dovetail.operator.cluster import coordinator_poller as coordinators
from dovetail.operator.cluster.coordinator_poller import CoordinatorPoller
from dovetail.operator.reconcile.children import Children
from dovetail.protocol.process.process_names import COORDINATOR
from helpers.patience import PATIENCE

KEY = ("default", "demo")


def children(address, phase="Running"):
    labels = {names.JOB_LABEL: "demo", names.ROLE_LABEL: COORDINATOR}
    pod = {"metadata": {"name": "c", "labels": labels}, "status": {"phase": phase, "podIP": address}}
    return Children({("Pod", "c"): pod})


@contextlib.asynccontextmanager
async def serving(monkeypatch, answer, seconds=0.01):
    """A coordinator on 127.0.0.1, one that follows it, and the jobs that it calls changed."""
    changed = asyncio.Queue()
    app = web.Application()
    app.router.add_get("/v1/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(coordinator_http, "COORDINATOR_PORT", runner.addresses[0][1])
    async with aiohttp.ClientSession() as session:
        follower = CoordinatorPoller(session, seconds, changed.put)
        try:
            yield follower, changed
        finally:
            await follower.close()
            await runner.cleanup()


def test_a_job_is_looked_at_again_only_when_its_coordinator_has_news(monkeypatch):
    steps, asked, often = {"step": 1}, itertools.count(1), asyncio.Event()

    async def answer(request):
        assert request.headers["Authorization"] == "Bearer secret"
        number = next(asked)
        if number % 5 == 0:
            often.set()
        return web.json_response({"stage": "sft", "total_steps": 9, "uptime": number, **steps})

    async def check():
        async with serving(monkeypatch, answer) as (follower, changed):
            assert follower.report(KEY, children("127.0.0.1"), "secret") is None, "nobody waits for the answer"
            assert await asyncio.wait_for(changed.get(), PATIENCE) == KEY
            assert follower.report(KEY, children("127.0.0.1"), "secret")["step"] == 1
            often.clear()
            await asyncio.wait_for(often.wait(), PATIENCE)
            assert changed.empty(), "answers that say the same"
            steps["step"] = 2
            await asyncio.wait_for(changed.get(), PATIENCE)
            assert follower.report(KEY, children("127.0.0.1"), "secret")["step"] == 2

    asyncio.run(check())


def test_of_many_jobs_each_is_asked_less_often(monkeypatch):
    real = asyncio.sleep

    async def answer(_):
        return web.json_response({"step": 1})

    async def pause():
        slept = asyncio.get_running_loop().create_future()

        async def sleep(seconds, *result):
            if seconds >= 0.25 and not slept.done():  # else it is aiohttp's
                slept.set_result(seconds)
            return await real(seconds, *result)

        async with serving(monkeypatch, answer, seconds=0.25) as (follower, _):
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "sleep", sleep)
                follower.report(KEY, children("127.0.0.1"), "secret")
                return await asyncio.wait_for(slept, PATIENCE)

    assert asyncio.run(pause()) == 0.25
    monkeypatch.setattr(coordinators, "ASKS_PER_SECOND", 0.5)
    assert asyncio.run(pause()) == 2.0


def test_what_cannot_be_read_is_no_answer(monkeypatch):
    replies = iter([web.Response(text="[1]", content_type="application/json"), web.Response(text="{"), None])
    done = asyncio.Event()

    async def answer(_):
        reply = next(replies, None)
        if reply is None:
            done.set()
            return web.json_response({"stage": "sft", "step": "many"})
        return reply

    async def check():
        async with serving(monkeypatch, answer) as (follower, changed):
            follower.report(KEY, children("127.0.0.1"), "secret")
            await asyncio.wait_for(done.wait(), PATIENCE)
            assert follower.report(KEY, children("127.0.0.1"), "secret") is None
            assert changed.empty()

    asyncio.run(check())


def test_a_coordinator_without_a_running_pod_is_asked_no_more(monkeypatch):
    async def answer(_):
        return web.json_response({"stage": "sft", "step": 1})

    async def check():
        async with serving(monkeypatch, answer) as (follower, changed):
            follower.report(KEY, children("127.0.0.1"), "secret")
            await asyncio.wait_for(changed.get(), PATIENCE)
            assert follower.report(KEY, children("127.0.0.1", "Failed"), "secret") is None
            assert follower.report(KEY, children("127.0.0.1"), "secret") is None, "asked anew"
            await asyncio.wait_for(changed.get(), PATIENCE)

    asyncio.run(check())
