"""Kubernetes' own gangs and its dynamic resource allocation: the real scheduler, on nodes that kwok plays."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.cluster import KubeCluster, external, wait_for
from helpers.operator_process import OperatorProcess, established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import condition, quickstart

pytestmark = pytest.mark.skipif(external() is not None, reason="it needs feature gates that are alpha")
SPACE = "gangs"
A100 = "NVIDIA-A100-SXM4-80GB"
DRIVER = "gpu.example.com"


def thing(kind: str, version: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def node(name: str, gpus: int) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "1Ti", "pods": "110"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    labels = {"kubernetes.io/hostname": name} | ({"nvidia.com/gpu.product": A100} if gpus else {})
    found = thing("Node", "v1", name, status={"capacity": room, "allocatable": room})
    found["metadata"] |= {"labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}}
    return found


@pytest.fixture(scope="module")
def server(gang_server: KubeCluster) -> KubeCluster:
    server = gang_server
    server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    volume = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/tmp"},
        "claimRef": {"namespace": SPACE, "name": "files"},
        "storageClassName": "",
    }
    claim = {key: volume[key] for key in ("accessModes", "storageClassName")} | {"volumeName": "files"}
    claim["resources"] = {"requests": {"storage": "1Gi"}}
    server.apply(thing("PersistentVolume", "v1", "files", spec=volume))
    server.apply(thing("PersistentVolumeClaim", "v1", "files", spec=claim), namespace=SPACE)
    install(server, [SPACE], "jobs.gangScheduler=Kubernetes")
    established(server, "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io")
    return server


@pytest.fixture(scope="module", autouse=True)
def leader(server: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    config = kubeconfig(server, tmp_path_factory.mktemp("account"))
    folder = tmp_path_factory.mktemp("leader")
    with operator(config, folder, "leader", [SPACE], DOVETAIL_GANG="Kubernetes") as process:
        wait_for("leadership", process.leads)
        yield process


def submit(server: KubeCluster, name: str, **gpu: Any) -> None:
    """A job with two trainers of a GPU each and a rollout without; its Jobs are made as the JobSet controller does."""
    groups = [
        {"name": "train", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 1, **gpu}, "replicas": 2},
        {"name": "gen", "roles": ["rollout"]},
    ]
    server.apply(quickstart(name, SPACE, groups=groups, checkpoint={"volume": "files"}), namespace=SPACE)
    jobset = wait_for("the JobSet", lambda: server.get("jobset", name, "-n", SPACE))
    owner = {key: jobset[key] for key in ("apiVersion", "kind")} | {"name": name, "controller": True}
    for each in jobset["spec"]["replicatedJobs"]:
        job = thing("Job", "batch/v1", f"{name}-{each['name']}-0", spec=each["template"]["spec"])
        job["metadata"] |= {"labels": each["template"]["metadata"]["labels"]}
        job["metadata"] |= {"ownerReferences": [owner | {"uid": jobset["metadata"]["uid"]}]}
        server.apply(job, namespace=SPACE)


def pods(server: KubeCluster, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("pods", "-n", SPACE, "-l", f"dovetail.dev/job={job}")["items"]
    return found


def placed(server: KubeCluster, job: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in pods(server, job))


def told(pod: dict[str, Any]) -> str:
    """What the scheduler says of a pod that has no node."""
    found = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled" and c["status"] == "False"]
    return str(found[0].get("message")) if found else ""


def test_a_gang_is_placed_as_a_whole_or_not_at_all(server: KubeCluster) -> None:
    """There is a GPU for one of two trainers: not even what needs no GPU is placed. The job says why."""
    server.apply(node("one", 1))
    submit(server, "whole")
    found = wait_for("the gang", lambda: server.get("podgroups.scheduling.k8s.io", "-n", SPACE)["items"])
    (group,) = found
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 4}}
    wait_for("four pods", lambda: len(pods(server, "whole")) == 4)
    wait_for("the scheduler's word", lambda: any(map(told, pods(server, "whole"))))
    wait_for("a reason", lambda: condition(server, "Scheduled", "whole", SPACE).get("reason") == "Unschedulable")
    assert condition(server, "Scheduled", "whole", SPACE)["message"].startswith("pod whole-")
    assert placed(server, "whole") == 0
    server.apply(node("two", 1))
    wait_for("all at once", lambda: placed(server, "whole") == 4, 300)
    wait_for("the condition", lambda: condition(server, "Scheduled", "whole", SPACE).get("status") == "True")
    server.kubectl("delete", "rlhfjob", "whole", "-n", SPACE, "--wait=true")
    server.kubectl("delete", "jobs", "--all", "-n", SPACE)


def test_gpus_come_through_a_claim(server: KubeCluster) -> None:
    """A driver that has published two GPUs, on a node without the resource nvidia.com/gpu."""
    server.apply(node("dynamic", 0))
    expression = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    server.apply(thing("DeviceClass", "resource.k8s.io/v1", DRIVER, spec={"selectors": [expression]}))
    devices = [{"name": f"gpu-{number}"} for number in range(2)]
    pool = {"name": "dynamic", "generation": 1, "resourceSliceCount": 1}
    slices = {"driver": DRIVER, "nodeName": "dynamic", "pool": pool, "devices": devices}
    server.apply(thing("ResourceSlice", "resource.k8s.io/v1", "dynamic", spec=slices))
    submit(server, "claimed", claimTemplate="one-gpu")
    wait_for("four pods", lambda: len(pods(server, "claimed")) == 4)
    wait_for("the missing template", lambda: "one-gpu" in json.dumps(server.get("events", "-n", SPACE)))
    assert placed(server, "claimed") == 0
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": 1}}
    template = {"spec": {"devices": {"requests": [request]}}}
    server.apply(thing("ResourceClaimTemplate", "resource.k8s.io/v1", "one-gpu", spec=template), namespace=SPACE)
    wait_for("all at once", lambda: placed(server, "claimed") == 4, 300)
    wait_for("they run", lambda: condition(server, "Running", "claimed", SPACE).get("status") == "True")
    claims = server.get("resourceclaims", "-n", SPACE)["items"]
    given = {each["status"]["allocation"]["devices"]["results"][0]["device"] for each in claims}
    assert given == {"gpu-0", "gpu-1"}
    server.kubectl("delete", "rlhfjob", "claimed", "-n", SPACE, "--wait=true")
    server.kubectl("delete", "jobs", "--all", "-n", SPACE)
