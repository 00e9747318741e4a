"""What becomes of a job whose class is missing, wrong, changed or deleted, before it starts and while it runs."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.operator.cluster.classes import Classes
from dovetail.operator.cluster.client import Page
from dovetail.operator.reconcile.reconcile import PlanRefused
from helpers.fake_cluster import FakeCluster, a_cluster

GROUPS = [
    {"name": "train", "roles": ["trainer"]},
    {"name": "gen", "roles": ["rollout"], "minReplicas": 1, "maxReplicas": 2},
]
FAST = {"podTemplate": {"spec": {"nodeSelector": {"disk": "fast"}}}}
SLOW = {"podTemplate": {"spec": {"nodeSelector": {"disk": "slow"}}}}


def of_class(**spec: Any) -> FakeCluster:
    return a_cluster(**{"groups": GROUPS, "class": "cpus", **spec})


def selectors(cluster: FakeCluster) -> set[str]:
    """Of the pod templates of the JobSet, which are one by its label or another."""
    jobs = cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"]
    return {job["template"]["spec"]["template"]["spec"].get("nodeSelector", {}).get("disk", "") for job in jobs}


def planned(cluster: FakeCluster) -> tuple[str, str, str]:
    found = cluster.condition("Planned")
    return found["status"], found["reason"], found["message"]


def test_a_job_waits_for_its_class_and_gets_what_it_says():
    cluster = of_class()
    cluster.settle()
    assert planned(cluster)[:2] == ("False", "ClassMissing")
    assert "the cluster has no such class" in planned(cluster)[2]
    assert cluster.objects == {}
    cluster.give_class("cpus", **FAST, queue="research", trainer={"image": "mine:1"})
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert selectors(cluster) == {"fast"}
    metadata = cluster.objects["JobSet", "demo"]["metadata"]
    assert (metadata["labels"][names.CLASS_LABEL], metadata["labels"][names.QUEUE_LABEL]) == ("cpus", "research")
    images = {pod["image"] for pod in _containers(cluster)}
    assert "mine:1" in images
    assert len(images) == 3, "the coordinator and rollouts have the chart's"


def _containers(cluster: FakeCluster) -> list[dict[str, Any]]:
    jobs = cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs]


def test_a_jobs_own_queue_wins():
    cluster = of_class()
    cluster.document["metadata"]["labels"] = {names.QUEUE_LABEL: "mine"}
    cluster.give_class("cpus", queue="research")
    cluster.settle()
    assert cluster.objects["JobSet", "demo"]["metadata"]["labels"][names.QUEUE_LABEL] == "mine"


def test_a_job_that_names_more_than_its_class_allows_gets_no_pods():
    cluster = of_class(hub={"tokenSecret": {"name": "other"}})
    cluster.give_class("cpus", allowed={"secrets": ["wandb"]})
    cluster.settle()
    assert planned(cluster)[:2] == ("False", "ClassRefuses")
    assert planned(cluster)[2].startswith("spec.hub.tokenSecret names other, which class cpus does not allow")
    assert cluster.objects == {}
    cluster.give_class("cpus", allowed={"secrets": ["wandb", "other"]})
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"podTemplate": {"spec": {"nodeselector": {"a": "b"}}}}, "spec.podTemplate.spec.nodeselector is no field"),
        ({"trainer": {"podTemplate": {"spec": {"restartPolicy": "Always"}}}}, "restartPolicy must be Never"),
        ({"rollout": {"podTemplate": {"spec": {"volumes": [{"emptyDir": {}}]}}}}, "lacks name"),
        ({"queues": "a"}, "spec.queues of the class"),
    ],
)
def test_a_mistake_in_a_class_is_the_administrators(spec, sentence):
    cluster = of_class()
    cluster.give_class("cpus", **spec)
    cluster.settle()
    status, reason, message = planned(cluster)
    assert (status, reason) == ("False", "ClassInvalid")
    assert message.startswith("The administrator must correct the class cpus: ")
    assert sentence in message


def test_a_running_job_keeps_what_its_class_said_and_says_so():
    cluster = of_class()
    cluster.give_class("cpus", **FAST)
    cluster.settle()
    pods = {pod["metadata"]["uid"] for pod in cluster.pods()}
    cluster.give_class("cpus", **FAST, allowed={"secrets": ["wandb"]}, namespaces=["default"])
    cluster.settle()
    assert "class" not in planned(cluster)[2], "its pods would be the same"
    cluster.give_class("cpus", **SLOW)
    cluster.settle()
    assert {pod["metadata"]["uid"] for pod in cluster.pods()} == pods
    assert selectors(cluster) == {"fast"}
    assert planned(cluster)[0] == "True"
    assert "class cpus has changed since the pods were made" in planned(cluster)[2]
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.edit(suspend=False)
    cluster.settle()
    assert selectors(cluster) == {"slow"}
    assert "class" not in planned(cluster)[2]


def test_a_running_job_outlives_its_class():
    cluster = of_class()
    cluster.give_class("cpus", **FAST)
    cluster.settle()
    surplus = ("Job", "demo-gen-s1")
    assert surplus in {place for place in cluster.objects if place[0] == "Job"}, sorted(cluster.objects)
    pods = len(cluster.pods())
    cluster.take_class("cpus")
    cluster.settle()
    assert len(cluster.pods()) == pods
    assert planned(cluster)[0] == "True"
    assert "pods that run stay, but no more are made: spec.class is cpus" in planned(cluster)[2]
    cluster.remove(*surplus)
    cluster.settle()
    assert surplus not in cluster.objects, "a rollout that comes now would lack what the class said"
    cluster.end(cluster.pod("coordinator"), 0)
    cluster.settle()
    assert cluster.condition("Completed")["status"] == "True"


def test_a_job_in_a_queue_is_made_anew_when_its_class_changes():
    cluster = of_class()
    cluster.queueing = True
    cluster.give_class("cpus", **FAST, queue="research")
    cluster.settle()
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    cluster.give_class("cpus", **SLOW, queue="research")
    cluster.settle()
    assert selectors(cluster) == {"slow"}
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    cluster.take_class("cpus")
    cluster.settle()
    assert ("JobSet", "demo") not in cluster.objects, "else Kueue could start it"
    assert planned(cluster)[:2] == ("False", "ClassMissing")


def cannot_list(status: int) -> Classes:
    """Classes as an operator sees them that starts anew and may not list them, or finds no such kind."""
    lists = Lists()
    lists.answer = KubeError(status, "forbidden")
    classes = Classes(lists, _nobody)  # type: ignore[arg-type]
    asyncio.run(classes.relist(None, None))  # type: ignore[arg-type]
    return classes


async def _nobody() -> None:
    """Nobody hears of changes."""


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        (lambda cluster: cannot_list(403), "the operator cannot see classes (forbidden)"),
        (lambda cluster: cannot_list(404), "the operator cannot see classes (forbidden)"),
        (lambda cluster: Classes(cast(Any, None), _nobody, "the operator serves some"), "the operator serves some"),
        (lambda cluster: cluster.give_class("cpus", queues="a"), "The administrator must correct the class cpus"),
    ],
)
@pytest.mark.parametrize("queueing", [True, False], ids=["in a queue", "running"])
def test_who_cannot_read_a_class_ends_no_job_of_it(queueing, classes, reason):
    """After the upgrade of an operator, for example, whose rights are older or whose kinds are newer."""
    cluster = of_class()
    cluster.queueing = queueing
    cluster.give_class("cpus", **FAST, queue="research")
    cluster.settle()
    before = {place: thing["metadata"]["uid"] for place, thing in cluster.objects.items()}
    cluster.classes = classes(cluster) or cluster.classes
    cluster.settle()
    assert {place: thing["metadata"]["uid"] for place, thing in cluster.objects.items()} == before
    status, _, message = planned(cluster)
    assert status == "True"
    assert reason in message
    new = of_class()
    new.classes = cluster.classes
    new.settle()
    assert planned(new)[0] == "False"
    assert planned(new)[1] in ("ClassUnreadable", "ClassInvalid")
    assert new.objects == {}


V100 = {"product": "Tesla-V100-SXM2-32GB", "perPod": 1}


def test_the_image_of_a_class_is_taken_at_its_word():
    """The chart's images have no kernels for a V100."""
    cluster = of_class(groups=[{**group, "gpu": V100} for group in GROUPS])
    cluster.give_class("cpus", trainer={"image": "mine:cu126"})
    cluster.settle()
    assert planned(cluster)[:2] == ("False", "InvalidSpec")
    assert planned(cluster)[2].startswith("spec.groups[1].image: Tesla-V100-SXM2-32GB has compute capability 7.0")
    assert "spec.groups[0]" not in planned(cluster)[2]
    assert cluster.objects == {}
    cluster.give_class("cpus", trainer={"image": "mine:cu126"}, rollout={"image": "mine:cu126"})
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def limited(size: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "dovetail", "resources": {"limits": {"memory": size}}}]}}}


def test_too_little_memory_is_told_whoever_limits_it():
    """The class, or else the job, or else the chart. The limit may change while the job is suspended, without another
    plan."""
    cluster = of_class(suspend=True)
    cluster.give_class("cpus", trainer=limited("64Mi"))
    cluster.settle()
    told = "a pod of group train is expected to need"
    assert told in planned(cluster)[2]
    assert "but resources.limits.memory of its podTemplates is 0.0625 GiB; raise it" in planned(cluster)[2]
    assert "group gen is expected" not in planned(cluster)[2]
    cluster.give_class("cpus", allowed={"fields": ["spec.containers.resources"]})
    cluster.settle()
    assert told not in planned(cluster)[2]
    cluster.settings = replace(cluster.settings, pod_template=limited("64Mi")["podTemplate"])
    cluster.settle()
    assert told in planned(cluster)[2]
    cluster.edit(groups=[{**group, **limited("64Gi")} for group in GROUPS])
    cluster.settle()
    assert told not in planned(cluster)[2]
    cluster.edit(groups=[{**group, **limited("32Mi")} for group in GROUPS])
    cluster.settle()
    assert "is 0.0312 GiB; raise it" in planned(cluster)[2]


class Lists:
    """An API server with a list of classes, or an error in its place."""

    def __init__(self) -> None:
        self.answer: list[str] | KubeError = []

    async def pages(self, resource, namespace):
        if isinstance(self.answer, KubeError):
            raise self.answer
        items = [{"metadata": {"name": name, "resourceVersion": "1"}, "spec": {}} for name in self.answer]
        yield Page(items, "7")


def test_lists_of_classes():
    lists, told = Lists(), []

    async def changed() -> None:
        told.append("changed")

    classes = Classes(lists, changed)  # type: ignore[arg-type]
    job: Any = SimpleNamespace(spec=SimpleNamespace(job_class="b"))

    def list_them(answer: list[str] | KubeError) -> str | None:
        lists.answer = answer
        told.clear()
        return asyncio.run(classes.relist(None, None))  # type: ignore[arg-type]

    assert list_them(["a", "b"]) == "7"
    assert len(told) == 2
    assert list_them(["a", "b"]) == "7"
    assert told == [], "nothing is new"
    assert list_them(["a"]) == "7"
    assert told == ["changed"]
    assert list_them(KubeError(403, "forbidden")) is None
    found = classes.of(job)
    assert isinstance(found, PlanRefused)
    assert "the operator cannot see classes (forbidden)" in found.message
    with pytest.raises(KubeError):
        list_them(KubeError(500, "away"))
