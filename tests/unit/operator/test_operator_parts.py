"""The operator's queue, store, planner process and settings."""

import asyncio
import copy
import datetime
import json
import re
import time
import tracemalloc

import pytest
import yaml
from golden import make_objects

from dovetail.kube.resources import CONFIG_MAP, JOB, JOBSET, SANDBOX, SECRET, Gang
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.training_types import AUTO_LAG
from dovetail.operator.cluster.object_cache import TOO_LARGE, ObjectCache, trim
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner, read_job
from dovetail.operator.reconcile.children import Children, matches, sizes
from dovetail.operator.reconcile.conditions import Conditions
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.render.config_map import config_map
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.objects import supporting_objects
from dovetail.operator.workqueue import LONGEST_BACKOFF_SECONDS, WorkQueue
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.protocol.plan import Plan
from helpers.fake_cluster import manifest, running

SECONDS = 300.0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


# ---------------------------------------------------------------- queue


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_key_is_worked_on_once_however_often_it_is_asked_for():
    async def test():
        queue = WorkQueue(Clock())
        for _ in range(3):
            await queue.add("a")
        await queue.add("b")
        assert [await queue.get(), await queue.get()] == ["a", "b"]
        assert len(queue) == 0

    run(test())


def test_a_key_at_work_is_not_given_to_a_second_worker():
    async def test():
        queue = WorkQueue(Clock())
        await queue.add("a")
        assert await queue.get() == "a"
        await queue.add("a")
        second = asyncio.create_task(queue.get())
        await asyncio.sleep(0.05)
        assert not second.done()
        await queue.done("a")
        assert await second == "a"

    run(test())


def test_the_sooner_of_two_requests_counts():
    async def test():
        clock = Clock()
        queue = WorkQueue(clock)
        await queue.add("a", 100)
        await queue.add("a", 5)
        await queue.add("a", 50)
        clock.now = 5.0
        assert await queue.get() == "a"
        assert len(queue) == 0
        await queue.done("a", again=7)
        assert len(queue) == 1

    run(test())


def test_failures_wait_longer_each_time_up_to_a_limit():
    async def test():
        clock = Clock()
        queue = WorkQueue(clock)
        pauses = []
        await queue.add("a")
        for _ in range(12):
            clock.now += LONGEST_BACKOFF_SECONDS
            assert await queue.get() == "a"
            pauses.append(await queue.failed("a"))
        assert pauses[:3] == [0.5, 1.0, 2.0]
        assert pauses[-1] == LONGEST_BACKOFF_SECONDS
        clock.now += LONGEST_BACKOFF_SECONDS
        await queue.get()
        await queue.done("a")
        await queue.add("a")
        await queue.get()
        assert await queue.failed("a") == 0.5

    run(test())


def test_lag_is_of_what_waits():
    async def test():
        clock = Clock()
        queue = WorkQueue(clock)
        assert queue.lag() == 0.0
        await queue.add("a")
        await queue.add("later", 1000)
        clock.now = 30.0
        assert queue.lag() == 30.0
        await queue.get()
        assert queue.lag() < 0

    run(test())


# ---------------------------------------------------------------- store


def a_pod(version, uid="1", job="demo", **status):
    labels = {"dovetail.dev/job": job} if job else {}
    metadata = {"name": "p", "namespace": "ns", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": metadata | {"managedFields": [1]}, "spec": {"containers": []}, "status": status}


def test_an_older_version_never_replaces_a_newer_one():
    store = ObjectCache()
    assert store.put(a_pod(9, phase="Running")) == ("ns", "demo")
    store.put(a_pod(8, phase="Pending"))
    (pod,) = store.children(("ns", "demo")).of("Pod")
    assert pod["status"] == {"phase": "Running"}
    assert "managedFields" not in pod["metadata"]
    assert pod["spec"] == {}


def test_the_end_of_an_earlier_object_does_not_remove_the_next_of_its_name():
    store = ObjectCache()
    store.put(a_pod(9, uid="2"))
    store.remove(a_pod(10, uid="1"))
    assert len(store.children(("ns", "demo")).of("Pod")) == 1
    store.remove(a_pod(11, uid="2"))
    assert store.children(("ns", "demo")).objects == {}


def test_of_a_jobset_the_store_keeps_what_is_looked_at_and_little_more():
    cluster = running()
    whole = cluster.objects["JobSet", "demo"]
    store = ObjectCache()
    key = store.put(whole)
    kept = store.children(key).get("JobSet", "demo")
    assert sizes(kept) == sizes(whole) != {}
    assert kept["spec"]["suspend"] is False
    assert kept["status"] == whole["status"]
    assert len(json.dumps(kept)) < len(json.dumps(whole)) / 4
    kept["status"]["changed"] = True
    assert "changed" not in store.children(key).get("JobSet", "demo")["status"], "what is handed out is a copy"


def test_a_reply_and_the_event_that_follows_it_are_one_version():
    store = ObjectCache()
    pod = a_pod(5)
    assert not store.knows(pod)
    store.put(pod)
    assert store.knows(pod)
    assert store.knows(a_pod(4))
    assert not store.knows(a_pod(6))
    ((key, name),) = store.uids("Pod", pod["metadata"]["namespace"])
    assert (key[1], name) == ("demo", pod["metadata"]["name"])
    store.remove(pod)
    assert not store.knows(pod)


def test_of_large_objects_that_somebody_labelled_as_a_jobs_little_is_kept():
    """Else a tenant could fill the operator's memory."""
    store = ObjectCache()
    labels = {"dovetail.dev/job": "demo", "app.kubernetes.io/managed-by": "dovetail-operator"}
    large = "x" * 1_000_000

    def config_map(name, **data):
        metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "5", "labels": labels}
        metadata |= {"annotations": {"note": large}}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    for name in ("mine-0", "mine-1"):
        key = store.put(config_map(name, large=large))
    store.put(config_map("demo-plan", **{"plan.json": "{}", "large": large}))
    kept = store.children(key)
    for name in ("mine-0", "mine-1"):
        assert len(json.dumps(kept.get("ConfigMap", name))) < 1000
    assert kept.get("ConfigMap", "demo-plan")["data"] == {"plan.json": "{}"}
    assert store.uids("ConfigMap", None)[key, "mine-0"] == "mine-0", "it is still compared with lists"


@pytest.mark.parametrize("gang", ["", *Gang])
def test_of_a_jobs_own_objects_the_store_keeps_what_is_compared(gang):
    """Else they would be written again and again."""
    job = read_job(manifest())
    context = RenderContext(job, "uid-1", make_plan(job.spec), OperatorSettings(gang=gang))
    store = ObjectCache()
    for thing in supporting_objects(context):
        thing["metadata"] |= {"resourceVersion": "1", "uid": f"{thing['kind']}-uid"}
        key = store.put(thing)
        kept = store.children(key).get(thing["kind"], thing["metadata"]["name"])
        assert matches(thing, kept), thing["kind"]


def test_a_manifest_that_is_too_large_is_refused_and_not_kept():
    document = manifest(suspend=True)
    document["metadata"]["resourceVersion"] = "1"
    document["spec"]["groups"][0]["podTemplate"] = {"spec": {"nonsense": [[]] * 100_000}}
    store = ObjectCache()
    kept = store.job(store.put(document))
    assert len(json.dumps(kept)) < 3000
    assert kept["spec"]["suspend"] is True
    refused = plan_with(make_plan, document=kept)
    assert refused.reason == "InvalidSpec"
    assert refused.message.startswith("spec has 29")
    assert store.job(store.put(manifest() | {"metadata": document["metadata"]}))["spec"] == manifest()["spec"]


def test_a_long_script_in_a_manifest_is_one_value():
    document = manifest()
    document["metadata"]["resourceVersion"] = "1"
    script = json.dumps([{"a\\": ["\n", n]} for n in range(6000)])
    template = {"spec": {"containers": [{"name": "trainer", "env": [{"name": "TABLE", "value": script}]}]}}
    document["spec"]["groups"][0]["podTemplate"] = template
    store = ObjectCache()
    assert store.job(store.put(document))["spec"] == document["spec"]
    template["spec"]["nonsense"] = [[]] * 10_000
    store = ObjectCache()
    refused = plan_with(make_plan, document=store.job(store.put(document)))
    assert re.search(r"about 20\d\d\d values", refused.message)


@pytest.mark.slow
def test_of_large_metadata_of_a_job_little_is_kept():
    """The API server bounds annotations, but neither labels nor owners."""
    document = manifest(suspend=True)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a"}
    sent = {"kueue.x-k8s.io/prebuilt-workload-name": "demo-1"}  # by MultiKueue
    document["metadata"] |= {
        "resourceVersion": "1",
        "labels": {f"l{n}": "" for n in range(50_000)} | {"kueue.x-k8s.io/queue-name": "queue"},
        "annotations": {f"a{n}": "" for n in range(50_000)} | sent,
        "ownerReferences": [{**owner, "uid": str(n)} for n in range(10_000)],
        "finalizers": [f"a.b/{n}" for n in range(10_000)],
    }
    store = ObjectCache()
    kept = store.job(store.put(document))
    assert len(json.dumps(kept)) < 3000
    assert kept["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "queue"}
    refused = plan_with(make_plan, document=kept)
    assert refused.message == "metadata.labels has 50001 labels; at most 500 are taken. Remove some."
    del document["metadata"]["labels"]
    kept = store.job(store.put(document))
    assert len(json.dumps(kept)) < 10_000
    assert kept["metadata"]["annotations"] == sent
    assert not isinstance(plan_with(make_plan, document=kept), PlanRefused)


def test_a_large_job_that_an_earlier_release_has_planned_goes_on():
    """And no larger one takes its place."""
    document = manifest()
    document["metadata"] |= {"resourceVersion": "1", "generation": 2}
    template = {"spec": {"tolerations": [{"key": f"k{n}", "operator": "Exists"} for n in range(10_000)]}}
    document["spec"]["groups"][0]["podTemplate"] = template

    def planned(status, generation):
        """What an operator sees that starts now."""
        store, condition = ObjectCache(), {"type": "Planned", "status": status, "observedGeneration": generation}
        return TOO_LARGE not in store.job(store.put({**document, "status": {"conditions": [condition]}}))

    assert planned("True", 2)
    assert not planned("True", 1)
    assert not planned("False", 2)
    store = ObjectCache()
    assert TOO_LARGE in store.job(store.put(document))


@pytest.mark.slow
def test_a_large_job_of_an_earlier_release_may_be_edited_but_not_grow():
    """To suspend it, for example. Each edit has a new generation, which nobody has planned yet."""
    store, large = ObjectCache(), {"spec": {"nonsense": ["x"] * 100_000}}
    document = manifest(suspend=False)
    document["spec"]["groups"][0]["podTemplate"] = large
    document["metadata"]["resourceVersion"] = "1"
    planned = {"type": "Planned", "status": "True", "observedGeneration": 1}
    document["status"] = {"conditions": [planned]}
    key = store.put(document)

    def edit(**spec):
        document["spec"] = document["spec"] | spec
        document["metadata"]["generation"] += 1
        document["metadata"]["resourceVersion"] = str(document["metadata"]["generation"])
        store.put(copy.deepcopy(document))
        return store.job(key)

    for suspend in (True, False):
        found = edit(suspend=suspend)
        assert TOO_LARGE not in found
        assert found["spec"]["suspend"] is suspend
    assert TOO_LARGE in edit(samples={"keep": "x" * 1000})
    assert TOO_LARGE in edit(samples={}), "the operator has planned none of these"
    small = manifest()
    small["metadata"] |= {"name": "small", "resourceVersion": "1"}
    key = store.put(small)
    small["metadata"] |= {"resourceVersion": "2", "generation": 2}
    small["spec"] = document["spec"]
    store.put(copy.deepcopy(small))
    assert TOO_LARGE in store.job(key)


def test_what_is_nobodys_is_not_kept():
    store = ObjectCache()
    assert store.put(a_pod(1, job="")) is None
    assert store.uids("Pod", None) == {}


def test_matches_sees_drift_and_not_defaults():
    assert matches({"a": [{"b": 1}]}, {"a": [{"b": 1, "default": 2}], "c": 3})
    assert not matches({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 2}]})
    assert not matches({"a": [{"b": 1}]}, {"a": [{"b": 2}]})
    assert not matches({"a": {"b": 1}}, {"a": None})


# ---------------------------------------------------------------- planner


def slow(spec):
    time.sleep(600)


def broken(spec):
    raise RuntimeError("no such table")


def infeasible(spec):
    raise PlanError("the critic needs 41.2 GiB")


def dying(spec):
    raise SystemExit(3)


def plan_with(make, seconds=SECONDS, children=None, document=None):
    async def test():
        planner = Planner(seconds, make)
        try:
            return await planner.planned(document or manifest(), children or Children())
        finally:
            await planner.close()

    return run(test())


@pytest.mark.slow
def test_plans_come_from_another_process_and_are_the_planners():
    job, plan = plan_with(make_plan)
    assert plan == make_plan(job.spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "seconds", "reason", "words"),
    [
        (infeasible, SECONDS, "PlanInfeasible", "the critic needs 41.2 GiB"),
        (broken, SECONDS, "PlannerFailed", "RuntimeError: no such table"),
        (dying, SECONDS, "PlannerFailed", "process died"),
        (slow, 0.2, "PlannerTimeout", "within 0.2 s"),
    ],
)
def test_what_can_go_wrong_with_planning_is_said(make, seconds, reason, words):
    refused = plan_with(make, seconds)
    assert isinstance(refused, PlanRefused)
    assert refused.reason == reason
    assert words in refused.message


@pytest.mark.slow
def test_a_plan_in_the_config_map_is_kept():
    """Even by a planner that would refuse the job now."""
    document = manifest()
    job = read_job(document)
    plan = make_plan(job.spec)
    made = config_map(RenderContext(job, document["metadata"]["uid"], plan, OperatorSettings()))
    children = Children({("ConfigMap", "demo-plan"): made})
    assert plan_with(infeasible, children=children) == (job, plan)
    made["data"]["plan.json"] = "damaged"
    assert isinstance(plan_with(infeasible, children=children), PlanRefused)
    assert isinstance(plan_with(make_plan, children=children)[1], Plan)


def lag_by_trainers(spec):
    """A planner for which Auto is another lag with other trainers."""
    lag = spec.groups[0].replicas - 1 if spec.ppo.lag == AUTO_LAG else spec.ppo.lag
    return make_plan(with_lag(spec, lag)).model_copy(update={"lag": lag})


@pytest.mark.slow
def test_a_job_that_has_begun_keeps_its_lag_when_it_is_planned_for_other_trainers():
    """Its samples are of versions by that lag; the job failed when the next one was assembled."""
    document = manifest()
    document["spec"]["ppo"]["lag"] = "Auto"
    job = read_job(document)
    made = config_map(RenderContext(job, document["metadata"]["uid"], lag_by_trainers(job.spec), OperatorSettings()))
    children = Children({("ConfigMap", "demo-plan"): made})
    document["spec"]["groups"][0]["replicas"] = 2
    document["metadata"]["generation"] = 2
    for stage, lag in ((None, 1), ("ppo", 0)):
        document["status"] = {"stage": stage} if stage else {}
        found, plan = plan_with(lag_by_trainers, children=children, document=document)
        assert (plan.lag, plan.world_size) == (lag, 2)
        assert found.spec.ppo.lag == AUTO_LAG, "job.json stays as it is written"


def test_a_broken_manifest_is_a_sentence():
    refused = read_job(manifest(stages=["nonsense"]))
    assert refused.reason == "InvalidSpec"
    assert "spec.stages[0]" in refused.message


# ---------------------------------------------------------------- settings, conditions


def test_settings_come_from_the_environment(tmp_path):
    template = tmp_path / "template.yaml"
    template.write_text("spec: {priorityClassName: high}")
    found = OperatorSettings.read(
        {
            "DOVETAIL_NAMESPACES": "a, b",
            "DOVETAIL_WORKERS": "3",
            "DOVETAIL_PLANNER_SECONDS": "1.5",
            "DOVETAIL_POD_TEMPLATE": str(template),
            "DOVETAIL_TRAINER_IMAGE": "",
            "PATH": "/bin",
        }
    )
    assert (found.namespaces, found.workers, found.planner_seconds) == (("a", "b"), 3, 1.5)
    assert found.pod_template == {"spec": {"priorityClassName": "high"}}
    assert found.trainer_image == OperatorSettings().trainer_image
    with pytest.raises(ValueError, match="DOVETAIL_WORKERS is 'x', not a number"):
        OperatorSettings.read({"DOVETAIL_WORKERS": "x"})


def test_transition_times_change_with_the_status_alone():
    first = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    later = first + datetime.timedelta(hours=1)
    one = Conditions([], 1, first)
    one.set("Running", False, "PodsStarting")
    two = Conditions(one.result(), 2, later)
    two.set("Running", False, "Unschedulable", "no node")
    assert two.result()[0].last_transition_time == first
    assert [e.reason for e in two.events()] == ["Unschedulable"]
    three = Conditions(two.result(), 2, later)
    three.set("Running", True, "AllPodsReady")
    assert three.result()[0].last_transition_time == later
    assert [(e.type, e.reason) for e in three.events()] == [("Normal", "AllPodsReady")]


@pytest.mark.slow
def test_many_manifests_within_the_limit_take_little_memory():
    """A value takes up to 25 times as much memory as in JSON, and a tenant may make as many jobs as the quota says."""
    document = manifest(suspend=True)
    env = [{"name": f"v{n}", "value": "abcd"} for n in range(3000)]
    document["spec"]["groups"][0]["podTemplate"] = {"spec": {"containers": [{"name": "trainer", "env": env}]}}
    store, before, jobs = ObjectCache(), 0, 8
    tracemalloc.start()
    try:
        for n in range(jobs):
            document["metadata"] |= {"name": f"j{n}", "uid": f"u{n}", "resourceVersion": "1"}
            key = store.put(json.loads(json.dumps(document)))
            before = before or tracemalloc.get_traced_memory()[0]
        taken = (tracemalloc.get_traced_memory()[0] - before) / (jobs - 1)
    finally:
        tracemalloc.stop()
    assert taken < 64 << 10, f"{taken / 1024:.0f} KiB a job"
    assert store.job(key)["spec"] == document["spec"]


def test_of_a_job_that_is_over_the_manifest_is_not_kept_until_it_is_tried_again():
    document = manifest(ttlSecondsAfterFinished=60, retry=1)
    document["spec"]["groups"][0]["podTemplate"] = {"spec": {"nodeSelector": {"a": "x" * 100_000}}}
    document["metadata"] |= {"resourceVersion": "1", "labels": {"kueue.x-k8s.io/queue-name": "q"}}
    document["status"] = {"retry": 1, "conditions": [{"type": "Failed", "status": "True", "observedGeneration": 1}]}
    store = ObjectCache()
    kept = store.job(key := store.put(copy.deepcopy(document)))
    assert len(json.dumps(kept)) < 1500
    assert kept["spec"]["ttlSecondsAfterFinished"] == 60
    assert [group["name"] for group in kept["spec"]["groups"]] == [g["name"] for g in document["spec"]["groups"]]
    assert kept["metadata"]["labels"] == document["metadata"]["labels"]
    document["spec"]["retry"] = 2
    document["metadata"]["resourceVersion"] = "2"
    store.put(copy.deepcopy(document))
    assert store.job(key)["spec"] == document["spec"]
    elsewhere = {"managedBy": "kueue.x-k8s.io/multikueue", "retry": 1}
    document["metadata"]["resourceVersion"] = "3"
    store.put(document | {"spec": document["spec"] | elsewhere})
    assert store.job(key)["spec"]["groups"] == document["spec"]["groups"], "it is compared with its workload"


@pytest.mark.parametrize("name", make_objects.jobs())
def test_of_what_a_job_owns_nothing_is_lost_that_is_compared(name: str) -> None:
    """Of pods and what makes them, less is kept."""
    for thing in yaml.safe_load_all(make_objects.rendered(*make_objects.jobs()[name])):
        if thing["kind"] in (JOBSET.kind, JOB.kind, SANDBOX.kind):
            assert trim(thing | {"status": {"conditions": [1]}})["status"] == {"conditions": [1]}
        elif thing["kind"] not in (SECRET.kind, CONFIG_MAP.kind):
            assert trim(thing) == thing
