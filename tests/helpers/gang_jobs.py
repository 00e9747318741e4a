"""Jobs on an API server with a real scheduler, and nodes that kwok plays. JobSet's controller does not run there."""

from __future__ import annotations

from typing import Any

from helpers.cluster import KubeCluster, wait_for
from helpers.operator_process import preserving
from helpers.rlhfjobs import quickstart

A100 = "NVIDIA-A100-SXM4-80GB"


def thing(kind: str, version: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def node(name: str, gpus: int) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "1Ti", "pods": "110"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    labels = {"kubernetes.io/hostname": name} | ({"nvidia.com/gpu.product": A100} if gpus else {})
    found = thing("Node", "v1", name, status={"capacity": room, "allocatable": room})
    found["metadata"] |= {"labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}}
    return found


def prepare(server: KubeCluster, space: str) -> None:
    """The definition of JobSet, and a namespace with the claim `files`."""
    server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    volume = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/tmp"},
        "claimRef": {"namespace": space, "name": "files"},
        "storageClassName": "",
    }
    claim = {key: volume[key] for key in ("accessModes", "storageClassName")} | {"volumeName": f"files-{space}"}
    claim["resources"] = {"requests": {"storage": "1Gi"}}
    server.apply(thing("PersistentVolume", "v1", f"files-{space}", spec=volume))
    server.apply(thing("PersistentVolumeClaim", "v1", "files", spec=claim), namespace=space)


def submit(server: KubeCluster, space: str, name: str, policy: dict[str, Any] | None = None, **gpu: Any) -> None:
    """A job with two trainers of a GPU each and a rollout without; its Jobs are made as the JobSet controller does."""
    groups = [
        {"name": "train", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 1, **gpu}, "replicas": 2},
        {"name": "gen", "roles": ["rollout"]},
    ]
    spec = {"groups": groups, "checkpoint": {"volume": "files"}, "failurePolicy": policy or {}}
    server.apply(quickstart(name, space, **spec), namespace=space)
    jobset = wait_for("the JobSet", lambda: server.get("jobset", name, "-n", space))
    owner = {key: jobset[key] for key in ("apiVersion", "kind")} | {"name": name, "controller": True}
    for each in jobset["spec"]["replicatedJobs"]:
        job = thing("Job", "batch/v1", f"{name}-{each['name']}-0", spec=each["template"]["spec"])
        job["metadata"] |= {"labels": each["template"]["metadata"]["labels"]}
        job["metadata"] |= {"ownerReferences": [owner | {"uid": jobset["metadata"]["uid"]}]}
        server.apply(job, namespace=space)


def pods(server: KubeCluster, space: str, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.items("pods", "-n", space, "-l", f"dovetail.dev/job={job}")
    return found


def placed(server: KubeCluster, space: str, job: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in pods(server, space, job))


def told(pod: dict[str, Any]) -> str:
    """What the scheduler says of a pod that has no node."""
    found = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled" and c["status"] == "False"]
    return str(found[0].get("message")) if found else ""
