"""The operator as a process of this machine, with no more rights than the chart's ServiceAccount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from helpers.cluster import REPOSITORY, KubeCluster, wait_for
from helpers.free_ports import free_port
from helpers.patience import PATIENCE
from helpers.whole_lines import whole_lines

SYSTEM = "dovetail-system"
RBAC = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Lease")


def preserving(kind: str, plural: str, group: str, version: str) -> dict[str, Any]:
    """A CRD that takes anything, for a kind whose controller does not run."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # What the API server asks for in *.x-k8s.io.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


def install(
    cluster: KubeCluster, namespaces: list[str], *values: str, name: str = "dovetail", system: str = SYSTEM
) -> None:
    """The CRDs, and the chart's accounts and rights, with nothing that runs. `namespaces`: none means all. `values`:
    more of the chart's, such as a=b. `name` is the release's, in namespace `system`."""
    crd = str(REPOSITORY / "helm/dovetail/files/crds")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", crd)
    chart, spaces = str(REPOSITORY / "helm/dovetail"), f"namespaces={json.dumps(namespaces)}"
    more = [word for value in values for word in ("--set", value)]
    text = cluster.helm("template", name, chart, "-n", system, "--set-json", spaces, *more)
    wanted = [thing for thing in yaml.safe_load_all(text) if thing and thing["kind"] in RBAC]
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}
    items = {"apiVersion": "v1", "kind": "List", "items": [space, *wanted]}
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(items))


def established(cluster: KubeCluster, *names: str) -> None:
    """Returns when the API server serves these CustomResourceDefinitions."""
    for name in names:
        # kubectl fails where there is no status yet.
        words = ("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
        wait_for(f"the definition {name}", lambda words=words: cluster.try_kubectl(*words).returncode == 0)  # type: ignore[misc]


def kubeconfig(cluster: KubeCluster, folder: Path, account: str = "dovetail-operator", system: str = SYSTEM) -> Path:
    """For the ServiceAccount of that name in namespace `system`."""
    token = cluster.kubectl("create", "token", account, "-n", system, "--duration=2h").strip()
    document = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--output=json"))
    document["users"] = [{"name": account, "user": {"token": token}}]
    document["contexts"][0]["context"]["user"] = account
    path = folder / f"{account}.kubeconfig"
    path.write_text(json.dumps(document))
    return path


class OperatorProcess:
    """`log` is what it wrote. A leader that lost its lease ends: a busy API server may not answer for half
    a minute. Like its Deployment, this starts it again."""

    def __init__(self, config: Path, folder: Path, identity: str, namespaces: list[str], **variables: str) -> None:
        self.port = free_port()
        self.log = folder / f"{identity}.log"
        environ = os.environ | {
            "KUBECONFIG": str(config),
            "DOVETAIL_IDENTITY": identity,
            "DOVETAIL_NAMESPACE": SYSTEM,
            "DOVETAIL_NAMESPACES": ",".join(namespaces),
            "DOVETAIL_HEALTH_PORT": str(self.port),
            "PYTHONUNBUFFERED": "1",
            # The nodes' GPUs are names only: the processes run on CPUs.
            "DOVETAIL_TRAINER_CAPABILITIES": "any",
            "DOVETAIL_ROLLOUT_CAPABILITIES": "any",
            **variables,
        }
        self._environ, self._folder = environ, folder
        self._lock, self._ended = threading.Lock(), False
        self.process = self._start()
        threading.Thread(target=self._start_again, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dovetail.operator.main"],
                env=self._environ,
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )

    def _start_again(self) -> None:
        while True:
            self.process.wait()
            with self._lock:
                if self._ended or not self._lost_its_lease():
                    return
                self.process = self._start()

    def _lost_its_lease(self) -> bool:
        return self.process.returncode == 1 and "the lease could not be renewed" in self.log.read_text()

    def leads(self) -> bool:
        assert self.process.poll() is None or self._lost_its_lease(), self.log.read_text()
        return '"leader.started"' in self.log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in whole_lines(self.log) if line.startswith("{")]
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def answers(self) -> bool:
        """Whether it is ready. Then it takes signals, too."""
        assert self.process.poll() is None or self._lost_its_lease(), self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def stop(self) -> int:
        """SIGTERM; the exit code. It may have been started again a moment ago."""
        wait_for("its probes", self.answers)
        with self._lock:
            self._ended = True
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        with self._lock:
            self._ended = True
        self.process.kill()
        self.process.wait(PATIENCE)


@contextmanager
def operator(
    config: Path, folder: Path, identity: str, namespaces: list[str], **variables: str
) -> Iterator[OperatorProcess]:
    """Running until the end of the block."""
    process = OperatorProcess(config, folder, identity, namespaces, **variables)
    try:
        yield process
    finally:
        process.kill()
