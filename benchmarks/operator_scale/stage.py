"""A cluster for the operator's benchmark: a real API server, real controllers, and nodes that kwok plays."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml
from devcluster import addons, lifecycle
from devcluster.settings import find
from devcluster.supervisor import Supervisor

from dovetail.protocol.process.env import COORDINATOR_PORT
from helpers.cluster import REPOSITORY, KubeCluster

NODES = 10
PODS = 2000  # of a node
KWOK = {"type": "kwok"}
PROGRAMS = {
    "etcd": "etcd",
    "kube-apiserver": "api_server",
    "kube-controller-manager": "controller_manager",
    "kube-scheduler": "scheduler",
    "manager": "jobset",
    "kwok": "kwok",
}


def node(number: int) -> dict[str, Any]:
    room = {"cpu": "100k", "memory": "100Ti", "pods": str(PODS), "nvidia.com/gpu": "100k"}
    name = f"kwok-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": KWOK | {"kubernetes.io/hostname": name}, "annotations": FAKE},
        "spec": {"taints": [{"key": "kwok", "value": "true", "effect": "NoSchedule"}]},
        "status": {"capacity": room, "allocatable": room},
    }


FAKE = {"kwok.x-k8s.io/node": "fake"}


@contextmanager
def stage(name: str) -> Iterator[KubeCluster]:
    """Up, with Ready nodes and coordinators that answer at the addresses of all their pods; down at the end."""
    lifecycle.down(name)
    try:
        lifecycle.up(name)
        cluster = find(name)
        assert cluster is not None
        supervisor = Supervisor(cluster)
        addresses = f"{cluster.prefix}.128.0/18"
        supervisor.run("ip", "route", "replace", "local", addresses, "dev", "lo")
        program = str(Path(__file__).with_name("coordinator.py"))
        supervisor.start("coordinators", [sys.executable, program, str(COORDINATOR_PORT)])
        addons.start_kwok(cluster, supervisor, f"--cidr={addresses}")
        kube = KubeCluster(cluster.kubeconfig, name)
        kube.apply(*(node(i) for i in range(NODES)))
        kube.kubectl("wait", "--for=condition=Ready", "node", "--selector=type=kwok", "--timeout=120s", timeout=150)
        yield kube
    finally:
        lifecycle.down(name)


def cpu(name: str) -> dict[str, float]:
    """CPU seconds that each of the cluster's programs has used; `other`: kubelets and what is around them."""
    cluster = find(name)
    assert cluster is not None
    init = Supervisor(cluster).pid()
    used = dict.fromkeys([*PROGRAMS.values(), "other"], 0.0)
    for process in psutil.Process(init).children(recursive=True):
        try:
            program = Path(process.cmdline()[0]).name
            used[PROGRAMS.get(program, "other")] += sum(process.cpu_times()[:2])
        except (psutil.Error, IndexError):
            continue  # gone meanwhile, or a zombie
    return used


def pod_template() -> dict[str, Any]:
    """What puts every pod of a job on one of kwok's nodes."""
    return {"spec": {"nodeSelector": KWOK, "tolerations": [{"key": "kwok", "operator": "Exists"}]}}


def claim(namespace: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "files", "namespace": namespace},
        "spec": spec,
    }


def manifest(name: str, namespace: str) -> dict[str, Any]:
    """An RLHFJob of four pods: a coordinator, a trainer and two rollouts."""
    document: dict[str, Any] = json.loads(_example())
    document["metadata"] = {"name": name, "namespace": namespace}
    spec = document["spec"]
    for group in spec["groups"]:
        # One replica each, on CPUs: kwok's nodes are of no GPU product.
        for key in ("gpu", "dtype", "minReplicas", "maxReplicas"):
            group.pop(key, None)
        group["replicas"] = 1
    spec["checkpoint"]["volume"] = "files"
    return document


@cache
def _example() -> str:
    """As JSON: a thousand jobs are made while the clock runs, and YAML takes 5 ms each."""
    return json.dumps(yaml.safe_load((REPOSITORY / "examples/quickstart-cluster.yaml").read_text()))
