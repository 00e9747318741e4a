"""What spares the operator from rendering a job anew with every event, and what makes it look again."""

import copy
from datetime import timedelta

import pytest

from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import read_job
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.disruption import Taking
from dovetail.operator.reconcile.drift import Drift
from dovetail.operator.reconcile.reconcile import Seen, reconcile
from dovetail.operator.render import objects
from dovetail.planner.make_plan import make_plan
from helpers.fake_cluster import START, FakeCluster


class Watched:
    """A running job whose objects have versions; `look` says what is to be applied."""

    def __init__(self):
        cluster = FakeCluster()
        cluster.settle()
        self.document, self.objects = cluster.document, copy.deepcopy(cluster.objects)
        for (kind, _), thing in self.objects.items():
            uid = thing["metadata"]["uid"] if kind == "Pod" else f"{kind}-uid"
            thing["metadata"] |= {"uid": uid, "resourceVersion": "1", "generation": 1}
        job = read_job(self.document)
        self.planned = job, make_plan(job.spec)
        self.settings, self.drift, self.leaving = OperatorSettings(), Drift(), {}

    def result(self, now):
        children = Children(copy.deepcopy(self.objects))
        seen = Seen(self.document, self.planned, children, None, self.settings, {}, self.drift, leaving=self.leaving)
        return reconcile(seen, now)

    def write(self, thing, now):
        """The operator changes an object. Returns whether others are said to change it, too."""
        there = self.objects[thing["kind"], thing["metadata"]["name"]]
        metadata = {key: there["metadata"][key] for key in ("uid", "resourceVersion", "generation")}
        changed = copy.deepcopy(thing)
        changed["metadata"] |= {key: f"{value}+" if key != "uid" else value for key, value in metadata.items()}
        self.objects[thing["kind"], thing["metadata"]["name"]] = changed
        return self.drift.corrected(thing, changed, now)

    def look(self, now=START):
        return [(thing["kind"], thing["metadata"]["name"]) for thing in self.result(now).apply]

    def change(self, kind, version):
        """Somebody edits the object of this kind."""
        for (k, name), thing in self.objects.items():
            if k == kind:
                thing["metadata"] |= {version: "2", "labels": {**thing["metadata"]["labels"], "app": "x"}}
                thing["metadata"]["labels"].pop("app.kubernetes.io/component")
                return kind, name
        raise KeyError(kind)


@pytest.fixture
def rendered(monkeypatch):
    """Counts how often a job's objects are rendered."""
    count, real = [], objects.config_map

    def config_map(context):
        count.append(context.name)
        return real(context)

    monkeypatch.setitem(objects.SUPPORTING, "ConfigMap", config_map)
    return count


def test_nothing_is_rendered_while_nothing_changes(rendered):
    job = Watched()
    rendered.clear()
    assert job.look() == []
    assert len(rendered) == 1
    assert job.look() == []
    pod = next(thing for (kind, _), thing in job.objects.items() if kind == "Pod")
    pod["metadata"]["resourceVersion"] = "77"
    assert job.look() == []
    assert len(rendered) == 1


def test_only_what_changed_is_rendered(rendered):
    job = Watched()
    assert job.look() == []
    rendered.clear()
    job.objects["NetworkPolicy", "demo"]["metadata"] |= {"resourceVersion": "2", "annotations": {"a": "b"}}
    assert job.look() == []
    job.objects["NetworkPolicy", "demo"]["spec"]["ingress"] = [{}]
    job.objects["NetworkPolicy", "demo"]["metadata"]["resourceVersion"] = "3"
    assert job.look() == [("NetworkPolicy", "demo")]
    assert job.look() == [("NetworkPolicy", "demo")], "until it has been mended"
    assert rendered == []


def test_what_a_running_job_may_keep_is_mended_when_it_starts_anew():
    job = Watched()
    plan = job.objects["ConfigMap", "demo-plan"]
    plan["data"], plan["metadata"]["resourceVersion"] = {}, "2"
    assert job.look() == []
    del job.objects["JobSet", "demo"]
    assert ("ConfigMap", "demo-plan") in job.look()


@pytest.mark.parametrize(("kind", "version"), [("Service", "resourceVersion"), ("PodDisruptionBudget", "generation")])
def test_drift_is_found_all_the_same(kind, version):
    job = Watched()
    assert job.look() == []
    changed = job.change(kind, version)
    assert job.look() == [changed]
    assert job.look() == [changed], "until it has been mended"


def test_what_was_deleted_is_missed():
    job = Watched()
    assert job.look() == []
    gone = next(ref for ref in job.objects if ref[0] == "NetworkPolicy")
    del job.objects[gone]
    assert job.look() == [gone]


def test_other_settings_or_another_plan_are_looked_at_afresh(rendered):
    job = Watched()
    rendered.clear()
    job.look()
    job.settings = OperatorSettings()
    job.look()
    assert len(rendered) == 2
    job.planned = job.planned[0], job.planned[1].model_copy()
    job.look()
    assert len(rendered) == 3


def test_a_quarrel_about_an_object_slows_down_and_is_forgotten():
    """Another program that changes the same object would else cost a write of each a second, for ever."""
    job, waits, now = Watched(), [], START
    service = job.objects["Service", "demo-coordinator"]
    service["spec"]["clusterIP"] = "10.0.0.1"  # the other one's wish, which is back at once
    while len(waits) < 12:
        result = job.result(now)
        wait = timedelta(seconds=1.0 if result.apply else result.requeue)
        if result.apply:
            job.drift.corrected(result.apply[0], service, now)
            waits.append(timedelta())
        waits[-1] += wait
        now += wait
    assert [wait.total_seconds() for wait in waits] == [1, 1, 8, 16, 32, 64, 128, 256, 512, 600, 600, 1]
    now += timedelta(hours=1)
    for _ in range(2):
        result = job.result(now)
        assert [thing["kind"] for thing in result.apply] == ["Service"], "an edit now and then is no quarrel"
        job.drift.corrected(result.apply[0], service, now)


def test_drains_in_a_row_are_no_quarrel_about_the_budget():
    """The operator lifts the budget where all nodes of a job are drained. Drains must not wait for that."""
    job, now = Watched(), START
    for (kind, _), pod in job.objects.items():
        if kind == "Pod":
            pod["spec"] = {"nodeName": "node"}
    for drain in range(6):
        for leaving in ({"node": [Taking("was cordoned")]}, {}):
            job.leaving = leaving
            result = job.result(now)
            assert [thing["kind"] for thing in result.apply] == ["PodDisruptionBudget"], f"drain {drain} waits"
            assert not job.write(result.apply[0], now)
            assert job.look(now) == []
            now += timedelta(seconds=30)


def test_pods_that_come_and_go_are_no_quarrel_about_the_policy():
    job, now = Watched(), START
    pod = next(thing for (kind, _), thing in job.objects.items() if kind == "Pod")
    for number in range(6):
        pod["metadata"]["uid"] = f"pod-{number}"
        result = job.result(now)
        assert [thing["kind"] for thing in result.apply] == ["NetworkPolicy"], f"pod {number} is not protected yet"
        assert not job.write(result.apply[0], now)
        now += timedelta(seconds=30)
