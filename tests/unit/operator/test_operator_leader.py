"""The lease: a replica that cannot renew it stops its work before another one may take it."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client

from dovetail.operator.cluster import leader
from helpers.patience import PATIENCE

LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/dovetail-leader"
CLAIM = "/apis/coordination.k8s.io/v1/namespaces/default/leases/dovetail-all-namespaces"


class Server:
    """An API server with one Lease. `hangs`: it takes requests, and does not answer. `there`: whether it has the
    Lease. `refuses`: the methods that it answers with 403."""

    def __init__(self, there=True, refuses=()):
        self.hangs = False
        self.refuses = refuses
        self.asked = []
        self.there = there
        self.version = 1
        self.spec = {}

    async def answer(self, request):
        self.asked.append(request.method)
        if self.hangs:
            await asyncio.sleep(600)
        if request.method in self.refuses:
            return web.json_response({"kind": "Status", "code": 403, "reason": "Forbidden"}, status=403)
        if request.method == "GET" and not self.there:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        if request.method in ("PUT", "POST"):
            sent = await request.json()
            if request.method == "PUT" and sent["metadata"]["resourceVersion"] != str(self.version):
                return web.json_response({"kind": "Status", "code": 409, "reason": "Conflict"}, status=409)
            self.there = True
            self.spec = sent["spec"]
            self.version += 1
        metadata = {"name": "dovetail-leader", "namespace": "system", "resourceVersion": str(self.version)}
        document = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": self.spec}
        return web.json_response(document)


@pytest.fixture
def short(monkeypatch):
    for name, seconds in {"LEASE": 6, "RENEW": 4, "RETRY": 1, "ANSWER": 1.5, "MARGIN": 1}.items():
        monkeypatch.setattr(leader, f"{name}_SECONDS", seconds, raising=False)


@pytest.mark.slow
def test_a_leader_whose_renewals_hang_stops_in_time(short):
    """As where a firewall has forgotten the connection: no error comes for minutes."""

    async def test():
        server, app = Server(), web.Application()
        app.router.add_route("*", LEASE, server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        started, ended = asyncio.Event(), []

        async def work():
            started.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(time.monotonic())

        try:
            async with client.ApiClient(settings) as api:
                lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: None)
                leading = asyncio.create_task(leader.lead(lock, work))
                async with asyncio.timeout(PATIENCE):
                    await started.wait()
                    await asyncio.sleep(2.5)  # some renewals
                    renewed, server.hangs = time.monotonic(), True
                    await asyncio.wait({leading}, timeout=60)
                assert leading.done(), "it still believes that it leads"
                assert server.spec["holderIdentity"] == "one"
                return ended[0] - renewed
        finally:
            await runner.cleanup()

    assert asyncio.run(test()) < 6.0, "another replica may take the lease then"


@pytest.mark.slow
def test_a_renewal_is_one_request_and_a_failed_one_is_followed_by_a_look(monkeypatch):
    """Under load an API server takes seconds for each request. A leader that is not answered for a while leads on."""
    for name, seconds in {"LEASE": 90, "RETRY": 0.1, "ANSWER": 8}.items():
        monkeypatch.setattr(leader, f"{name}_SECONDS", seconds)

    async def test():
        server, app = Server(), web.Application()
        app.router.add_route("*", LEASE, server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await (web.TCPSite(runner, "127.0.0.1", 0)).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        answers = []

        async def until(count):
            while len(server.asked) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        try:
            async with client.ApiClient(settings) as api, asyncio.timeout(PATIENCE):
                lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: answers.append(True))
                leading = asyncio.create_task(leader.lead(lock, lambda: asyncio.sleep(600)))
                await until(4)
                assert server.asked == ["GET", "PUT", "PUT", "PUT"]
                server.hangs = True
                await until(5)
                server.hangs = False
                await until(8)
                assert server.asked[4:] == ["PUT", "GET", "PUT", "PUT"]
                assert len(answers) >= 6, "the probe of the operator's health asks for answers"
                assert not leading.done()
                server.version += 1  # somebody has edited the lease
                server.spec = server.spec | {"holderIdentity": "two"}
                await asyncio.wait({leading})
                assert server.spec["holderIdentity"] == "two"
        finally:
            await runner.cleanup()

    asyncio.run(test())


def test_the_work_has_ended_when_leading_is_cancelled(short):
    """Before the lease is given up."""

    async def test():
        server, app = Server(), web.Application()
        app.router.add_route("*", LEASE, server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await (web.TCPSite(runner, "127.0.0.1", 0)).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        started, ended = asyncio.Event(), []

        async def work():
            started.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(True)

        try:
            async with client.ApiClient(settings) as api:
                lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: None)
                leading = asyncio.create_task(leader.lead(lock, work))
                async with asyncio.timeout(PATIENCE):
                    await started.wait()
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
                return ended
        finally:
            await runner.cleanup()

    assert asyncio.run(test()) == [True]


@pytest.mark.slow
def test_a_leader_that_made_the_lease_itself_stays_leader(short):
    """As where an operator may create it, and somebody has deleted the chart's."""

    async def test():
        server, app = Server(there=False), web.Application()
        app.router.add_route("*", LEASE, server.answer)
        app.router.add_post(LEASE.rpartition("/")[0], server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await (web.TCPSite(runner, "127.0.0.1", 0)).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        started = asyncio.Event()

        async def work():
            started.set()
            await asyncio.sleep(600)

        try:
            async with client.ApiClient(settings) as api:
                lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: None)
                leading = asyncio.create_task(leader.lead(lock, work))
                async with asyncio.timeout(PATIENCE):
                    await started.wait()
                await asyncio.sleep(0.5)
                held = not leading.done()
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
                return held
        finally:
            await runner.cleanup()

    assert asyncio.run(test())


@pytest.mark.slow
@pytest.mark.parametrize("step", [3600.0, -7200.0])
def test_a_follower_whose_clock_is_set_takes_the_lease_of_a_dead_leader_when_it_is_over(short, monkeypatch, step):
    """Neither before that, as the leader may live, nor hours later."""
    clock, ahead = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + ahead)
    monkeypatch.setattr(leader, "LEASE_SECONDS", 3)

    async def test():
        nonlocal ahead
        server, app = Server(), web.Application()
        app.router.add_route("*", LEASE, server.answer)
        stamp = "2026-11-23T08:00:00.000001Z"
        server.spec = {"holderIdentity": "one", "leaseDurationSeconds": 3, "acquireTime": stamp, "renewTime": stamp}
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await (web.TCPSite(runner, "127.0.0.1", 0)).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        seen, started = asyncio.Event(), asyncio.Event()

        async def work():
            started.set()
            await asyncio.sleep(600)

        try:
            async with client.ApiClient(settings) as api:
                began = time.monotonic()
                lock = leader.Lock(leader.LEASE, "system", "two", api, seen.set)
                leading = asyncio.create_task(leader.lead(lock, work))
                async with asyncio.timeout(PATIENCE):
                    await seen.wait()
                    await asyncio.sleep(0.2)
                    ahead = step
                    await started.wait()
                took = time.monotonic() - began
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
                return took
        finally:
            await runner.cleanup()

    assert asyncio.run(test()) >= 3


@asynccontextmanager
async def served(**servers):
    """An API server with the two leases `lease` and `claim`."""
    app = web.Application()
    for name, path in {"lease": LEASE, "claim": CLAIM}.items():
        app.router.add_route("*", path, servers[name].answer)
        app.router.add_post(path.rpartition("/")[0], servers[name].answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with client.ApiClient(settings) as api, asyncio.timeout(PATIENCE):
            yield api
    finally:
        await runner.cleanup()


def test_a_standby_that_stops_leaves_the_claim_to_its_leader():
    """Both have the claim's identity. Without its claim, the leader would stop, or another release would begin."""

    async def test():
        lease, claim = Server(), Server()
        async with served(lease=lease, claim=claim) as api:
            lock, standby = (leader.Lock(leader.LEASE, "system", name, api, lambda: None) for name in ("one", "two"))
            mine, other = (leader.Claim(each, api, lambda: None) for each in (lock, standby))
            assert await leader.Election(lock).hold()
            assert await leader.Election(mine).hold()
            await other.release()
            assert claim.spec["holderIdentity"] == "system"
            await mine.release()
            assert claim.spec.get("holderIdentity") is None, "the next release may have it at once"
            assert lease.spec["holderIdentity"] == "one"

    asyncio.run(test())


@pytest.mark.parametrize(
    "claim",
    [Server(refuses=["GET"]), Server(refuses=["PUT"]), Server(there=False, refuses=["POST"])],
    ids=["no right to read it", "no right to write it", "it is missing"],
)
def test_a_claim_that_cannot_be_had_ends_the_operator_with_a_sentence(monkeypatch, claim):
    """As after an upgrade with `rbac.create: false`. The replica would do nothing, and be ready."""
    monkeypatch.setattr(leader, "LEASE_SECONDS", 0)

    async def test():
        async with served(lease=Server(), claim=claim) as api:
            lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: None)
            mine = leader.Claim(lock, api, lambda: None)
            try:
                await leader.lead(mine, lambda: asyncio.sleep(600))
            finally:
                await mine.release()

    with pytest.raises(leader.NoClaim) as told:
        asyncio.run(test())
    for word in ("dovetail-all-namespaces", "namespace default", "`get` and `update`", "upgrade the release"):
        assert word in str(told.value)


def test_a_claim_that_is_made_or_granted_a_little_late_is_waited_for(monkeypatch):
    """Helm makes Leases last, and API servers learn of new rights after a while."""
    monkeypatch.setattr(leader, "RETRY_SECONDS", 0.01)

    async def test():
        claim = Server(refuses=["GET", "PUT"])
        async with served(lease=Server(), claim=claim) as api:
            lock = leader.Lock(leader.LEASE, "system", "one", api, lambda: None)
            winning = asyncio.create_task(leader.Election(leader.Claim(lock, api, lambda: None)).win())
            while len(claim.asked) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            claim.refuses = ()
            await winning
            assert claim.spec["holderIdentity"] == "system"

    asyncio.run(test())
