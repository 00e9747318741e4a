"""Kueue's quota for three flavors of GPUs: all or nothing, surplus rollouts go first, who was evicted resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from helpers.cluster import REPOSITORY, KubeCluster, external, wait_for
from helpers.cluster_jobs import PACED_TEMPLATE, PRODUCTS, ClusterJob, is_true, paced, tiny_manifest
from helpers.jobs import events
from helpers.operator_process import OperatorProcess, install, kubeconfig, operator

pytestmark = [
    pytest.mark.skipif(external() is not None, reason="quotas of somebody's cluster are not ours to set"),
]
SECONDS = 1200.0
ITERATIONS = 8
QUOTA = {"a100": 1, "v100": 1, "a10": 2}
SURPLUS = "kueue-surplus"
SURPLUS_INSTANCES = {"a10-1", "a10-1-scorer"}


def queues(namespace: str) -> list[dict[str, Any]]:
    """Those of docs/kueue.md, with small quotas."""
    page = (REPOSITORY / "docs/kueue.md").read_text()
    text = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "ClusterQueue" in block)
    things: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for thing in things:
        if thing["kind"] == "LocalQueue":
            thing["metadata"]["namespace"] = namespace
        if thing["kind"] == "ClusterQueue":
            for flavor in thing["spec"]["resourceGroups"][1]["flavors"]:
                flavor["resources"][0]["nominalQuota"] = QUOTA[flavor["name"]]
    return things


@pytest.fixture(scope="module")
def leader(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    cluster.devcluster("up", "--kueue")
    install(cluster, [])
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": SURPLUS}}
    cluster.apply(priority | {"value": -10, "preemptionPolicy": "Never"})
    folder = tmp_path_factory.mktemp("operator")
    images = {f"DOVETAIL_{name.upper()}_IMAGE": f"dovetail-dev/{name}:dev" for name in ("trainer", "rollout")}
    images["DOVETAIL_COORDINATOR_IMAGE"] = "dovetail-dev/operator:dev"
    template = folder / "pod-template.yaml"
    template.write_text(yaml.safe_dump(PACED_TEMPLATE))
    images["DOVETAIL_POD_TEMPLATE"] = str(template)
    config = kubeconfig(cluster, folder)
    with operator(config, folder, "leader", [], DOVETAIL_SURPLUS_PRIORITY_CLASS=SURPLUS, **images) as process:
        wait_for("leadership", process.leads)
        yield process


def urgent(cluster: KubeCluster, namespace: str, product: str) -> None:
    """A batch/v1 Job that wants one GPU, and gets it."""
    container = {
        "name": "main",
        "image": "dovetail-dev/busybox:dev",
        "command": ["sleep", "3600"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "10m", "memory": "16Mi"}},
    }
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "urgent"}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"nvidia.com/gpu.product": PRODUCTS[product]},
        "containers": [container],
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"urgent-{product}", "labels": labels}}
    text = json.dumps(job | {"spec": {"suspend": True, "template": {"spec": pod}}})
    # Kueue's webhooks may not answer at once.
    wait_for("the job", lambda: cluster.try_kubectl("apply", "-n", namespace, "-f", "-", stdin=text).returncode == 0)
    words = ("job", f"urgent-{product}", "-n", namespace)
    wait_for("its admission", lambda: not cluster.get(*words)["spec"]["suspend"])


def named(job: ClusterJob, event: str, **fields: str) -> set[str]:
    """The instances of which the job has told such an event."""
    found = (each for each in events(job.run_dir(), event) if each.items() >= fields.items())
    return {str(each["instance"]) for each in found}


def suspended(cluster: KubeCluster, *job: str) -> bool | None:
    found = cluster.get(*job)
    return None if found is None else bool(found["spec"]["suspend"])


def test_quota_admits_all_or_nothing_and_who_is_evicted_resumes(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    cluster.apply(*queues(namespace), namespace=namespace)
    document = tiny_manifest(namespace, a10={"minReplicas": 1, "maxReplicas": 2}, iterations=ITERATIONS)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    document["spec"]["checkpoint"] = {"everySteps": 2}
    job = ClusterJob(cluster, namespace)

    config_map, document = paced(document)

    # A rollout group larger than its flavor's quota: nothing starts, not even what there would be room for.
    document["spec"]["groups"][1]["replicas"] = 2
    cluster.apply(config_map, document, namespace=namespace)
    wait_for("the queue", lambda: job.condition("Suspended").get("reason") == "WaitingForQuota")
    why = "waits for quota in queue team: couldn't assign flavors to pod set "
    wait_for("why", lambda: job.condition("Suspended")["message"].startswith(why))
    wait_for("which", lambda: "flavor v100" in job.condition("Suspended")["message"])
    assert job.pods() == {}

    # It goes to another queue while it waits, and comes back smaller.
    def edit(queue: str, priority: str | None, **spec: Any) -> None:
        labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}
        changed = json.dumps({"metadata": {"labels": labels}, "spec": spec})
        cluster.kubectl("patch", "rlhfjob", "tiny", "-n", namespace, "--type=merge", "-p", changed)

    edit("other", "urgent")
    wait_for("the other queue", lambda: "in queue other" in job.condition("Suspended").get("message", ""))
    moved = cluster.get("jobset", "tiny", "-n", namespace)["metadata"]["labels"]
    assert moved["kueue.x-k8s.io/priority-class"] == "urgent"
    edit("team", None, suspend=True)
    wait_for("suspension", lambda: job.condition("Suspended").get("reason") == "SuspendedByUser")
    document["spec"]["groups"][1]["replicas"] = 1
    edit("team", None, suspend=False, groups=document["spec"]["groups"])
    wait_for("an iteration", lambda: job.condition("Running").get("status") == "True" and job.iteration() > 1, SECONDS)
    job.pace(3000.0)  # however long what follows takes
    surplus = ("job", "tiny-a10-s1", "-n", namespace)
    wait_for("room for a surplus rollout", lambda: suspended(cluster, *surplus) is False, SECONDS)
    wait_for("the surplus rollout joins", lambda: named(job, "instance.registered") >= SURPLUS_INSTANCES, SECONDS)
    wait_for("a checkpoint", lambda: job.document()["status"].get("lastCheckpoint", {}).get("step"), SECONDS)

    before = job.uids()
    urgent(cluster, namespace, "a10")
    wait_for("the surplus goes first", lambda: suspended(cluster, *surplus))
    # The preStop hook told the coordinator.
    wait_for("it is retired", lambda: named(job, "instance.health", health="retired") == SURPLUS_INSTANCES, SECONDS)
    assert job.uids().items() >= {name: uid for name, uid in before.items() if name != "a10"}.items()
    assert job.condition("Suspended").get("status") == "False"

    urgent(cluster, namespace, "a100")
    wait_for("eviction", lambda: job.condition("Suspended").get("reason") == "WaitingForQuota", SECONDS)
    wait_for("no pods", lambda: not job.pods(), SECONDS)
    done = job.iteration()
    wait_for("why", lambda: "Preempted to accommodate a workload" in job.condition("Suspended")["message"])
    assert done < ITERATIONS, "the job must outlast its eviction"
    assert cluster.get("rlhfjob", "tiny", "-n", namespace)["status"]["lastCheckpoint"]["step"] > 0
    job.pace(0)
    # The other one leaves room for what the job needs, and none for a surplus rollout that would start in vain.
    cluster.kubectl("delete", "jobs", "-n", namespace, "urgent-a100")
    wait_for("the end", lambda: is_true(job.document(), "Completed"), SECONDS)
    finished = [event["iteration"] for event in events(job.run_dir(), "iteration.finished")]
    assert finished == list(range(1, ITERATIONS + 1)), "each iteration once, in order"
    stages = [event["stage"] for event in events(job.run_dir(), "stage.finished")]
    assert stages.count("sft") == 1, "resumed, not begun again"


CONFIGURATION = ("configmap", "kueue-manager-config", "-n", "kueue-system")
CONTROLLER = "deployment/kueue-controller-manager"


@contextmanager
def waits_for_pods(cluster: KubeCluster) -> Iterator[None]:
    """Kueue that suspends a job one of whose pods is not ready again in time. A first start may take as long as it
    likes."""
    found = cluster.get(*CONFIGURATION)["data"]
    (name, text), *_ = found.items()
    ready = {"timeout": "1h", "recoveryTimeout": "5s", "requeuingStrategy": {"backoffBaseSeconds": 1}}

    def configure(text: str) -> None:
        cluster.kubectl("patch", *CONFIGURATION, "--type=merge", "-p", json.dumps({"data": {name: text}}))
        cluster.kubectl("rollout", "restart", "-n", "kueue-system", CONTROLLER)
        words = ("rollout", "status", "-n", "kueue-system", CONTROLLER, "--timeout=900s")
        cluster.kubectl(*words, timeout=930)

    configure(yaml.safe_dump(yaml.safe_load(text) | {"waitForPodsReady": ready}))
    try:
        yield
    finally:
        configure(text)


def evicted(cluster: KubeCluster, namespace: str) -> str:
    """Why Kueue last ended the pods of a job. It says so also when it has started the job again."""
    conditions = [
        c for each in cluster.items("workloads", "-n", namespace) for c in each["status"].get("conditions") or []
    ]
    return str(next((c["message"] for c in conditions if c["type"] == "Evicted"), ""))


@pytest.mark.nightly
def test_a_job_that_kueue_stops_because_a_rollout_stays_away_resumes(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    """The rollout finds no node, and Kueue's waitForPodsReady.recoveryTimeout passes."""
    cluster.apply(*queues(namespace), namespace=namespace)
    document = tiny_manifest(namespace, iterations=ITERATIONS)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    document["spec"]["checkpoint"] = {"everySteps": 2}
    job = ClusterJob(cluster, namespace)
    with waits_for_pods(cluster):
        cluster.apply(*paced(document), namespace=namespace)
        wait_for("all pods", lambda: job.condition("Running").get("status") == "True" and job.iteration() > 1, SECONDS)
        job.pace(3000.0)
        cluster.kubectl("cordon", "v100")
        try:
            before = set(job.uids().values())
            cluster.delete("pod", "-n", namespace, job.pods()["v100"]["metadata"]["name"])
            # The job is back in the queue for a second only, if at all.
            wait_for("eviction", lambda: "Exceeded the PodsReady timeout" in evicted(cluster, namespace), SECONDS)
        finally:
            cluster.kubectl("uncordon", "v100")
        wait_for("new pods", lambda: job.whole() and before.isdisjoint(job.uids().values()), SECONDS)
        assert job.iteration() < ITERATIONS, "the job must outlast its eviction"
        job.pace(0)
        wait_for("the end", lambda: is_true(job.document(), "Completed"), SECONDS)
    finished = [event["iteration"] for event in events(job.run_dir(), "iteration.finished")]
    assert finished == list(range(1, ITERATIONS + 1)), "each iteration once, in order"
