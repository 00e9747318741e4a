"""One running job on real kubelets, under the chart's operator, that suffers one fault after the other.

It goes on after each, nothing restarts that did not fail, and in the end each sample was learnt from exactly once."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from devcluster.settings import NODES, find

from dovetail.operator.cluster.leader import LEASE
from dovetail.pod.main import STEADY_SECONDS
from helpers.cluster import DEVCLUSTER, REPOSITORY, KubeCluster, external, wait_for
from helpers.cluster_jobs import PACED_TEMPLATE, PRODUCTS, ClusterJob, is_true, kill, paced, tiny_manifest
from helpers.jobs import events

pytestmark = [
    pytest.mark.skipif(external() is not None, reason="the cluster's components must be ours to break"),
]
SYSTEM = "faults-system"
PROMPTS = 8
# Added to an iteration, that few go by: at all times; while pods start, who need the CPUs.
PACE_SECONDS, STARTING_PACE_SECONDS = 3.0, 60.0
PEER_TIMEOUT_SECONDS = 20
ETCD_SECONDS = 30
GRACE_SECONDS = 500
START_SECONDS, RECOVERY_SECONDS = 1800.0, 1200.0


@pytest.fixture(scope="module")
def chart(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two replicas of the operator, as Helm installs them."""
    crd = str(REPOSITORY / "helm/dovetail/files/crds")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", crd)
    values = tmp_path_factory.mktemp("chart") / "values.yaml"
    values.write_text(
        json.dumps(
            {
                "crds": {"enabled": False},
                "api": {"enabled": False},
                "jobs": {"podTemplate": PACED_TEMPLATE},
                "tenants": {"longestGraceSeconds": GRACE_SECONDS},
            }
        )
    )
    images = str(DEVCLUSTER / "manifests/dovetail-values.yaml")
    place = ("faults", str(REPOSITORY / "helm/dovetail"), "-n", SYSTEM, "--create-namespace")
    cluster.helm("upgrade", "--install", *place, "-f", images, "-f", str(values))
    try:
        deployment = "deployment/faults-dovetail-operator"
        cluster.kubectl("rollout", "status", "-n", SYSTEM, deployment, "--timeout=900s", timeout=930)
        yield
    finally:
        cluster.helm("uninstall", "faults", "-n", SYSTEM, "--wait")


# Each does its damage, mends what does not mend by itself, and returns the groups whose pods must be new.


def delete_pod(group: str, job: ClusterJob) -> set[str]:
    job.cluster.delete("pod", "-n", job.namespace, job.pods()[group]["metadata"]["name"])
    return {group}


def drain_trainer(job: ClusterJob) -> set[str]:
    """Before its pod ends, its steps are in a checkpoint. No other one is due. With a lag the trainers may need an
    older version of the weights, and then they start from an older checkpoint."""
    done, loads = job.iteration(), len(events(job.run_dir(), "trainers.load"))
    groups = delete_pod("a100", job)
    new = job.wait_for("a load", lambda: events(job.run_dir(), "trainers.load")[loads:], RECOVERY_SECONDS)
    saved = events(job.run_dir(), "checkpoint.saved")[-1]
    assert saved["step"] >= done
    assert saved["time"] < new[0]["time"]
    if not job.document()["spec"]["ppo"]["lag"]:
        assert new[0]["checkpoint_step"] == saved["step"]
    return groups


def kill_process(group: str, module: str, job: ClusterJob) -> set[str]:
    """A server or scorer that has worked for a while is started again in its pod; of any other process the pod is
    new."""
    if not module.startswith("dovetail.rollout"):
        job.kill(group, module)
        return {group}
    job.pace(STARTING_PACE_SECONDS)
    job.wait_for(f"{group} is steady", partial(is_steady, job, group), STEADY_SECONDS + RECOVERY_SECONDS)
    job.pace(PACE_SECONDS)
    job.kill(group, module)
    return set()


def is_steady(job: ClusterJob, group: str) -> bool:
    """Whether the processes of a group's pod would be started again in it."""
    begun = [e["time"] for e in events(job.run_dir(), "instance.registered") if str(e["instance"]).startswith(group)]
    return time.time() - max(begun) > STEADY_SECONDS


def restart_kubelet(job: ClusterJob) -> set[str]:
    job.cluster.devcluster("restart", "kubelet-a10")
    return set()


def drain_node(job: ClusterJob) -> set[str]:
    """Of a rollout that does not share it with the coordinator; the other rollout goes on alone meanwhile."""
    pods = job.pods()
    group = "v100" if pods["coordinator"]["spec"]["nodeName"] != "v100" else "a10"
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=900s")
    job.cluster.kubectl("drain", group, *words, timeout=930)
    try:
        assert job.uids().get(group) != pods[group]["metadata"]["uid"]
        go_on(job, 2)
    finally:
        job.cluster.kubectl("uncordon", group)
    return {group}


def upgrade_pool(job: ClusterJob) -> set[str]:
    """All nodes are cordoned and then drained one after the other, so that no pod finds a node meanwhile. Only the
    job's pods go: the pool has no node for the operator, whose budget protects its last replica."""
    nodes = list(PRODUCTS)
    try:
        job.cluster.kubectl("cordon", *nodes)
        words = ("--pod-selector=dovetail.dev/job=tiny", "--delete-emptydir-data", "--timeout=900s")
        for node in nodes:
            job.cluster.kubectl("drain", node, *words, timeout=930)
        told = job.condition("Disrupted")
        assert (told["status"], told["reason"]) == ("True", "EvictionByEvictionAPI")
        assert "which was cordoned by kubectl" in told["message"]
    finally:
        job.cluster.kubectl("uncordon", *nodes)
    job.wait_for("the end of the disruption", lambda: job.condition("Disrupted")["status"] == "False", RECOVERY_SECONDS)
    return {"coordinator", *PRODUCTS}


def ban_node(job: ClusterJob) -> set[str]:
    """By a taint that lets no pod stay."""
    pods = job.pods()
    group = "v100" if pods["coordinator"]["spec"]["nodeName"] != "v100" else "a10"
    job.cluster.kubectl("taint", "node", group, "example.com/repair=:NoExecute")
    try:
        told = job.wait_for("the disruption", lambda: disrupted(job), RECOVERY_SECONDS)
        assert told["reason"] == "DeletionByTaintManager"
        assert f"node {group}, which has the taint example.com/repair:NoExecute" in told["message"]
    finally:
        job.cluster.kubectl("taint", "node", group, "example.com/repair-")
    return {group}


def delete_node(job: ClusterJob) -> set[str]:
    """And its kubelet registers it again."""
    pods = job.pods()
    group = "v100" if pods["coordinator"]["spec"]["nodeName"] != "v100" else "a10"
    job.cluster.kubectl("delete", "node", group)
    told = job.wait_for("the disruption", lambda: disrupted(job), RECOVERY_SECONDS)
    assert told["reason"] == "DeletionByPodGC"
    job.cluster.devcluster("restart", f"kubelet-{group}")
    return {group}


@contextmanager
def kubelet_keeps(free: str, of: str, job: ClusterJob) -> Iterator[str]:
    """While a node's kubelet is to keep so much free, and evicts pods where less is. Not as a hard limit, which it
    would take off what the node offers. The group on the node is yielded when the kubelet knows its pod."""
    cluster = find(str(job.cluster.name))
    assert cluster is not None
    pods = job.pods()
    group = "v100" if pods["coordinator"]["spec"]["nodeName"] != "v100" else "a10"
    folder = cluster.node_state(next(node for node in NODES if node.name == group))
    before = (folder / "kubelet.json").read_text()
    soft = {"evictionSoft": {of: free}, "evictionSoftGracePeriod": {of: "1s"}}
    changed = json.loads(before) | soft | {"evictionMaxPodGracePeriod": GRACE_SECONDS}
    known, name = f"/api/v1/nodes/{group}/proxy/pods", pods[group]["metadata"]["name"]
    try:
        (folder / "kubelet.json").write_text(json.dumps(changed))
        job.cluster.devcluster("restart", f"kubelet-{group}")
        wait_for("the kubelet", lambda: name in job.cluster.try_kubectl("get", "--raw", known).stdout)
        yield group
    finally:
        (folder / "kubelet.json").write_text(before)
        job.cluster.devcluster("restart", f"kubelet-{group}")


def lack(resource: str, job: ClusterJob) -> None:
    told = job.wait_for("the disruption", lambda: disrupted(job), RECOVERY_SECONDS)
    assert told["reason"] == "TerminationByKubelet"
    assert f"low on resource: {resource}" in told["message"]


def run_out_of_memory(job: ClusterJob) -> set[str]:
    """More is to be free than can be."""
    with kubelet_keeps("99.9%", "memory.available", job) as group:
        lack("memory", job)
    return {group}


def fill_disk(job: ClusterJob) -> set[str]:
    """A kubelet that finds its disk full when it starts would not take the pods that it has."""
    folder = job.run_dir()
    with (
        kubelet_keeps(str(shutil.disk_usage(folder).free - (3 << 30)), "nodefs.available", job) as group,
        tempfile.TemporaryFile(dir=folder) as full,
    ):
        os.posix_fallocate(full.fileno(), 0, 6 << 30)
        lack("ephemeral-storage", job)
    return {group}


def disrupted(job: ClusterJob) -> dict[str, Any]:
    """The condition, if it is true."""
    told = job.condition("Disrupted")
    return told if told.get("status") == "True" else {}


def take_node(job: ClusterJob) -> set[str]:
    """As a cloud that takes a spot node back, and gives it again: the rollout leaves it."""
    notice, before = "aws-node-termination-handler/spot-itn", job.uids()["v100"]
    job.cluster.kubectl("taint", "node", "v100", f"{notice}=soon:NoSchedule")
    try:
        job.wait_for("the rollout to leave", lambda: job.uids().get("v100") != before, RECOVERY_SECONDS)
        go_on(job, 1)
    finally:
        job.cluster.kubectl("taint", "node", "v100", f"{notice}-")
    return {"v100"}


def restart_api_server(job: ClusterJob) -> set[str]:
    """By SIGKILL: asked to end, it would wait half a minute for its clients."""
    job.cluster.devcluster("kill", "kube-apiserver")
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
    kill("dovetail.operator.main", "DOVETAIL_IDENTITY", wait_for("a leader", lambda: holder(job.cluster)))
    # Whoever leads now writes the status.
    target = job.iteration() + 1
    job.wait_for("the next leader", lambda: job.document()["status"]["iteration"] >= target, RECOVERY_SECONDS)
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
    wait_for("the API server", lambda: cluster.try_kubectl("get", "--raw", "/readyz").returncode == 0)


def born(job: ClusterJob) -> dict[str, int]:
    """How often each rollout and scorer has registered as a new process."""
    return Counter(str(event["instance"]) for event in events(job.run_dir(), "instance.registered"))


def at_work(job: ClusterJob, reborn: dict[str, int]) -> bool:
    """Whether each rollout and scorer may take work, and those of `reborn` are newer than they were."""
    health = {str(event["instance"]): event["health"] for event in events(job.run_dir(), "instance.health")}
    now = born(job)
    return set(health.values()) == {"healthy"} and all(now[name] > count for name, count in reborn.items())


def has_new(job: ClusterJob, groups: set[str], before: dict[str, str]) -> bool:
    """Whether these groups have other pods than before: kubelets take a moment to notice a death."""
    now = job.uids()
    return all(now.get(group, before[group]) != before[group] for group in groups)


def go_on(job: ClusterJob, iterations: int) -> None:
    """Until so many more iterations are done."""
    target = job.iteration() + iterations
    job.wait_for(f"iteration {target}", lambda: job.iteration() >= target, RECOVERY_SECONDS)


FAULTS: dict[str, Callable[[ClusterJob], set[str]]] = {
    "trainer's pod deleted": drain_trainer,
    "coordinator killed": partial(kill_process, "coordinator", "dovetail.coordinator.main"),
    "rollout's pod deleted": partial(delete_pod, "a10"),
    "kubelet restarted": restart_kubelet,
    "vLLM killed": partial(kill_process, "v100", "dovetail.rollout.serving.vllm_server"),
    "node drained": drain_node,
    "node banned": ban_node,
    "node deleted": delete_node,
    "pool upgraded": upgrade_pool,
    "node taken and given back": take_node,
    "node low on memory": run_out_of_memory,
    "node low on disk": fill_disk,
    "API server restarted": restart_api_server,
    "trainer killed": partial(kill_process, "a100", "dovetail.trainer.main"),
    "etcd stopped": stop_etcd,
    "operator's leader killed": kill_leader,
    "coordinator's pod deleted": partial(delete_pod, "coordinator"),
    "network cut": cut_network,
    "scorer killed": partial(kill_process, "a10", "dovetail.rollout.scoring.scorer"),
}
# The processes that are new after a fault, where it is said which.
RETURNS = {
    "vLLM killed": ("v100-0",),
    "scorer killed": ("a10-0-scorer",),
    "rollout's pod deleted": ("a10-0", "a10-0-scorer"),
    "node taken and given back": ("v100-0", "v100-0-scorer"),
}


# A pod of each kind that comes anew, nodes that go, and processes that hear nothing any more.
# tests/cluster/test_operator_api.py has an API server that is away and an operator that takes over.
ALWAYS = ("coordinator killed", "trainer killed", "node drained", "network cut")


@pytest.mark.parametrize(
    ("lag", "names", "iterations"),
    [
        pytest.param(0, ALWAYS, 40, id="some"),
        pytest.param(0, tuple(FAULTS), 240, id="all", marks=pytest.mark.nightly),
        pytest.param(1, tuple(FAULTS), 240, id="all-lag-1", marks=pytest.mark.nightly),
    ],
)
def test_a_job_survives_every_fault_and_learns_from_each_sample_once(
    cluster: KubeCluster,
    namespace: str,
    chart: None,
    lag: int,
    names: tuple[str, ...],
    iterations: int,
    record_property: Callable[[str, object], None],
) -> None:
    cluster.apply(*paced(manifest(namespace, lag, iterations), PACE_SECONDS), namespace=namespace)
    job = ClusterJob(cluster, namespace)
    wait_for(
        "an iteration", lambda: job.condition("Running").get("status") == "True" and job.iteration(), START_SECONDS
    )
    job.pace(PACE_SECONDS)
    for name in names:
        fault = FAULTS[name]
        began, before, last, births = time.monotonic(), job.uids(), job.iteration(), born(job)
        expected = fault(job)
        done = time.monotonic()
        if expected:
            job.pace(STARTING_PACE_SECONDS)
            job.wait_for(f"new pods: {name}", partial(has_new, job, expected, before), RECOVERY_SECONDS)
        returned = {i: n for i, n in births.items() if i in RETURNS.get(name, ())}
        job.wait_for(f"all at work: {name}", partial(at_work, job, returned), RECOVERY_SECONDS)
        working = time.monotonic()
        job.wait_for(f"all pods: {name}", job.whole, RECOVERY_SECONDS)
        whole = time.monotonic()
        job.pace(PACE_SECONDS)
        go_on(job, 1)
        after, end = job.uids(), time.monotonic()
        replaced = {group for group in before if after[group] != before[group]}
        times = (done - began, working - done, whole - working, end - whole)
        parts = "{:.0f} s of fault, {:.0f} s until all work, {:.0f} s more for pods, {:.0f} s to go on".format(*times)
        done_now = f"iterations {last} to {job.iteration()}"
        told = f"{end - began:.0f} s ({parts}), {done_now}, new pods: {sorted(replaced)}"
        record_property(name, told)
        print(f"{name}: {told}", flush=True)
        assert replaced == expected, name
        assert not is_true(job.document(), "Completed"), "the job must outlast its faults"
    job.pace(0)
    job.wait_for("the end", lambda: is_true(job.document(), "Completed"), RECOVERY_SECONDS)
    restarts = [
        c["restartCount"] for p in cluster.items("pods", "-n", namespace) for c in p["status"]["containerStatuses"]
    ]
    assert not any(restarts)
    with sqlite3.connect(f"file:{job.run_dir()}/store.sqlite?mode=ro", uri=True) as store:
        rows = store.execute(
            "SELECT iteration, prompt_index, sample_index, state FROM samples ORDER BY 1, 2, 3"
        ).fetchall()
    assert rows == [(i, p, 0, "trained") for i in range(1, iterations + 1) for p in range(PROMPTS)]
    finished = [event["iteration"] for event in events(job.run_dir(), "iteration.finished")]
    assert finished == list(range(1, iterations + 1)), "each iteration once, in order"


def manifest(namespace: str, lag: int, iterations: int) -> dict[str, Any]:
    # The pod ends as soon as its checkpoint is written, which may take long on a busy machine.
    patient = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": GRACE_SECONDS}}}
    document = tiny_manifest(namespace, iterations, PROMPTS, a100=patient)
    spec = document["spec"]
    spec["ppo"]["lag"] = lag
    spec["checkpoint"] = {"everySteps": 1000}  # so that the store keeps every sample
    spec["failurePolicy"]["peerTimeoutSeconds"] = PEER_TIMEOUT_SECONDS
    return document
