"""One running job on real kubelets, under the chart's operator, that suffers one fault after the other.

It goes on after each, nothing restarts that did not fail, and in the end each sample was learnt from exactly once."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dovetail.operator.leader import LEASE
from helpers.cluster import DEVCLUSTER, REPOSITORY, KubeCluster, external, wait_for
from helpers.cluster_jobs import PACED_TEMPLATE, ClusterJob, is_true, kill, paced, tiny_manifest
from helpers.jobs import events

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(external() is not None, reason="the cluster's components must be ours to break"),
]
SYSTEM = "faults-system"
ITERATIONS, PROMPTS, PACE_SECONDS = 120, 8, 4.0
PEER_TIMEOUT_SECONDS = 20
ETCD_SECONDS = 30
START_SECONDS, RECOVERY_SECONDS = 600.0, 400.0


@pytest.fixture(scope="module")
def chart(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two replicas of the operator, as Helm installs them."""
    crd = str(REPOSITORY / "crds/rlhfjobs.dovetail.dev.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", crd)
    values = tmp_path_factory.mktemp("chart") / "values.yaml"
    values.write_text(
        json.dumps({"crds": {"enabled": False}, "api": {"enabled": False}, "jobs": {"podTemplate": PACED_TEMPLATE}})
    )
    images = str(DEVCLUSTER / "manifests/dovetail-values.yaml")
    place = ("faults", str(REPOSITORY / "helm/dovetail"), "-n", SYSTEM, "--create-namespace")
    cluster.helm("upgrade", "--install", *place, "-f", images, "-f", str(values))
    try:
        deployment = "deployment/faults-dovetail-operator"
        cluster.kubectl("rollout", "status", "-n", SYSTEM, deployment, "--timeout=300s", timeout=330)
        yield
    finally:
        cluster.helm("uninstall", "faults", "-n", SYSTEM, "--wait")


# Each does its damage, mends what does not mend by itself, and returns the groups whose pods must be new.


def delete_trainer(job: ClusterJob) -> set[str]:
    job.cluster.kubectl("delete", "pod", "-n", job.namespace, job.pods()["a100"]["metadata"]["name"])
    return {"a100"}


def kill_rollout(job: ClusterJob) -> set[str]:
    job.kill("v100", "dovetail.rollout.server")
    return {"v100"}


def kill_coordinator(job: ClusterJob) -> set[str]:
    job.kill("coordinator", "dovetail.coordinator.main")
    return {"coordinator"}


def restart_kubelet(job: ClusterJob) -> set[str]:
    job.cluster.devcluster("restart", "kubelet-a10")
    return set()


def drain_node(job: ClusterJob) -> set[str]:
    """Of a rollout that does not share it with the coordinator; the other rollout goes on alone meanwhile."""
    pods = job.pods()
    group = "v100" if pods["coordinator"]["spec"]["nodeName"] != "v100" else "a10"
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s")
    job.cluster.kubectl("drain", group, *words, timeout=180)
    try:
        assert group not in job.uids() or job.uids()[group] != pods[group]["metadata"]["uid"]
        go_on(job, 2)
    finally:
        job.cluster.kubectl("uncordon", group)
    return {group}


def restart_api_server(job: ClusterJob) -> set[str]:
    job.cluster.devcluster("restart", "kube-apiserver")
    wait_for_answers(job.cluster)
    return set()


def stop_etcd(job: ClusterJob) -> set[str]:
    job.cluster.devcluster("stop", "etcd")
    try:
        time.sleep(ETCD_SECONDS)
    finally:
        job.cluster.devcluster("start", "etcd")
    wait_for_answers(job.cluster)
    return set()


def kill_leader(job: ClusterJob) -> set[str]:
    """SIGKILL, so that it cannot give its lease back."""
    kill("dovetail.operator.main", "DOVETAIL_IDENTITY", holder(job.cluster))
    # Whoever leads now writes the status.
    target = job.iteration() + 1
    wait_for("the next leader", lambda: job.document()["status"]["iteration"] >= target, 120)
    return set()


def cut_network(job: ClusterJob) -> set[str]:
    """Between the trainer and a rollout, past the time after which a silent peer counts as dead."""
    one, other = (job.pods()[group]["status"]["podIP"] for group in ("a100", "a10"))
    for rule in ("-I", "-D"):
        for source, target in ((one, other), (other, one)):
            words = ("FORWARD", "-s", source, "-d", target, "-j", "DROP")
            job.cluster.devcluster("exec", "--", "iptables", rule, *words)
        if rule == "-I":
            time.sleep(PEER_TIMEOUT_SECONDS + 5)
            go_on(job, 1)
    return set()


def holder(cluster: KubeCluster) -> str:
    """The pod of the operator that leads."""
    lease = cluster.get("lease", LEASE, "-n", SYSTEM) or {}
    return str(lease.get("spec", {}).get("holderIdentity") or "")


def wait_for_answers(cluster: KubeCluster) -> None:
    wait_for("the API server", lambda: cluster.try_kubectl("get", "--raw", "/readyz").returncode == 0, 120)


def has_new(job: ClusterJob, groups: set[str], before: dict[str, str]) -> bool:
    """Whether these groups have other pods than before: kubelets take a moment to notice a death."""
    now = job.uids()
    return all(now.get(group, before[group]) != before[group] for group in groups)


def go_on(job: ClusterJob, iterations: int) -> None:
    """Until so many more iterations are done."""
    target = job.iteration() + iterations
    wait_for(f"iteration {target}", lambda: job.iteration() >= target, RECOVERY_SECONDS)


FAULTS: list[Callable[[ClusterJob], set[str]]] = [
    delete_trainer,
    kill_rollout,
    kill_coordinator,
    restart_kubelet,
    drain_node,
    restart_api_server,
    stop_etcd,
    kill_leader,
    cut_network,
]


def test_a_job_survives_every_fault_and_learns_from_each_sample_once(
    cluster: KubeCluster, namespace: str, chart: None, record_property: Callable[[str, object], None]
) -> None:
    cluster.apply(*paced(manifest(namespace), PACE_SECONDS), namespace=namespace)
    job = ClusterJob(cluster, namespace)
    wait_for(
        "an iteration", lambda: job.condition("Running").get("status") == "True" and job.iteration(), START_SECONDS
    )
    for fault in FAULTS:
        began, before, last = time.monotonic(), job.uids(), job.iteration()
        expected = fault(job)
        wait_for(f"new pods after {fault.__name__}", partial(has_new, job, expected, before), RECOVERY_SECONDS)
        wait_for(f"all pods after {fault.__name__}", job.whole, RECOVERY_SECONDS)
        go_on(job, 1)
        after = job.uids()
        replaced = {group for group in before if after[group] != before[group]}
        told = f"{time.monotonic() - began:.0f} s, iterations {last} to {job.iteration()}, new pods: {sorted(replaced)}"
        record_property(fault.__name__, told)
        print(f"{fault.__name__}: {told}")
        assert replaced == expected, fault.__name__
        assert not is_true(job.document(), "Completed"), "the job must outlast its faults"
    job.hurry()
    wait_for("the end", lambda: is_true(job.document(), "Completed"), RECOVERY_SECONDS)
    restarts = [
        c["restartCount"]
        for p in cluster.get("pods", "-n", namespace)["items"]
        for c in p["status"]["containerStatuses"]
    ]
    assert not any(restarts)
    with sqlite3.connect(f"file:{job.run_dir()}/store.sqlite?mode=ro", uri=True) as store:
        rows = store.execute(
            "SELECT iteration, prompt_index, sample_index, state FROM samples ORDER BY 1, 2, 3"
        ).fetchall()
    assert rows == [(i, p, 0, "trained") for i in range(1, ITERATIONS + 1) for p in range(PROMPTS)]
    finished = [event["iteration"] for event in events(job.run_dir(), "iteration.finished")]
    assert finished == list(range(1, ITERATIONS + 1)), "each iteration once, in order"


def manifest(namespace: str) -> dict[str, Any]:
    document = tiny_manifest(namespace, ITERATIONS, PROMPTS)
    spec = document["spec"]
    spec["checkpoint"] = {"everySteps": 1000}  # so that the store keeps every sample
    spec["failurePolicy"]["peerTimeoutSeconds"] = PEER_TIMEOUT_SECONDS
    return document
