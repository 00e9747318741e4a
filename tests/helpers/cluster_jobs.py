"""A job on a cluster of hack/devcluster, whose pods and files a test can get at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml
from devcluster.settings import find

from helpers.cluster import KubeCluster, wait_for
from helpers.jobs import MANIFEST, events, paced_reward, set_pace
from helpers.whole_lines import whole_lines

T = TypeVar("T")

PRODUCTS = {"a100": "NVIDIA-A100-SXM4-80GB", "v100": "Tesla-V100-SXM2-32GB", "a10": "NVIDIA-A10"}
_MOUNT = {"name": "paced", "mountPath": "/etc/paced", "readOnly": True}
PACED_TEMPLATE = {
    "spec": {
        "containers": [{"name": "dovetail", "workingDir": "/etc/paced", "volumeMounts": [_MOUNT]}],
        "volumes": [{"name": "paced", "configMap": {"name": "paced"}}],
    }
}


class ClusterJob:
    """The job `tiny` in a namespace of hack/devcluster."""

    def __init__(self, cluster: KubeCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        assert cluster.name is not None
        state = find(cluster.name)
        assert state is not None
        self._volumes = state.state / "volumes"
        self._run_dir: Path | None = None

    def document(self) -> dict[str, Any]:
        return dict(self.cluster.get("rlhfjob", "tiny", "-n", self.namespace) or {})

    def condition(self, kind: str) -> dict[str, Any]:
        found = self.document().get("status", {}).get("conditions") or []
        return next((c for c in found if c["type"] == kind), {})

    def pods(self) -> dict[str, dict[str, Any]]:
        """The live pod of each group, and the coordinator's."""
        return {
            p["metadata"]["labels"].get("dovetail.dev/group", "coordinator"): p
            for p in self.cluster.items("pods", "-n", self.namespace, "-l", "dovetail.dev/job=tiny")
            if p["status"].get("phase") in ("Pending", "Running") and "deletionTimestamp" not in p["metadata"]
        }

    def uids(self) -> dict[str, str]:
        return {group: pod["metadata"]["uid"] for group, pod in self.pods().items()}

    def run_dir(self) -> Path:
        """Of the job that was there when this was first asked."""
        if self._run_dir is None:
            uid = self.document()["metadata"]["uid"]
            (self._run_dir,) = self._volumes.glob(f"*/tiny-{uid[:8]}")
        return self._run_dir

    def iteration(self) -> int:
        """The last one that is finished."""
        done = events(self.run_dir(), "iteration.finished")
        return int(done[-1]["iteration"]) if done else 0

    def pace(self, seconds: float) -> None:
        """How much longer a paced job makes each iteration from now on, the one under way too; 0: no longer."""
        set_pace(self.run_dir().parent / "pace", seconds)

    def whole(self) -> bool:
        pods = self.pods()
        return set(pods) == {"coordinator", *PRODUCTS} and all(is_true(pod, "Ready") for pod in pods.values())

    def wait_for(self, what: str, check: Callable[[], T], seconds: float) -> T:
        """As `helpers.cluster.wait_for`, but it ends when the job has failed, and its error says how the job is."""

        def checked() -> T:
            failed = events(self.run_dir(), "job.failed")
            assert not failed, f"{what}: the job failed: {failed[-1]['reason']}"
            return check()

        try:
            return wait_for(what, checked, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.described()}") from None

    def described(self) -> str:
        """Conditions, the last known health of each instance, pods, and the last events, one a line."""
        conditions = self.document().get("status", {}).get("conditions") or []
        lines = [f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in conditions]
        health = {e["instance"]: e for e in events(self.run_dir(), "instance.health")}
        lines += [f"{name} is {e['health']} since {e['time']}: {e['reason']}" for name, e in sorted(health.items())]
        for pod in self.cluster.items("pods", "-n", self.namespace):
            status = pod["status"]
            states = [c["state"] for c in status.get("containerStatuses") or []]
            ending = ", is being deleted" if "deletionTimestamp" in pod["metadata"] else ""
            ready = "ready" if is_true(pod, "Ready") else "not ready"
            node = pod["spec"].get("nodeName")
            lines.append(f"{pod['metadata']['name']} on {node}: {status.get('phase')}, {ready}{ending}: {states}")
        return "\n".join([*lines, *(line[:400] for line in whole_lines(self.run_dir() / "events.jsonl")[-40:])])

    def kill(self, group: str, module: str) -> None:
        """SIGKILL to a process of a pod, which may be the first of its container."""
        kill(module, "DOVETAIL_HOST", self.pods()[group]["status"]["podIP"])


def kill(module: str, variable: str, value: str) -> None:
    """SIGKILL to the one process of this machine that runs `python -m module` with this in its environment."""
    victims = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in process.cmdline() and process.environ().get(variable) == value:
                victims.append(process)
    assert len(victims) == 1, victims
    victims[0].kill()


def is_true(thing: dict[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in thing["status"].get("conditions") or [])


def tiny_manifest(namespace: str, iterations: int, samples: int = 8, **groups: dict[str, Any]) -> dict[str, Any]:
    """A job of one trainer and two rollouts, each on another kind of node; `groups` adds to each by name."""
    document: dict[str, Any] = yaml.safe_load(MANIFEST)
    document["metadata"]["namespace"] = namespace
    spec = document["spec"]
    spec["sft"]["steps"] = spec["reward"]["steps"] = 4
    spec["ppo"] |= {"iterations": iterations, "globalBatchSize": samples, "miniBatchSize": samples}
    spec["generation"]["maxTokens"] = 24
    roles = {"a100": "trainer", "v100": "rollout", "a10": "rollout"}
    spec["groups"] = [
        {"name": name, "roles": [role], "gpu": {"product": PRODUCTS[name], "perPod": 1}, **groups.get(name, {})}
        for name, role in roles.items()
    ]
    return document


def paced(document: dict[str, Any], seconds: float = 2.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ConfigMap and the job, whose every iteration takes `seconds` more: faults and quotas need time to be felt.
    After some three it waits for `ClusterJob.pace`. The operator must be given PACED_TEMPLATE."""
    code = paced_reward(document["spec"], seconds, "/var/dovetail/pace")
    metadata = {"name": "paced", "namespace": document["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"paced.py": code}}, document
