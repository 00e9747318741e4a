"""Two API servers with real Kueue controllers: MultiKueue sends a job from the one to the other. No pod starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml
from devcluster import binaries

from helpers.cluster import KubeCluster, external, running, wait_for
from helpers.kueue_process import NAMESPACE, install_kinds, kueue
from helpers.operator_process import established, install, kubeconfig, operator
from helpers.rlhfjobs import condition, create, quickstart

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(external() is not None, reason="it needs two clusters")]
SPACE = "sent"
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
KUEUE = "kueue.x-k8s.io/v1beta2"
WORKLOADS = "workloads.kueue.x-k8s.io"
RACK = "example.com/rack"
A100 = "NVIDIA-A100-SXM4-80GB"


def thing(kind: str, name: str, spec: dict[str, Any] | None = None, version: str = KUEUE) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}} | ({"spec": spec} if spec else {})


def queues(checks: list[str]) -> list[dict[str, Any]]:
    """Room for anything."""
    resources = [
        {"name": name, "nominalQuota": quota}
        for name, quota in (("cpu", "1k"), ("memory", "10Ti"), ("nvidia.com/gpu", "100"))
    ]
    group = {
        "coveredResources": [each["name"] for each in resources],
        "flavors": [{"name": "any", "resources": resources}],
    }
    spec: dict[str, Any] = {"namespaceSelector": {}, "resourceGroups": [group]}
    if checks:
        spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": name} for name in checks]}
    return [
        thing("ResourceFlavor", "any"),
        thing("ClusterQueue", "all", spec),
        thing("LocalQueue", "team", {"clusterQueue": "all"}),
    ]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KubeCluster, KubeCluster]]:
    """The one with the queues, and the one where jobs run."""
    tmp_path = tmp_path_factory.mktemp("multikueue")
    if not binaries.folder("kueue").is_dir():
        pytest.skip("Kueue is not built (make cluster-binaries)")
    with ExitStack() as stack:
        servers = {}
        for name in ("manager", "worker"):
            servers[name] = stack.enter_context(running(f"dovetail-{name}", api_only=True))
        for name, server in servers.items():
            install_kinds(server)
            space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
            server.apply(space)
            install(server, [SPACE], "jobs.multiKueue=true")
            established(server, "rlhfjobs.dovetail.dev")
            frameworks = [{"name": "RLHFJob.v1alpha1.dovetail.dev"}]
            (folder := tmp_path / name).mkdir()
            more = {"multiKueue": {"externalFrameworks": frameworks}} if name == "manager" else {}
            stack.enter_context(kueue(server, folder, **more))
            variables = {"DOVETAIL_MULTI_KUEUE": "true"} if name == "manager" else {}
            process = operator(kubeconfig(server, folder), folder, name, [SPACE], **variables)
            wait_for("leadership", stack.enter_context(process).leads)
        connect(servers["manager"], servers["worker"])
        yield servers["manager"], servers["worker"]


def connect(manager: KubeCluster, worker: KubeCluster) -> None:
    """As docs/kueue.md says."""
    words = ("config", "view", "--raw", "--minify", "--flatten", "--output=json")
    config = worker.kubectl(*words)
    secret = thing("Secret", "worker", version="v1") | {"stringData": {"kubeconfig": config}}
    manager.apply(secret, namespace=NAMESPACE)
    source = {"kubeConfig": {"locationType": "Secret", "location": "worker"}}
    check = {
        "controllerName": MULTIKUEUE,
        "parameters": {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "all"},
    }
    manager.apply(
        thing("MultiKueueCluster", "worker", {"clusterSource": source}),
        thing("MultiKueueConfig", "all", {"clusters": ["worker"]}),
        thing("AdmissionCheck", "elsewhere", check),
        *queues(["elsewhere"]),
        namespace=SPACE,
    )
    worker.apply(*queues([]), namespace=SPACE)

    def active() -> bool:
        status = (manager.get("multikueuecluster", "worker") or {}).get("status", {})
        return any(c["type"] == "Active" and c["status"] == "True" for c in status.get("conditions", []))

    wait_for("the connection", active)


def told(cluster: KubeCluster) -> str:
    kinds = "rlhfjobs,workloads.kueue.x-k8s.io,jobsets,events"
    return yaml.safe_dump(json.loads(cluster.kubectl("get", kinds, "-n", SPACE, "-o", "json")))[-6000:]


def submit(manager: KubeCluster, name: str, **spec: Any) -> tuple[str, str]:
    """Send a job. Returns the name of its Workload, and its uid."""
    document = quickstart(name, SPACE, managedBy=MULTIKUEUE, **spec)
    document["metadata"]["labels"] = QUEUE
    done = create(manager, document)
    assert done.returncode == 0, done.stderr
    uid = manager.get("rlhfjob", name, "-n", SPACE)["metadata"]["uid"]
    wait_for("the Workload", lambda: manager.get(WORKLOADS, f"{name}-{uid[:8]}", "-n", SPACE))
    return f"{name}-{uid[:8]}", uid


def wait_admitted(clusters: tuple[KubeCluster, KubeCluster], name: str) -> None:
    """Until the JobSet there has the Workload that was sent, and Kueue has found both to be the same."""
    manager, worker = clusters

    def admitted() -> bool:
        found = worker.get(WORKLOADS, name, "-n", SPACE)
        conditions = {c["type"]: c for c in (found or {}).get("status", {}).get("conditions", [])}
        assert "Finished" not in conditions, conditions["Finished"]
        owners = [owner["kind"] for owner in (found or {}).get("metadata", {}).get("ownerReferences", [])]
        return owners == ["JobSet"] and conditions.get("Admitted", {}).get("status") == "True"

    try:
        wait_for("the Workload's admission there", admitted)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told(manager)}\n{told(worker)}") from None


def finish(worker: KubeCluster, name: str, kind: str) -> None:
    """What the JobSet controller would say, which does not run here."""
    said = {"type": kind, "status": "True", "reason": "x", "message": "as the test says"}
    patch = json.dumps({"status": {"conditions": [said | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}})
    worker.kubectl("patch", "jobset", name, "-n", SPACE, "--subresource=status", "--type=merge", "-p", patch)


def retry(manager: KubeCluster, name: str, number: int) -> None:
    patch = json.dumps({"spec": {"retry": number}})
    manager.kubectl("patch", "rlhfjob", name, "-n", SPACE, "--type=merge", "-p", patch)
    wait_for("not failed", lambda: condition(manager, "Failed", name, SPACE).get("status") == "False")


def test_a_job_is_sent_to_another_cluster_and_its_status_comes_back(
    clusters: tuple[KubeCluster, KubeCluster],
) -> None:
    manager, worker = clusters
    name, uid = submit(manager, "elsewhere")
    wait_admitted(clusters, name)
    assert len(worker.items(WORKLOADS, "-n", SPACE)) == 1, "Kueue made no other one"
    wait_for("its start", lambda: not worker.get("jobset", "elsewhere", "-n", SPACE)["spec"].get("suspend"))
    there = worker.get("rlhfjob", "elsewhere", "-n", SPACE)
    assert there["metadata"]["uid"] != uid
    assert "managedBy" not in there["spec"]
    assert manager.get("jobset", "elsewhere", "-n", SPACE) is None, "nothing of it runs here"
    assert manager.get("secrets", "-n", SPACE) is None
    wait_for(
        "the status",
        lambda: condition(manager, "Suspended", "elsewhere", SPACE).get("status") == "False",
    )
    wait_for("the plan", lambda: condition(manager, "Planned", "elsewhere", SPACE).get("status") == "True")
    # Trainers that want to be close to each other: no flavor here has a topology, and Kueue says so.
    level = {"kueue.x-k8s.io/podset-required-topology": "example.com/rack"}
    close = quickstart("close", SPACE, managedBy=MULTIKUEUE)
    close["metadata"]["labels"] = QUEUE
    close["spec"]["groups"][0]["podTemplate"] = {"metadata": {"annotations": level}}
    done = create(manager, close)
    assert done.returncode == 0, done.stderr

    def refused() -> str:
        found = manager.items(WORKLOADS, "-n", SPACE)
        conditions = [c for each in found for c in each.get("status", {}).get("conditions", [])]
        return " ".join(c["message"] for c in conditions if c["type"] == "QuotaReserved" and c["status"] == "False")

    wait_for("Kueue's word", lambda: "opology" in refused())
    manager.delete("rlhfjob", "close", "-n", SPACE)
    # Suspended here, it leaves the other cluster, and comes back.
    patch = ("patch", "rlhfjob", "elsewhere", "-n", SPACE, "--type=merge", "-p")
    manager.kubectl(*patch, '{"spec":{"suspend":true}}')
    wait_for("its end there", lambda: worker.get("rlhfjob", "elsewhere", "-n", SPACE) is None)
    manager.kubectl(*patch, '{"spec":{"suspend":false}}')
    wait_admitted(clusters, name)
    # Whatever the other operator makes is in the folder that the first one had.
    folder = worker.get("pvc", "elsewhere-files", "-n", SPACE)["metadata"]["annotations"]["dovetail.dev/folder"]
    assert folder == name
    manager.delete("rlhfjob", "elsewhere", "-n", SPACE)
    wait_for("its end there too", lambda: worker.get("rlhfjob", "elsewhere", "-n", SPACE) is None)


def test_a_job_that_failed_elsewhere_is_tried_again(clusters: tuple[KubeCluster, KubeCluster]) -> None:
    manager, worker = clusters
    name, _ = submit(manager, "again", failurePolicy={"startTimeoutSeconds": 5})
    wait_admitted(clusters, name)

    def gone() -> bool:
        return worker.get("rlhfjob", "again", "-n", SPACE) is None and worker.get(WORKLOADS, name, "-n", SPACE) is None

    def failed() -> str:
        found = condition(manager, "Failed", "again", SPACE)
        return str(found["message"]) if found.get("status") == "True" else ""

    # Its JobSet fails. Kueue ends the Workloads, and the copy goes at once.
    finish(worker, "again", "Failed")
    assert "as the test says" in wait_for("Failed", failed)
    wait_for("the copy's end", gone)
    ended = manager.get(WORKLOADS, name, "-n", SPACE)["status"]["conditions"]
    assert {"type": "Finished", "status": "True"}.items() <= next(c for c in ended if c["type"] == "Finished").items()
    retry(manager, "again", 1)
    wait_admitted(clusters, name)
    assert worker.get("rlhfjob", "again", "-n", SPACE)["spec"]["retry"] == 1
    # The operator there ends it, because it never starts. Kueue would look for the Workload, and send the job anew.
    about = worker.get("jobset", "again", "-n", SPACE)
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "again.1"},
        "involvedObject": {key: about["metadata"][key] for key in ("name", "namespace", "uid")}
        | {"apiVersion": about["apiVersion"], "kind": about["kind"]},
        "reason": "JobCreationFailed",
        "message": "Job.batch is invalid: dnsPolicy",
        "type": "Warning",
        "source": {"component": "jobset-controller"},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    worker.apply(event, namespace=SPACE)
    assert "Job.batch is invalid: dnsPolicy (waited for" in wait_for("Failed again", failed)
    wait_for("the Workload's end", lambda: manager.get(WORKLOADS, name, "-n", SPACE) is None)
    wait_for("the copy's end", gone)
    assert worker.get("jobset", "again", "-n", SPACE) is None, "it holds no quota and no GPUs"
    retry(manager, "again", 2)
    wait_admitted(clusters, name)
    finish(worker, "again", "Completed")
    wait_for("Completed", lambda: condition(manager, "Completed", "again", SPACE).get("status") == "True")
    wait_for("the copy's end", gone)
    manager.delete("rlhfjob", "again", "-n", SPACE)


def a_node(name: str, rack: str, gpus: int) -> dict[str, Any]:
    """A node without a kubelet, for Kueue to count."""
    room = {"cpu": "64", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(gpus)}
    ready = {"type": "Ready", "status": "True", "reason": "x", "message": ""}
    node = thing("Node", name, version="v1") | {
        "status": {"capacity": room, "allocatable": room, "conditions": [ready]}
    }
    node["metadata"]["labels"] = {"kubernetes.io/hostname": name, RACK: rack, "nvidia.com/gpu.product": A100}
    return node


def test_trainers_that_must_be_close_get_one_rack(clusters: tuple[KubeCluster, KubeCluster]) -> None:
    """Kueue's topology-aware scheduling, with docs/kueue.md's annotation. The first rack has room for one trainer only.
    A job whose trainers fit into no rack waits, and says so."""
    _, cluster = clusters
    cluster.apply(a_node("alone", "a", 1), a_node("six", "b", 1), a_node("two", "b", 1))
    levels = [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
    flavor = thing(
        "ResourceFlavor", "racked", {"nodeLabels": {"nvidia.com/gpu.product": A100}, "topologyName": "racks"}
    )
    _, queue, local = queues([])
    queue["metadata"]["name"] = local["spec"]["clusterQueue"] = "racked"
    queue["spec"]["resourceGroups"][0]["flavors"][0]["name"] = "racked"
    local["metadata"]["name"] = "racked"
    cluster.apply(thing("Topology", "racks", {"levels": levels}), flavor, queue, local, namespace=SPACE)

    def a_job(name: str, trainers: int) -> str:
        train = {"name": "train", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 1}, "replicas": trainers}
        train["podTemplate"] = {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": RACK}}}
        document = quickstart(name, SPACE, groups=[train, {"name": "gen", "roles": ["rollout"]}])
        document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "racked"}
        done = create(cluster, document)
        assert done.returncode == 0, done.stderr
        return str(wait_for("the JobSet", lambda: cluster.get("jobset", name, "-n", SPACE))["metadata"]["uid"])

    def assigned(uid: str) -> dict[str, Any]:
        found = cluster.items(WORKLOADS, "-n", SPACE, "-l", f"kueue.x-k8s.io/job-uid={uid}")
        admission = found[0].get("status", {}).get("admission", {}) if found else {}
        return {each["name"]: each for each in admission.get("podSetAssignments", [])}

    uid = a_job("close", 2)
    parts = wait_for("admission", lambda: assigned(uid))
    text = json.dumps(parts["train"]["topologyAssignment"])
    assert [name in text for name in ("alone", "six", "two")] == [False, True, True], text
    cluster.delete("rlhfjob", "close", "-n", SPACE)
    a_job("wide", 3)

    def why() -> str:
        return str(condition(cluster, "Suspended", "wide", SPACE).get("message"))

    try:
        wait_for("why it waits", lambda: "topology" in why() and "racked" in why())
    except AssertionError as error:
        raise AssertionError(f"{error}\n{why()}\n{told(cluster)}") from None
    assert cluster.get("jobset", "wide", "-n", SPACE)["spec"]["suspend"] is True
    cluster.delete("rlhfjob", "wide", "-n", SPACE)
    cluster.delete("node", "alone", "six", "two")
