"""Two API servers with real Kueue controllers: MultiKueue sends a job from the one to the other. No pod starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import binaries

from helpers.cluster import KubeCluster, external, running, wait_for
from helpers.kueue_process import NAMESPACE, install_kinds, kueue
from helpers.operator_process import established, install, kubeconfig, operator
from helpers.rlhfjobs import condition, create, quickstart

pytestmark = pytest.mark.skipif(external() is not None, reason="it needs two clusters")
SPACE = "sent"
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
KUEUE = "kueue.x-k8s.io/v1beta2"


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


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[tuple[KubeCluster, KubeCluster]]:
    """The one with the queues, and the one where jobs run."""
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


def test_a_job_is_sent_to_another_cluster_and_its_status_comes_back(
    clusters: tuple[KubeCluster, KubeCluster],
) -> None:
    manager, worker = clusters
    connect(manager, worker)
    document = quickstart("elsewhere", SPACE, managedBy=MULTIKUEUE)
    document["metadata"]["labels"] = QUEUE
    done = create(manager, document)
    assert done.returncode == 0, done.stderr
    uid = manager.get("rlhfjob", "elsewhere", "-n", SPACE)["metadata"]["uid"]
    name = f"elsewhere-{uid[:8]}"
    wait_for("the Workload", lambda: manager.get("workloads.kueue.x-k8s.io", name, "-n", SPACE))

    def admitted() -> bool:
        """The JobSet there has the Workload that was sent, and Kueue has found both to be the same."""
        found = worker.get("workloads.kueue.x-k8s.io", name, "-n", SPACE)
        conditions = {c["type"]: c for c in (found or {}).get("status", {}).get("conditions", [])}
        assert "Finished" not in conditions, conditions["Finished"]
        owners = [owner["kind"] for owner in (found or {}).get("metadata", {}).get("ownerReferences", [])]
        return owners == ["JobSet"] and conditions.get("Admitted", {}).get("status") == "True"

    try:
        wait_for("the Workload's admission there", admitted, 300)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told(manager)}\n{told(worker)}") from None
    assert len(worker.get("workloads.kueue.x-k8s.io", "-n", SPACE)["items"]) == 1, "Kueue made no other one"
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
        found = manager.get("workloads.kueue.x-k8s.io", "-n", SPACE)["items"]
        conditions = [c for each in found for c in each.get("status", {}).get("conditions", [])]
        return " ".join(c["message"] for c in conditions if c["type"] == "QuotaReserved" and c["status"] == "False")

    wait_for("Kueue's word", lambda: "opology" in refused())
    manager.delete("rlhfjob", "close", "-n", SPACE)
    # Suspended here, it leaves the other cluster, and comes back.
    patch = ("patch", "rlhfjob", "elsewhere", "-n", SPACE, "--type=merge", "-p")
    manager.kubectl(*patch, '{"spec":{"suspend":true}}')
    wait_for("its end there", lambda: worker.get("rlhfjob", "elsewhere", "-n", SPACE) is None)
    manager.kubectl(*patch, '{"spec":{"suspend":false}}')
    wait_for("the admission again", admitted, 300)
    # Whatever the other operator makes is in the folder that the first one had.
    folder = worker.get("pvc", "elsewhere-files", "-n", SPACE)["metadata"]["annotations"]["dovetail.dev/folder"]
    assert folder == name
    manager.delete("rlhfjob", "elsewhere", "-n", SPACE)
    wait_for("its end there too", lambda: worker.get("rlhfjob", "elsewhere", "-n", SPACE) is None)
