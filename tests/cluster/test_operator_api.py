"""The operator on a real API server, where no pod starts: objects, drift, rights, leadership, status."""

import json
import re
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dovetail.kube import names
from dovetail.operator.status_rate import STARTING_SECONDS
from helpers.breakable import BreakableProxy
from helpers.cluster import REPOSITORY, KubeCluster, wait_for
from helpers.operator_process import SYSTEM, OperatorProcess, established, install, kubeconfig, operator, preserving
from helpers.patience import PATIENCE

NAMESPACES = ["jobs-a", "jobs-b"]
KINDS = (
    *("jobset", "configmap", "service", "serviceaccount", "role", "rolebinding", "networkpolicy"),
    *("poddisruptionbudget", "persistentvolumeclaim", "secret"),
)


def manifest(name: str = "demo", namespace: str = NAMESPACES[0], **spec: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples/quickstart-cluster.yaml").read_text())
    document["metadata"] = {"name": name, "namespace": namespace}
    document["spec"] |= spec
    return document


def submit(server: KubeCluster, document: dict[str, Any]) -> None:
    server.apply(document, namespace=document["metadata"]["namespace"])


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    """With the CRDs, two namespaces, and the chart's rights in these two alone."""
    if api_server.get("crd", "jobsets.jobset.x-k8s.io") is None:
        api_server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    for name in NAMESPACES:
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    install(api_server, NAMESPACES)
    established(api_server, "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io")
    return api_server


@pytest.fixture(scope="module")
def config(server: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kubeconfig(server, tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="module")
def leader(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """For the tests that need no operator of their own, which come last: there is one lease."""
    with operator(config, tmp_path_factory.mktemp("leader"), "leader", NAMESPACES) as process:
        wait_for("leadership", process.leads)
        yield process


@pytest.fixture(autouse=True)
def clean(server: KubeCluster) -> Iterator[None]:
    """What a job made goes with it: by the garbage collector alone, also without an operator."""
    yield
    for namespace in NAMESPACES:
        server.delete("rlhfjobs", "--all", "-n", namespace)
        server.delete("pvc", "--all", "-n", namespace)  # kept
    selector = ("-l", names.UID_LABEL, "-o", "name")
    for namespace in NAMESPACES:
        words = ("get", ",".join(KINDS), "-n", namespace, *selector)
        wait_for("nothing left", lambda words=words: server.kubectl(*words) == "")


def condition(server: KubeCluster, kind: str, name: str = "demo", namespace: str = NAMESPACES[0]) -> dict[str, Any]:
    job = server.get("rlhfjob", name, "-n", namespace) or {}
    found = (job.get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {})


def owned(server: KubeCluster, kind: str, uid: str, namespace: str = NAMESPACES[0]) -> list[str]:
    things = server.items(kind, "-n", namespace)
    return [
        t["metadata"]["name"] for t in things if any(o["uid"] == uid for o in t["metadata"].get("ownerReferences", []))
    ]


def requests(process: OperatorProcess) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=PATIENCE) as reply:
        lines = reply.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("dovetail_operator_api_requests_total ")))


def looks(process: OperatorProcess) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=PATIENCE) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("dovetail_operator_reconciles_total")]
    return sum(float(line.split()[1]) for line in found)


def test_a_steady_state_asks_and_writes_nothing(server: KubeCluster, config: Path, tmp_path: Path) -> None:
    with operator(config, tmp_path, "one", NAMESPACES) as process:
        wait_for("leadership", process.leads)
        submit(server, manifest())
        wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
        wait_for("the status", lambda: condition(server, "Planned").get("status") == "True")
        wait_for("rest", lambda: resting(server, process))
        with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/healthz", timeout=PATIENCE) as reply:
            assert reply.read() == b"ok"
        assert process.stop() == 0


def look(server: KubeCluster, process: OperatorProcess) -> None:
    """Let the operator look at the job a few times, for events that mean nothing to it."""
    for number in range(3):
        before = looks(process)
        touched = f"example.com/touched={uuid.uuid4()}"
        server.kubectl("annotate", "--overwrite", "jobset", "demo", "-n", NAMESPACES[0], touched)
        wait_for(f"look {number}", lambda before=before: looks(process) > before)  # type: ignore[misc]


def resting(server: KubeCluster, process: OperatorProcess) -> bool:
    """Whether the operator asks and writes nothing, for longer than it may put off the write of a status. No JobSet
    controller runs, so it asks for that one's Events, once a minute."""
    before, version, began = requests(process), versioned(server), time.monotonic()
    while time.monotonic() - began < STARTING_SECONDS:
        look(server, process)
    minutes = (time.monotonic() - began) / 60
    return requests(process) - before <= 1 + minutes and versioned(server) == version


def versioned(server: KubeCluster) -> str:
    return str(server.get("rlhfjob", "demo", "-n", NAMESPACES[0])["metadata"]["resourceVersion"])


def test_another_leader_takes_over(server: KubeCluster, config: Path, tmp_path: Path) -> None:
    with operator(config, tmp_path, "one", NAMESPACES) as first:
        wait_for("leadership", first.leads)
        with operator(config, tmp_path, "two", NAMESPACES) as second:
            wait_for("the second's probes", second.answers)
            assert not second.leads()
            first.kill()
            wait_for("the second leads", second.leads)
            submit(server, manifest())
            wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
            with operator(config, tmp_path, "three", NAMESPACES) as third:
                wait_for("the third's probes", third.answers)
                assert second.stop() == 0  # gives the lease back: no need to wait for its end
                wait_for("the third leads", third.leads)


def test_nothing_is_lost_while_the_api_server_is_away(server: KubeCluster, config: Path, tmp_path: Path) -> None:
    document = json.loads(config.read_text())
    address = urllib.parse.urlsplit(document["clusters"][0]["cluster"]["server"])
    proxy = BreakableProxy(str(address.hostname), int(address.port or 443))
    try:
        # The server's certificate is not for the proxy's address.
        cluster = {"server": f"https://127.0.0.1:{proxy.port}", "insecure-skip-tls-verify": True}
        document["clusters"][0]["cluster"] = cluster
        (mine := tmp_path / "broken.kubeconfig").write_text(json.dumps(document))
        with operator(mine, tmp_path, "one", NAMESPACES) as process:
            wait_for("leadership", process.leads)
            submit(server, manifest())
            submit(server, manifest("other"))
            for name in ("demo", "other"):
                wait_for("the JobSet", lambda name=name: server.get("jobset", name, "-n", NAMESPACES[0]))
            proxy.cut()
            server.kubectl("delete", "jobset", "demo", "-n", NAMESPACES[0], "--wait=true")
            server.kubectl("delete", "rlhfjob", "other", "-n", NAMESPACES[0], "--wait=true")
            submit(server, manifest("third"))
            proxy.mend()
            wait_for("the JobSet again", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
            wait_for("the new job's", lambda: server.get("jobset", "third", "-n", NAMESPACES[0]))
            wait_for("the deleted job's to go", lambda: server.get("jobset", "other", "-n", NAMESPACES[0]) is None)
            assert process.stop() == 0, "it was the same process all the time"
    finally:
        proxy.close()


def make_job(server: KubeCluster, uid: str, group: str, name: str = "demo", **pod_spec: Any) -> None:
    """What the JobSet controller would make for a group of a job."""
    jobset = server.get("jobset", name, "-n", NAMESPACES[0])
    owner = {key: jobset[key] for key in ("apiVersion", "kind")} | {"name": name, "controller": True}
    labels = names.labels(name, uid, group) | {names.ROLE_LABEL: group}
    metadata = {"name": f"{name}-{group}-0", "labels": labels}
    metadata |= {"ownerReferences": [owner | {"uid": jobset["metadata"]["uid"]}]}
    pod = {"containers": [{"name": "dovetail", "image": "none"}], "restartPolicy": "Never"} | pod_spec
    spec = {"template": {"metadata": {"labels": labels}, "spec": pod}}
    server.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}, namespace=NAMESPACES[0])


@contextmanager
def a_running_pod(server: KubeCluster, uid: str, group: str = "train", **pod_spec: Any) -> Iterator[None]:
    """Of job demo, as the operator sees it; nothing runs here. The Job is one of its JobSet's, and makes the pod."""
    where = ("-n", NAMESPACES[0])
    make_job(server, uid, group, **pod_spec)
    words = ("pods", *where, "-l", f"batch.kubernetes.io/job-name=demo-{group}-0")
    found = wait_for("the pod", lambda: server.items(*words))[0]["metadata"]["name"]
    patch = json.dumps({"status": {"phase": "Running"}})
    server.kubectl("patch", "pod", found, *where, "--subresource=status", "--type=merge", "-p", patch)
    yield
    server.kubectl("delete", "job", f"demo-{group}-0", *where)
    server.kubectl("delete", "pod", found, *where, "--force", "--grace-period=0", "--ignore-not-found")


def surplus_pods(server: KubeCluster) -> list[dict[str, Any]]:
    return server.items("pods", "-n", NAMESPACES[0], "-l", f"{names.SURPLUS_LABEL}=true")


@pytest.fixture
def everywhere(server: KubeCluster, tmp_path: Path) -> Iterator[Path]:
    """With the chart's rights in all namespaces."""
    install(server, [])
    yield kubeconfig(server, tmp_path)
    server.kubectl("delete", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/instance=dovetail")


def test_a_rollout_whose_node_gets_a_notice_is_drained_and_comes_back(
    server: KubeCluster, everywhere: Path, tmp_path: Path
) -> None:
    """Its pod is deleted as the API server deletes, with its grace period. Nobody counts that as a failure."""
    where = ("-n", NAMESPACES[0])
    with operator(everywhere, tmp_path, "notices", [], DOVETAIL_NOTICE_TAINTS="example.com/leaving") as process:
        wait_for("leadership", process.leads)
        submit(server, manifest())
        uid = server.get("rlhfjob", "demo", *where)["metadata"]["uid"]
        wait_for("the JobSet", lambda: owned(server, "jobset", uid))
        with a_running_pod(server, uid, "coordinator"):
            (pod,) = wait_for("a surplus rollout", lambda: surplus_pods(server))
            name = pod["metadata"]["name"]
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "spot-1"}}
            server.apply(node)
            try:
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
                binding |= {"target": {"apiVersion": "v1", "kind": "Node", "name": "spot-1"}}
                path = f"/api/v1/namespaces/{NAMESPACES[0]}/pods/{name}/binding"
                server.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
                wait_for("the binding", lambda: server.get("pod", name, *where)["spec"].get("nodeName"))
                server.kubectl("taint", "node", "spot-1", "example.com/leaving=soon:NoSchedule")
                going = wait_for(
                    "the notice", lambda: server.get("pod", name, *where)["metadata"].get("deletionTimestamp") and 1
                )
                assert going
                pod = server.get("pod", name, *where)
                assert pod["metadata"]["deletionGracePeriodSeconds"] == pod["spec"]["terminationGracePeriodSeconds"]
                # As the kubelet of a pod that was drained says.
                words = (name, *where, "--subresource=status", "--type=merge")
                server.kubectl("patch", "pod", *words, "-p", json.dumps({"status": {"phase": "Succeeded"}}))
                server.kubectl("delete", "pod", name, *where, "--force", "--grace-period=0", "--ignore-not-found")
                again = wait_for(
                    "the next one", lambda: [p for p in surplus_pods(server) if p["metadata"]["name"] != name]
                )
                assert again[0]["metadata"]["ownerReferences"][0]["uid"] != pod["metadata"]["ownerReferences"][0]["uid"]
            finally:
                server.kubectl("delete", "node", "spot-1")
        assert process.events("reconcile.failed") == []
        assert [event["node"] for event in process.events("node.notice")] == ["spot-1"]
        assert condition(server, "Degraded").get("status") != "True"


def test_of_two_releases_for_all_namespaces_the_second_refuses_to_work(
    server: KubeCluster, everywhere: Path, tmp_path: Path
) -> None:
    """They would undo each other's work for ever."""
    other = "second-system"
    install(server, [], name="second", system=other)
    mine = {"DOVETAIL_NAMESPACE": other}
    second = kubeconfig(server, tmp_path, "second-dovetail-operator", other)
    try:
        with operator(everywhere, tmp_path, "first", []) as first:
            wait_for("leadership", first.leads)
            with operator(second, tmp_path, "refused", [], **mine) as process:
                assert process.process.wait(PATIENCE) == 2
                (refused,) = process.events("leader.refused")
                assert f"the operator in namespace {SYSTEM} serves all namespaces" in refused["error"]
                assert not process.events("leader.started")
            assert first.leads()
            assert not first.events("leader.lost")
            first.stop()
        with operator(second, tmp_path, "accepted", [], **mine) as process:
            wait_for("leadership", process.leads)
            process.stop()
    finally:
        server.kubectl("delete", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/instance=second")


def evict(server: KubeCluster, pod: str, node: str) -> None:
    """As `kubectl drain` does."""
    server.kubectl("cordon", node)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACES[0]}}
    path = f"/api/v1/namespaces/{NAMESPACES[0]}/pods/{pod}/eviction"
    # The budget is lifted when the operator has seen that training stands.
    words = ("create", "--raw", path, "-f", "-")
    wait_for("the eviction", lambda: server.try_kubectl(*words, stdin=json.dumps(eviction)).returncode == 0)


def run_out_of_memory(server: KubeCluster, pod: str, node: str) -> None:
    """As a kubelet says it of a pod that it ended because its node has no memory left."""
    ended = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    ended |= {"message": "The node was low on resource: memory.", "lastTransitionTime": "2030-01-01T00:00:00Z"}
    status = {"phase": "Failed", "reason": "Evicted", "conditions": [ended]}
    words = ("patch", "pod", pod, "-n", NAMESPACES[0], "--subresource=status", "--type=merge")
    server.kubectl(*words, "-p", json.dumps({"status": status}))


def test_who_took_a_pod_away_is_told(server: KubeCluster, everywhere: Path, tmp_path: Path) -> None:
    faults: dict[str, tuple[Callable[[str, str], Any], str]] = {
        "EvictionByEvictionAPI": (partial(evict, server), "which was cordoned by kubectl"),
        "DeletionByTaintManager": (
            lambda _, node: server.kubectl("taint", "node", node, "example.com/repair=:NoExecute"),
            "has the taint example.com/repair:NoExecute",
        ),
        "DeletionByPodGC": (lambda _, node: server.kubectl("delete", "node", node), "PodGC: node no longer exists"),
        "TerminationByKubelet": (partial(run_out_of_memory, server), "low on resource: memory"),
    }
    where = ("-n", NAMESPACES[0])
    with operator(everywhere, tmp_path, "disruptions", []) as process:
        wait_for("leadership", process.leads)
        submit(server, manifest())
        uid = server.get("rlhfjob", "demo", *where)["metadata"]["uid"]
        wait_for("the JobSet", lambda: owned(server, "jobset", uid))
        for number, (reason, (fault, told)) in enumerate(faults.items()):
            node = f"gpu-{number}"
            # The API server records who writes a node only if its first writer set something.
            server.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": {"pool": "gpus"}}})
            group = f"t{number}"  # no kubelet takes an evicted pod away
            with a_running_pod(server, uid, group, nodeName=node):
                words = ("pods", *where, "-l", f"batch.kubernetes.io/job-name=demo-{group}-0")
                pod = server.items(*words)[0]["metadata"]["name"]
                fault(pod, node)
                said = wait_for(
                    reason, lambda reason=reason: (c := condition(server, "Disrupted")).get("reason") == reason and c
                )
                assert said["status"] == "True"
                assert f"pod {pod} left node {node}" in said["message"]
                assert told in said["message"]
            server.kubectl("delete", "node", node, "--ignore-not-found")
        assert process.events("reconcile.failed") == []


def test_all_children_are_made_owned_and_corrected(server: KubeCluster, leader: OperatorProcess) -> None:
    submit(server, manifest())
    uid = server.get("rlhfjob", "demo", "-n", NAMESPACES[0])["metadata"]["uid"]
    wait_for("the JobSet", lambda: owned(server, "jobset", uid))
    # A claim that is kept belongs to nobody.
    made = dict.fromkeys(KINDS, 1) | {"poddisruptionbudget": 0, "persistentvolumeclaim": 0}
    wait_for("all children", lambda: {kind: len(owned(server, kind, uid)) for kind in KINDS} == made)
    with a_running_pod(server, uid):
        wait_for("a budget once there is a pod to protect", lambda: owned(server, "poddisruptionbudget", uid))
    wait_for("the status", lambda: condition(server, "Planned").get("status") == "True")
    assert server.get("secret", "demo-token", "-n", NAMESPACES[0])["immutable"] is True

    for kind in ("networkpolicy", "service", "jobset", "secret"):
        (name,) = owned(server, kind, uid)
        server.kubectl("delete", kind, name, "-n", NAMESPACES[0], "--wait=false")
    # The Secret is not watched: it comes back when a pod says that it is missing, or at the next resync.
    for kind in ("networkpolicy", "service", "jobset"):
        wait_for(f"the {kind} again", lambda kind=kind: owned(server, kind, uid))
    patch = json.dumps({"spec": {"ingress": []}})
    server.kubectl("patch", "networkpolicy", "demo", "-n", NAMESPACES[0], "--type=merge", "-p", patch)
    wait_for(
        "drift corrected",
        lambda: server.get("networkpolicy", "demo", "-n", NAMESPACES[0])["spec"].get("ingress"),
    )
    wait_for("its Event", lambda: events(server, "Planned", uid))
    assert leader.events("reconcile.failed") == []


def test_what_others_add_to_a_jobs_objects_starts_no_quarrel(server: KubeCluster, leader: OperatorProcess) -> None:
    """The API server keeps a port and an owner that others add to lists of ours, whatever is applied."""
    submit(server, manifest())
    wait_for("the status", lambda: condition(server, "Planned").get("status") == "True")
    more = [{"op": "add", "path": "/spec/ports/-", "value": {"name": "mine", "port": 9999}}]
    server.kubectl("patch", "service", "demo-coordinator", "-n", NAMESPACES[0], "--type=json", "-p", json.dumps(more))
    other = server.get("configmap", "kube-root-ca.crt", "-n", NAMESPACES[0])
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "kube-root-ca.crt", "uid": other["metadata"]["uid"]}
    more = [{"op": "add", "path": "/metadata/ownerReferences/-", "value": reference}]
    server.kubectl("patch", "sa", "demo-pods", "-n", NAMESPACES[0], "--type=json", "-p", json.dumps(more))
    wait_for("rest", lambda: resting(server, leader))
    ports = server.get("service", "demo-coordinator", "-n", NAMESPACES[0])["spec"]["ports"]
    assert "mine" in [port["name"] for port in ports]
    server.kubectl("delete", "service", "demo-coordinator", "-n", NAMESPACES[0])
    service = wait_for("the Service again", lambda: server.get("service", "demo-coordinator", "-n", NAMESPACES[0]))
    assert "mine" not in [port["name"] for port in service["spec"]["ports"]]
    server.delete("sa", "demo-pods", "-n", NAMESPACES[0])  # its other owner would keep it


@pytest.mark.nightly
def test_a_manifest_that_would_fill_the_operators_memory_is_refused(
    server: KubeCluster, leader: OperatorProcess
) -> None:
    """A value takes up to 25 times as much memory as JSON, and all RLHFJobs of a cluster are kept in memory."""
    before = psutil.Process(leader.process.pid).memory_info().rss
    names_of_jobs = [f"large-{n}" for n in range(6)]
    for name in names_of_jobs:
        document = manifest(name, suspend=True)
        document["spec"]["groups"][0]["podTemplate"] = {"spec": {"nonsense": [[]] * 400_000}}
        text = json.dumps(document)
        server.kubectl("create", "--validate=false", "-n", NAMESPACES[0], "-f", "-", stdin=text)
        # The API server itself takes seconds for each, and answers nothing meanwhile if it has to take all at once.
        refused = wait_for("a refusal", lambda name=name: condition(server, "Planned", name), PATIENCE)  # type: ignore[misc]
        assert (refused["status"], refused["reason"]) == ("False", "InvalidSpec")
        assert "at most 256 KiB and 10000 values are taken" in refused["message"]
    assert psutil.Process(leader.process.pid).memory_info().rss < before + (256 << 20)
    server.kubectl("delete", "rlhfjob", *names_of_jobs, "-n", NAMESPACES[0])
    submit(server, manifest())
    wait_for("the next job", lambda: condition(server, "Running"))


def test_an_odd_jobset_of_a_tenant_does_not_end_the_operator(server: KubeCluster, leader: OperatorProcess) -> None:
    """Whoever may create JobSets can give them our labels. JobSet's schema lets a template be empty."""
    labels = {names.UID_LABEL: "none", names.JOB_LABEL: "odd"}
    odd = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "odd", "namespace": NAMESPACES[1], "labels": labels},
        "spec": {"replicatedJobs": [{"name": "a", "template": {}}]},
    }
    server.apply(odd, namespace=NAMESPACES[1])
    submit(server, manifest())
    wait_for("another tenant's job", lambda: condition(server, "Running"))
    assert leader.process.poll() is None
    server.delete("jobset", "odd", "-n", NAMESPACES[1])


def test_a_surplus_rollout_that_worked_comes_back_before_its_job_would_make_it(
    server: KubeCluster, leader: OperatorProcess
) -> None:
    """By the Job controller's own back-off the next pod would come after 10 s at the earliest."""
    where = ("-n", NAMESPACES[0])
    submit(server, manifest())
    uid = server.get("rlhfjob", "demo", *where)["metadata"]["uid"]
    wait_for("the JobSet", lambda: owned(server, "jobset", uid))
    with a_running_pod(server, uid, "coordinator"):
        (pod,) = wait_for("a surplus rollout", lambda: surplus_pods(server))
        # From then on the Job controller waits. A machine that is slow has the time to be sooner.
        finished = datetime.now(UTC) + timedelta(minutes=2)
        times = {"startedAt": finished - timedelta(hours=1), "finishedAt": finished}
        ended = {"exitCode": 1} | {key: at.strftime("%Y-%m-%dT%H:%M:%SZ") for key, at in times.items()}
        container = {"name": "dovetail", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
        status = {"phase": "Failed", "containerStatuses": [container | {"state": {"terminated": ended}}]}
        words = (pod["metadata"]["name"], *where, "--subresource=status", "--type=merge")
        server.kubectl("patch", "pod", *words, "-p", json.dumps({"status": status}))
        new = wait_for(
            "the next one",
            lambda: [p for p in surplus_pods(server) if p["status"]["phase"] == "Pending"],
        )
        jobs = {p["metadata"]["ownerReferences"][0]["uid"] for p in (pod, *new)}
        assert len(jobs) == 2, "another Job made it"
    assert leader.events("reconcile.failed") == []


def test_suspend_and_resume(server: KubeCluster, leader: OperatorProcess) -> None:
    submit(server, manifest())
    first = wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    server.kubectl("patch", "rlhfjob", "demo", "-n", NAMESPACES[0], "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait_for("no JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]) is None)
    wait_for("Suspended", lambda: condition(server, "Suspended").get("reason") == "SuspendedByUser")
    assert server.get("persistentvolumeclaim", "demo-files", "-n", NAMESPACES[0])
    server.kubectl("patch", "rlhfjob", "demo", "-n", NAMESPACES[0], "--type=merge", "-p", '{"spec":{"suspend":false}}')
    again = wait_for("the JobSet again", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    wait_for("Suspended", lambda: condition(server, "Suspended").get("status") == "False")


def test_a_plan_that_does_not_fit_is_said(server: KubeCluster, leader: OperatorProcess) -> None:
    """Three ranks share no batch of 32 evenly, and a model of two layers has no three stages."""
    spec = manifest()["spec"]
    parallelism = {"parallelism": {"actor": {"pp": 1, "dp": 3}}}
    groups = [spec["groups"][0] | {"replicas": 2}, *spec["groups"][1:]]
    submit(server, manifest(groups=groups, plan=parallelism))
    wait_for("a refusal", lambda: condition(server, "Planned").get("status") == "False")
    refused = condition(server, "Planned")
    assert refused["reason"] in ("PlanInfeasible", "InvalidSpec")
    assert "spec.plan.parallelism.actor" in refused["message"]
    assert server.get("jobset", "demo", "-n", NAMESPACES[0]) is None
    parallelism = {"parallelism": {"actor": {"pp": 1, "dp": 2}}}
    submit(server, manifest(groups=groups, plan=parallelism))
    wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))


def test_two_jobs_of_one_name_in_two_namespaces(server: KubeCluster, leader: OperatorProcess) -> None:
    for namespace in NAMESPACES:
        submit(server, manifest(namespace=namespace))
    for namespace in NAMESPACES:
        uid = server.get("rlhfjob", "demo", "-n", namespace)["metadata"]["uid"]
        wait_for("the JobSet", lambda ns=namespace, uid=uid: owned(server, "jobset", uid, ns))
        wait_for("the secret", lambda ns=namespace, uid=uid: owned(server, "secret", uid, ns))
    tokens = {server.get("secret", "demo-token", "-n", ns)["data"]["token"] for ns in NAMESPACES}
    assert len(tokens) == 2


def events(server: KubeCluster, reason: str, uid: str) -> list[dict[str, Any]]:
    """Those about the job with this uid."""
    fields = f"--field-selector=reason={reason},involvedObject.uid={uid}"
    return server.items("events", "-n", NAMESPACES[0], fields)


def finish(server: KubeCluster, name: str = "demo", kind: str = "Completed") -> None:
    """What the JobSet controller would say."""
    stamp = "2026-01-01T00:00:00Z"
    conditions = [{"type": kind, "status": "True", "reason": "x", "message": "y", "lastTransitionTime": stamp}]
    patch = json.dumps({"status": {"conditions": conditions}})
    server.kubectl("patch", "jobset", name, "-n", NAMESPACES[0], "--subresource=status", "--type=merge", "-p", patch)


def test_after_the_end_nothing_comes_back(server: KubeCluster, leader: OperatorProcess) -> None:
    submit(server, manifest())
    wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    finish(server)
    wait_for("Completed", lambda: condition(server, "Completed").get("status") == "True")
    server.kubectl("delete", "jobset,service", "--all", "-n", NAMESPACES[0], "--wait=false")
    # A second job shows that the operator has looked at everything since.
    submit(server, manifest("other"))
    wait_for("the other JobSet", lambda: server.get("jobset", "other", "-n", NAMESPACES[0]))
    assert server.get("jobset", "demo", "-n", NAMESPACES[0]) is None
    assert server.get("service", "demo-coordinator", "-n", NAMESPACES[0]) is None


def test_a_failed_job_is_tried_again(server: KubeCluster, leader: OperatorProcess) -> None:
    submit(server, manifest())
    first = wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    token = server.get("secret", "demo-token", "-n", NAMESPACES[0])["data"]
    finish(server, kind="Failed")
    wait_for("Failed", lambda: condition(server, "Failed").get("status") == "True")
    server.kubectl("patch", "rlhfjob", "demo", "-n", NAMESPACES[0], "--type=merge", "-p", '{"spec":{"retry":1}}')
    wait_for("not failed", lambda: condition(server, "Failed").get("reason") == "TriedAgain")
    again = wait_for("the JobSet again", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    assert server.get("secret", "demo-token", "-n", NAMESPACES[0])["data"] == token
    uid = server.get("rlhfjob", "demo", "-n", NAMESPACES[0])["metadata"]["uid"]
    told = wait_for("its Event", lambda: events(server, "TriedAgain", uid))
    assert told[0]["type"] == "Normal"


def test_a_finished_job_expires(server: KubeCluster, leader: OperatorProcess) -> None:
    submit(server, manifest(ttlSecondsAfterFinished=1))
    wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    finish(server)
    wait_for("the job gone", lambda: server.get("rlhfjob", "demo", "-n", NAMESPACES[0]) is None)


def test_a_quota_without_pods_is_told(server: KubeCluster, leader: OperatorProcess) -> None:
    """By the Job controller, in an Event about its Job."""
    where = ("-n", NAMESPACES[0])
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-pods", "namespace": NAMESPACES[0]}}
    submit(server, quota | {"spec": {"hard": {"pods": "0"}}})
    try:
        wait_for("the quota", lambda: server.get("resourcequota", "no-pods", *where).get("status", {}).get("hard"))
        submit(server, manifest())
        uid = server.get("rlhfjob", "demo", *where)["metadata"]["uid"]
        wait_for("the JobSet", lambda: owned(server, "jobset", uid))
        make_job(server, uid, "coordinator")
        wait_for("a sentence", lambda: condition(server, "Scheduled").get("reason") == "PodsRefused")
        said = condition(server, "Scheduled")["message"]
        assert said.startswith("Job demo-coordinator-0 cannot make its pods: pods ")
        assert "exceeded quota: no-pods" in said
        assert server.get("rlhfjob", "demo", *where)["status"]["state"] == "Planned"
    finally:
        server.kubectl("delete", "resourcequota", "no-pods", *where)
        server.kubectl("delete", "job", "demo-coordinator-0", *where, "--ignore-not-found")


LARGE = {"name": "dovetail", "image": "none", "resources": {"requests": {"memory": "2Ti"}, "limits": {"memory": "2Ti"}}}
# What an admission plug-in says of the pods of a job with such pods.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "security": ({"hostNetwork": True}, 'violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)'),
    "limits": ({"containers": [LARGE]}, "maximum memory usage per Container is 1Ti, but limit is 2Ti"),
    "priority": ({"priorityClassName": "urgent"}, "no PriorityClass with name urgent was found"),
    "account": ({"serviceAccountName": "nobody"}, 'serviceaccount "nobody" not found'),
    "runtime": ({"runtimeClassName": "gvisor"}, 'RuntimeClass "gvisor" not found'),
}


@pytest.mark.nightly
def test_whatever_refuses_the_pods_is_told(server: KubeCluster, leader: OperatorProcess) -> None:
    """By the Job controller, and a JobSet controller of its Jobs. All at once, because Events are looked for after ten
    seconds, and again after a minute: what has Events of the test's own comes first."""
    space, where = NAMESPACES[0], ("-n", NAMESPACES[0])
    limits = {"limits": [{"type": "Container", "max": {"memory": "1Ti"}}]}
    metadata = {"name": "small", "namespace": space}
    submit(server, {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": limits})
    server.kubectl("label", "namespace", space, "pod-security.kubernetes.io/enforce=baseline")
    jobs = ["jobless", "taken", "unbound", "template", "queued", *REFUSED]
    there = 'job "taken-train-0" creation failed with error: jobs.batch "taken-train-0" already exists'
    of_jobs = {"jobless": "Job.batch is invalid: dnsPolicy", "taken": there}
    claim_spec = {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}
    claim_spec["resources"] = {"requests": {"storage": "1Gi"}}
    scratch = [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": claim_spec}}}]
    why_queued = "couldn't assign flavors to pod set train: topology allows to fit only 1 out of 2 pod(s)"
    no_larger = "pod didn't trigger scale-up: 1 max size"
    if server.get("crd", "workloads.kueue.x-k8s.io") is None:
        server.apply(preserving("Workload", "workloads", "kueue.x-k8s.io", "v1beta2"))
        established(server, "workloads.kueue.x-k8s.io")
    try:
        for name in jobs:
            document = manifest(name)
            document["metadata"]["labels"] = {names.QUEUE_LABEL: "team"} if name == "queued" else {}
            submit(server, document)
        for name in jobs:
            uid = server.get("rlhfjob", name, *where)["metadata"]["uid"]
            wait_for("the JobSet", lambda uid=uid, name=name: name in owned(server, "jobset", uid))
            if name in REFUSED:
                make_job(server, uid, "coordinator", name, **REFUSED[name][0])
            elif name in of_jobs:
                said_by("jobset-controller", server, "jobset", name, "JobCreationFailed", of_jobs[name])
            elif name == "unbound":
                pod = unplaced(server, name)
                said_by("cluster-autoscaler", server, "pod", pod, "NotTriggerScaleUp", no_larger)
            elif name == "template":
                unplaced(server, name, volumes=scratch)
            else:
                in_queue(server, name, why_queued)

        def sentence(name: str) -> str:
            return str(condition(server, "Scheduled", name).get("message"))

        for name, (_, words_of_it) in REFUSED.items():
            start = f"Job {name}-coordinator-0 cannot make its pods: pods "
            wait_for(name, lambda name=name, end=words_of_it: end in sentence(name))
            assert sentence(name).startswith(start)
            assert condition(server, "Scheduled", name)["reason"] == "PodsRefused"
        told_of_jobs = "JobSet jobless cannot make its Jobs: Job.batch is invalid: dnsPolicy"
        # Events of an object that was looked at in vain are asked for once a minute.
        wait_for("the JobSet's Event", lambda: sentence("jobless") == told_of_jobs)
        conflict = "Job taken-train-0 exists and does not belong to this job"
        wait_for("the Job of another", lambda: sentence("taken").startswith(conflict))
        assert condition(server, "Scheduled", "taken")["reason"] == "NameConflict"
        wait_for(
            "the claim of the template",
            lambda: re.search(
                r"; PersistentVolumeClaim template-coordinator-0-\w+-scratch: "
                r'storageclass.storage.k8s.io "fast" not found',
                sentence("template"),
            ),
        )
        wait_for(
            "Kueue's word", lambda: "only 1 out" in condition(server, "Suspended", "queued").get("message", ""), 180
        )
        claim = (
            "PersistentVolumeClaim unbound-files (ReadWriteMany, 100Gi, the cluster's default class) has no volume: "
        )
        wait_for(
            "the claim's Event",
            lambda: f"{claim}no persistent volumes available for this claim" in sentence("unbound"),
        )
        unplaced_for = "cannot be scheduled: 0/3 nodes; pod didn't trigger scale-up: 1 max size"
        wait_for("the autoscaler's Event", lambda: unplaced_for in sentence("unbound"))
    finally:
        server.kubectl("label", "namespace", space, "pod-security.kubernetes.io/enforce-")
        server.kubectl("delete", "limitrange", "small", *where)
        server.kubectl("delete", "rlhfjobs", *jobs, *where, "--ignore-not-found")
        server.kubectl("delete", "jobs", "--all", *where)
        server.kubectl("delete", "pods", "--all", *where, "--force", "--grace-period=0")


def in_queue(server: KubeCluster, name: str, message: str) -> None:
    """What Kueue would make of a job's JobSet that it does not admit."""
    where = ("-n", NAMESPACES[0])
    server.kubectl("patch", "jobset", name, *where, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    uid = server.get("jobset", name, *where)["metadata"]["uid"]
    metadata = {"name": name, "namespace": NAMESPACES[0], "labels": {"kueue.x-k8s.io/job-uid": uid}}
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": metadata}
    server.apply(workload, namespace=NAMESPACES[0])
    told = [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}]
    told[0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    patch = json.dumps({"status": {"conditions": told}})
    server.kubectl("patch", "workload", name, *where, "--subresource=status", "--type=merge", "-p", patch)


def unplaced(server: KubeCluster, name: str, **pod_spec: Any) -> str:
    """The coordinator's pod of a job, which a scheduler found no node for. There is no scheduler here."""
    where = ("-n", NAMESPACES[0])
    make_job(server, server.get("rlhfjob", name, *where)["metadata"]["uid"], "coordinator", name, **pod_spec)
    words = ("pods", *where, "-l", f"batch.kubernetes.io/job-name={name}-coordinator-0")
    pod = str(wait_for("the pod", lambda: server.items(*words))[0]["metadata"]["name"])
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    patch = json.dumps({"status": {"conditions": [told | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}})
    server.kubectl("patch", "pod", pod, *where, "--subresource=status", "--type=merge", "-p", patch)
    return pod


def said_by(component: str, server: KubeCluster, kind: str, name: str, reason: str, message: str) -> None:
    """An Event of a controller that does not run here."""
    about = server.get(kind, name, "-n", NAMESPACES[0])
    reference = {key: about["metadata"][key] for key in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{uuid.uuid4().hex[:8]}", "namespace": NAMESPACES[0]},
        "involvedObject": {"apiVersion": about["apiVersion"], "kind": about["kind"], **reference},
        "reason": reason,
        "message": message,
        "type": "Warning",
        "source": {"component": component},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    server.kubectl("create", "-f", "-", stdin=json.dumps(event))


def test_objects_that_the_api_server_refuses_are_told(server: KubeCluster, leader: OperatorProcess) -> None:
    """A podTemplate that is no pod template: with JobSet's own CRD its fields are checked, here a claim's name is."""
    submit(server, manifest(checkpoint={"volume": "mine"}))
    wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[0]))
    assert server.get("persistentvolumeclaim", "demo-files", "-n", NAMESPACES[0]) is None
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-claims", "namespace": NAMESPACES[1]},
        "spec": {"hard": {"persistentvolumeclaims": "0"}},
    }
    submit(server, quota)
    wait_for(
        "the quota", lambda: server.get("resourcequota", "no-claims", "-n", NAMESPACES[1]).get("status", {}).get("hard")
    )
    submit(server, manifest(namespace=NAMESPACES[1]))
    try:
        wait_for(
            "a refusal",
            lambda: condition(server, "Scheduled", namespace=NAMESPACES[1]).get("reason") == "ObjectRejected",
        )
        assert "exceeded quota: no-claims" in condition(server, "Scheduled", namespace=NAMESPACES[1])["message"]
    finally:
        server.kubectl("delete", "resourcequota", "no-claims", "-n", NAMESPACES[1])
    wait_for("the JobSet", lambda: server.get("jobset", "demo", "-n", NAMESPACES[1]))
