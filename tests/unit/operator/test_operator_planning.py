"""Plans that take long: they hold up no other tenant, and no plan goes to another job."""

import asyncio
import contextlib
import gc
import re
import time
import weakref

import pytest

from dovetail.kube import names
from dovetail.operator import plan_worker
from dovetail.operator.job_controller import Controller
from dovetail.operator.operator_metrics import OperatorMetrics
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner, Remembered, read_job
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.drift import Drift, look_at
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.render.context import RenderContext
from dovetail.planner.make_plan import PlanError, make_plan
from helpers.fake_cluster import manifest
from helpers.patience import PATIENCE

SECONDS = 300.0


def names_the_seed(spec):
    """A planner that takes a moment for even seeds."""
    if spec.seed % 2 == 0:
        time.sleep(1.0)
    raise PlanError(f"no plan for seed {spec.seed}")


def never(spec):
    if spec.seed != 0:
        time.sleep(600)
    return make_plan(spec)


def huge(spec):
    return make_plan(spec).model_copy(update={"warnings": ["x" * 2_000_000]})


def a_job(seed, namespace="default", name="demo"):
    document = manifest(seed=seed)
    document["metadata"] |= {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
    return document


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


@pytest.mark.slow
def test_an_answer_that_nobody_waits_for_any_more_goes_to_no_other_job():
    """A worker gives a job up after a while."""

    async def test():
        planner = Planner(SECONDS, names_the_seed)
        try:
            await planner.planned(a_job(1), Children())  # its process runs
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(planner.planned(a_job(2, name="slow"), Children()), 0.2)
            return await planner.planned(a_job(3, name="next"), Children())
        finally:
            await planner.close()

    assert run(test()).message == "no plan for seed 3"


@pytest.mark.slow
def test_a_variant_that_was_given_up_leaves_no_answer():
    async def test():
        planner = Planner(SECONDS, names_the_seed)
        try:
            await planner.planned(a_job(1), Children())
            task = asyncio.create_task(planner._ask(read_job(a_job(2)).spec))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return await planner.planned(a_job(3, name="next"), Children())
        finally:
            await planner.close()

    assert run(test()).message == "no plan for seed 3"


@pytest.mark.slow
def test_a_planner_is_closed_while_its_idle_process_ends(monkeypatch):
    """A leader that lost its lease closed it at that moment, and ended with an error that said nothing."""
    monkeypatch.setattr(plan_worker, "IDLE_SECONDS", 0.0)

    async def test():
        planner = Planner(SECONDS, names_the_seed)
        await planner.planned(a_job(1), Children())
        process = planner._process
        while planner._ending is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it waits for the process now
        await planner.close()
        return process, planner._ending

    process, ending = run(test())
    assert ending.done()
    assert ending.cancelled() or ending.exception() is None
    assert not process.is_alive()


@pytest.mark.slow
def test_namespaces_take_turns():
    async def test():
        planner, order = Planner(SECONDS, names_the_seed), []

        async def plan(document):
            order.append((await planner.planned(document, Children())).message)

        try:
            many = [asyncio.create_task(plan(a_job(2 * n, "greedy", f"job-{n}"))) for n in range(1, 6)]
            await asyncio.sleep(0.1)
            await plan(a_job(11, "modest"))
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            return order
        finally:
            await planner.close()

    assert len(run(test())) <= 2, "one plan of the other tenant may be under way"


class Slow(Planner):
    """A planner whose process answers when `go` is set. `asked`: the seeds of the specs, in order. `found`: the
    answer."""

    def __init__(self, found=None, clock=time.monotonic):
        super().__init__(SECONDS, clock=clock)
        self.go, self.asked = asyncio.Event(), []
        self.found = found or PlanRefused("PlanInfeasible", "no plan")

    async def _ask(self, spec):
        self.asked.append(spec.seed)
        await self.go.wait()
        return self.found


async def noted(key):
    return None


@pytest.mark.slow
def test_jobs_that_are_gone_are_not_planned():
    """Else whoever makes and deletes jobs fills the operator's memory, and users wait for plans of what they deleted or
    have changed since."""

    async def test():
        planner, client = Slow(), Nobody()
        controller = Controller(client, planner, client, OperatorSettings(nodes_seconds=0), OperatorMetrics())
        try:
            for n in range(20):
                document = a_job(n, name=f"job-{n}")
                document["metadata"]["resourceVersion"] = "1"
                await controller.observe(document, deleted=False)
                await controller.process(("default", f"job-{n}"))
                if n > 0:
                    await controller.observe(document, deleted=True)
                    await controller.process(("default", f"job-{n}"))
            for seed in (101, 102, 103):  # a user who improves the manifest meanwhile
                changed = a_job(seed, name="changed")
                changed["metadata"]["generation"] = seed
                await planner.planned(changed, Children())
            planner.go.set()
            await asyncio.wait_for(planner._asking, PATIENCE)
            return planner
        finally:
            await planner.close()

    planner = run(test())
    assert planner.asked == [0, 103], "the plan that was being made, and the last manifest"
    assert planner._asked == planner._waits == {}
    assert set(planner._read._kept) == {"default/job-0", "default/changed"}


@pytest.mark.slow
def test_a_spec_that_another_namespace_asked_for_takes_this_ones_turn():
    async def test():
        planner = Slow()
        planner.done = noted
        try:
            for n in range(10):
                await planner.planned(a_job(n, "greedy", f"job-{n}"), Children())
            await planner.planned(a_job(9, "modest"), Children())
            planner.go.set()
            await asyncio.wait_for(planner._asking, PATIENCE)
            return planner.asked
        finally:
            await planner.close()

    order = run(test())
    assert order.index(9) <= 2
    assert sorted(order) == list(range(10)), "each once"


def test_a_planner_that_fails_again_changes_no_status(monkeypatch):
    """It is asked again and again; each time would be two writes and an Event."""
    monkeypatch.setattr("dovetail.operator.plan_worker.PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr("dovetail.operator.status_rate.READY_SECONDS", 0.0)
    monkeypatch.setattr("dovetail.operator.status_rate.STATUS_SECONDS", 0.0)

    async def test():
        clock, client, key = [100.0], Nobody(), ("default", "demo")
        planner = Slow(PlanRefused("PlannerTimeout", "the planner found no plan within 9 s"), lambda: clock[0])
        controller = Controller(client, planner, client, OperatorSettings(nodes_seconds=0), OperatorMetrics())
        document = a_job(1)
        document["metadata"] |= {"resourceVersion": "1", "generation": 1}
        await controller.observe(document, deleted=False)
        told = []

        async def look():
            await controller.process(key)
            told.append(next(c["reason"] for c in client.statuses["demo"]["conditions"] if c["type"] == "Planned"))

        try:
            for _ in range(3):
                clock[0] += 1000
                await look()
                planner.go.set()
                await asyncio.wait_for(planner._asking, PATIENCE)
                planner.go.clear()
                await look()
            return told, planner.asked, [thing["reason"] for thing in client.made if thing["kind"] == "Event"]
        finally:
            await planner.close()

    told, asked, events = run(test())
    assert told == ["Planning", *["PlannerTimeout"] * 5]
    assert len(asked) == 3
    assert events == ["PlannerTimeout"]


@pytest.mark.slow
def test_a_large_manifest_does_not_stop_the_operator_while_the_planner_starts():
    """More than a pipe takes at once."""

    async def test():
        planner, longest = Planner(SECONDS, names_the_seed), 0.0
        document = a_job(1)
        large = {"name": "trainer", "env": [{"name": "TABLE", "value": "x" * 1_000_000}]}
        document["spec"]["groups"][0]["podTemplate"] = {"spec": {"containers": [large]}}
        started = time.monotonic()
        asking = asyncio.create_task(planner._ask(read_job(document).spec))
        try:
            while not asking.done():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)
            return (await asking).message, longest, time.monotonic() - started
        finally:
            await planner.close()

    message, longest, seconds = run(test())
    assert message == "no plan for seed 1"
    assert longest < 0.8 * seconds


@pytest.mark.slow
def test_a_plan_that_no_config_map_holds_is_refused():
    """Manifests of a few lines may have 100,000 rollouts. Their plans would fill the operator's memory."""

    async def test():
        planner = Planner(SECONDS, huge)
        try:
            return await planner.planned(a_job(1), Children())
        finally:
            await planner.close()

    refused = run(test())
    assert refused.reason == "PlanInfeasible"
    assert re.fullmatch(
        "the plan has 19.. KiB, and a ConfigMap holds 1024 KiB; give spec.groups fewer replicas", refused.message
    )


def lacks_memory(spec):
    raise PlanError("the actor needs 90 GiB; set spec.plan.zero3 to Auto, or change spec.groups[0].gpu.product")


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_a_job_that_has_begun_is_told_which_advice_it_cannot_take(begun):
    document = a_job(1)
    made = {"plan.json": make_plan(read_job(document).spec).model_dump_json(), "job.json": "of an earlier spec"}
    ref = ("ConfigMap", names.plan_config_map("demo"))
    document["status"] = {"stage": "ppo"} if begun else {}

    async def test():
        planner = Planner(SECONDS, lacks_memory)
        try:
            return await planner.planned(document, Children({ref: {"data": made}}))
        finally:
            await planner.close()

    refused = run(test())
    assert refused.reason == "PlanInfeasible"
    kept = "the job has begun, so spec.plan.zero3 cannot change any more; only a new job can have another value"
    assert (kept in refused.message) == begun


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("dovetail.operator.plan_worker.MOST_ANSWERS", 3)
    kept = Remembered(100)

    def there():
        return [key for key in "abcdef" if kept.get(key) is not None]

    for key in "abcd":
        kept.put(key, key.upper(), 10)
    assert there() == list("bcd")
    kept.put("b", "new", 80)
    assert there() == list("bcd"), "100 together"
    assert kept.get("b") == "new"
    kept.put("e", "E", 20)
    assert there() == list("be"), "the oldest go"
    kept.put("f", "F", 500)
    assert there() == ["f"], "the last one stays"
    kept.clear()
    kept.put("a", "A", 100)
    assert there() == ["a"]


class Nobody:
    """A cluster that takes all writes, with no coordinators."""

    def __init__(self):
        self.requests, self.statuses, self.made = 0, {}, []

    async def write_status(self, job, status):
        self.statuses[job["metadata"]["name"]] = status
        metadata = {**job["metadata"], "resourceVersion": str(int(job["metadata"]["resourceVersion"]) + 1)}
        return {**job, "metadata": metadata, "status": status}

    async def create(self, thing):
        self.made.append(thing)
        return thing

    async def find(self, kind, namespace, name):
        return None

    def report(self, key, children, token):
        return None

    def forget(self, key):
        return None


@pytest.mark.slow
def test_jobs_whose_plans_never_come_do_not_stop_the_operator():
    """More of them than the operator has workers. It looks at a job with a plan at once, and says what the others
    wait for."""

    async def test():
        planner, client = Planner(SECONDS, never), Nobody()
        settings = OperatorSettings(workers=2, nodes_seconds=0)
        controller = Controller(client, planner, client, settings, OperatorMetrics())
        workers = [asyncio.create_task(controller._work()) for _ in range(settings.workers)]
        try:
            planned = a_job(0, name="planned")
            planned["metadata"]["resourceVersion"] = "1"
            job = await planner_plan(planner, planned)
            for n in range(1, 9):
                document = a_job(n, "greedy", f"slow-{n}")
                document["metadata"]["resourceVersion"] = "1"
                await controller.observe(document, deleted=False)
            await asyncio.sleep(0.1)
            await controller.observe(planned, deleted=False)
            asked = time.monotonic()
            while not {"planned", "slow-8"} <= client.statuses.keys():
                assert time.monotonic() - asked < 60, sorted(client.statuses)
                await asyncio.sleep(0.05)
            return job, client.statuses
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await planner.close()

    async def planner_plan(planner, document):
        done, planner.done = planner.done, None
        found = await planner.planned(document, Children())
        planner.done = done
        return found

    job, statuses = run(test())
    assert not isinstance(job, PlanRefused)
    waits = {c["type"]: c for c in statuses["slow-8"]["conditions"]}["Planned"]
    assert (waits["status"], waits["reason"]) == ("False", "Planning")
    assert "jobs before it" in waits["message"]


@pytest.mark.slow
def test_of_many_manifests_that_were_read_the_newest_are_kept(monkeypatch):
    """Nothing else keeps them either."""
    monkeypatch.setattr("dovetail.operator.plan_worker.READ_BYTES", 200_000)

    async def test():
        planner = Planner(SECONDS, make_plan)
        drift = Drift()
        read = []
        try:
            for n in range(8):
                document = a_job(1, name=f"job-{n}")
                document["spec"]["suspend"] = True
                document["spec"]["groups"][0]["podTemplate"] = {"spec": {"nodeSelector": {"a": "x" * 30_000}}}
                job, plan = await planner.planned(document, Children())
                context = RenderContext(job, f"uid-{n}", plan, OperatorSettings())
                drift.found(look_at(context, Children(), False, False, ()), (), False)
                read.append(weakref.ref(job))
                del job, context
            gc.collect()
            return [ref() is not None for ref in read]
        finally:
            await planner.close()

    assert run(test()) == [False] * 6 + [True] * 2
