"""A Kubernetes cluster for tests: the one in hack/devcluster, or somebody's own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEVCLUSTER = REPOSITORY / "hack/devcluster"
sys.path.insert(0, str(DEVCLUSTER))

from devcluster import binaries, lifecycle, preflight  # noqa: E402
from devcluster.control_plane import FIRST  # noqa: E402
from devcluster.settings import ClusterError, locked, state_root, tidy  # noqa: E402

from helpers.patience import PATIENCE  # noqa: E402

T = TypeVar("T")

# kubectl's words where the API server has not got the command, as while it restarts or the machine is overloaded.
# Before it sends one, kubectl asks for the server's kinds and their schemas.
NOT_SENT = (
    *("TLS handshake timeout", "was refused - did you specify the right host", "connect: connection refused"),
    *("error validating data: Get", "failed to download openapi", "server API group list: Get", "cluster unreachable"),
)
# Where nobody knows whether it has got it, as when a machine stood still. These commands may be given again.
UNANSWERED = (
    *("http2: client connection lost", "did not complete within requested timeout", "context deadline exceeded"),
    *("connection reset by peer", "unexpected EOF", "i/o timeout", "Client.Timeout", "etcdserver: request timed out"),
    *("unable to return a response in the time allotted", "(ServiceUnavailable)", "(Timeout)", "(TooManyRequests)"),
)
REPEATABLE = ("annotate", "apply", "auth", "describe", "explain", "get", "label", "patch")
STANDSTILL_SECONDS = 30.0


def wait_for(what: str, check: Callable[[], T], seconds: float = PATIENCE, interval: float = 0.2) -> T:
    """The first true value of `check`; AssertionError, with the last value, when the deadline passes.

    What takes long is looked at less often, once a second at least: a kubectl costs a tenth of a second of CPU. Of one
    look STANDSTILL_SECONDS count at most, because a virtual machine may stand still for minutes."""
    waited, looked = 0.0, time.monotonic()
    while True:
        value = check()
        if value:
            return value
        now = time.monotonic()
        waited, looked = waited + min(now - looked, STANDSTILL_SECONDS), now
        assert waited < seconds, f"{what}: not within {seconds:.0f} s; last seen: {value!r}"
        time.sleep(max(interval, min(1.0, waited / 10)))


@dataclass(frozen=True)
class KubeCluster:
    """What tests need of a cluster. `name` is None for one that is not ours, whose components cannot be touched."""

    kubeconfig: Path
    name: str | None

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = PATIENCE) -> str:
        """kubectl's standard output; AssertionError with its errors when `check` and it fails."""
        done = self.try_kubectl(*words, stdin=stdin, timeout=timeout)
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr.strip()}"
        return done.stdout

    def try_kubectl(
        self, *words: str, stdin: str | None = None, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """As kubectl ended. Tries again for PATIENCE while the API server cannot be reached."""
        command = [str(binaries.path_of("kubectl")), "--kubeconfig", str(self.kubeconfig), *words]
        again = (*NOT_SENT, *UNANSWERED) if words[0] in REPEATABLE else NOT_SENT
        return self._persist(command, again, timeout, stdin or "")

    def _persist(
        self, command: list[str], again: tuple[str, ...], timeout: float, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """As the command ended; run until its errors have none of the words `again`, for PATIENCE at most. A command
        for a cluster of ours comes first, as its API server does: else it gives up while it waits for a core."""
        command = [*(FIRST if self.name else ()), *command]
        options: Any = {"input": stdin, "capture_output": True, "text": True, "timeout": timeout}
        options["start_new_session"] = True
        deadline = time.monotonic() + PATIENCE
        while True:
            done = subprocess.run(command, env=self._environment(), check=False, **options)
            if not done.returncode or not any(s in done.stderr for s in again) or time.monotonic() > deadline:
                return done
            time.sleep(1)

    def _environment(self) -> dict[str, str]:
        """What kubectl and helm learn of a cluster of ours goes with it, and not into ~/.kube. They end too soon for
        Go's garbage collection to be of use: without it kubectl needs a fifth less CPU."""
        mine = {} if self.name is None else {"KUBECACHEDIR": str(self.kubeconfig.parent / "kubectl-cache")}
        return {**os.environ, "GOGC": "off", "GOMEMLIMIT": "1GiB", **mine}

    def get(self, *words: str) -> Any:
        """`kubectl get`, parsed; None for an object that is not there."""
        output = self.kubectl("get", *words, "--output=json", "--ignore-not-found")
        return json.loads(output) if output.strip() else None

    def items(self, *words: str) -> list[Any]:
        """The objects of a kind, or those that a selector chooses. kubectl prints nothing where there is none."""
        return list((self.get(*words) or {"items": []})["items"])

    def delete(self, *words: str) -> None:
        """`kubectl delete`; returns when the objects are gone."""
        self.kubectl("delete", *words, "--wait=true", f"--timeout={PATIENCE:.0f}s", timeout=PATIENCE + 60)

    def apply(self, *manifests: dict[str, Any], namespace: str = "default") -> str:
        """Server-side apply of these objects; `namespace` is for those that name none."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        words = ("apply", "--server-side", "--namespace", namespace, "-f", "-")
        return self.kubectl(*words, stdin=json.dumps(items))

    def helm(self, *words: str, timeout: float = PATIENCE) -> str:
        """helm's standard output; AssertionError with its errors when it fails. Tries again if it changed nothing."""
        command = [str(binaries.path_of("helm")), "--kubeconfig", str(self.kubeconfig), *words]
        done = self._persist(command, NOT_SENT, timeout)
        assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr.strip()}"
        return done.stdout

    def user(self, name: str) -> Path:
        """A kubeconfig for alice, bob, carol or mallory, who may do nothing until bound to a role."""
        path = self.kubeconfig.with_name(f"{name}.kubeconfig")
        path.write_text(self.devcluster("user", name))
        return path

    def devcluster(self, *words: str, timeout: float = PATIENCE) -> str:
        """A command of hack/devcluster for this cluster, such as `restart kubelet-v100`."""
        assert self.name is not None, "this cluster is not one of hack/devcluster"
        done = subprocess.run(
            [sys.executable, str(DEVCLUSTER), "--name", self.name, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"devcluster {' '.join(words)}: {done.stderr.strip()}"
        return done.stdout

    @contextmanager
    def namespace(self, labels: dict[str, str] | None = None) -> Iterator[str]:
        """A namespace of a name that is free; goes with all in it."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        metadata = {"name": name, "labels": labels or {}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        # Pods are refused before it is there.
        wait_for("the service account", lambda: self.get("--namespace", name, "serviceaccount", "default"))
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", check=False)

    def upload(self, folder: Path, namespace: str, image: str | None = None) -> None:
        """What is in the folder onto the claim of examples/cluster/data-claim.yaml, by its pod, as a user does.
        `image`: of the pod, where a cluster has no other."""
        claim, pod = yaml.safe_load_all((REPOSITORY / "examples/cluster/data-claim.yaml").read_text())
        if image is not None:
            pod["spec"]["containers"][0]["image"] = image
        self.apply(claim, pod, namespace=namespace)
        self.wait_pod(namespace, "upload", "Running")
        packed = subprocess.run(["tar", "-C", str(folder), "-cf", "-", "."], check=True, capture_output=True).stdout
        kubectl = (str(binaries.path_of("kubectl")), "--kubeconfig", str(self.kubeconfig))
        into = [*kubectl, "exec", "-i", "upload", "-n", namespace, "--", "tar", "-C", "/data", "-xof", "-"]

        def unpacked() -> bool:
            # kubernetes/kubernetes#112834: the API server at times loses what is sent.
            return subprocess.run(into, input=packed, check=False, timeout=PATIENCE).returncode == 0

        wait_for("the files on the claim", unpacked)

    def wait_pod(self, namespace: str, name: str, *phases: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """The pod, once its phase is one of these."""

        def pod() -> dict[str, Any] | None:
            found = self.get("--namespace", namespace, "pod", name)
            return found if found and found["status"].get("phase") in phases else None

        try:
            found = wait_for(f"pod {name} {' or '.join(phases)}", pod, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.kubectl('-n', namespace, 'describe', 'pod', name)}") from None
        assert found is not None
        return found


def unsupported() -> str | None:
    """Why the cluster tests are skipped here, None when they run."""
    if external() is not None:
        return None
    return preflight.unsupported()


def external() -> KubeCluster | None:
    """Somebody's own cluster, if DOVETAIL_TEST_CLUSTER=external says that KUBECONFIG's may be used."""
    if os.environ.get("DOVETAIL_TEST_CLUSTER") != "external":
        return None
    kubeconfig = os.environ.get("KUBECONFIG")
    assert kubeconfig, "DOVETAIL_TEST_CLUSTER=external needs KUBECONFIG"
    return KubeCluster(Path(kubeconfig), None)


@contextmanager
def running(name: str, **options: bool) -> Iterator[KubeCluster]:
    """A new cluster of hack/devcluster, taken down at the end. With DOVETAIL_TEST_CLUSTER=keep it is neither: an
    earlier one goes on, and the next session may use it. No other session on this machine uses it meanwhile.

    Its programs must be built: that takes longer than a test may.
    """
    modules = binaries.CONTROL_PLANE if options.get("api_only") else binaries.CLUSTER
    missing = [module for module in modules if not binaries.folder(module).is_dir()]
    if missing:
        raise ClusterError(f"not built yet: {', '.join(missing)} (make cluster-binaries)")
    with own_name(name) as mine:
        keep = os.environ.get("DOVETAIL_TEST_CLUSTER") == "keep"
        if not keep:
            lifecycle.down(mine)  # a session that was killed may have left it, with its objects
        try:
            cluster = lifecycle.up(mine, **options)
            yield KubeCluster(cluster.kubeconfig, mine)
        finally:
            if not keep:
                lifecycle.down(mine)


@contextmanager
def own_name(name: str) -> Iterator[str]:
    """The first of `name`, `name`-2 and so on that no other session has."""
    for number in range(1, 100):
        mine = name if number == 1 else f"{name}-{number}"
        with contextlib.ExitStack() as stack:
            path = state_root() / f".{mine}.session"
            try:
                stack.enter_context(locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                continue
            try:
                yield mine
            finally:
                path.unlink(missing_ok=True)
            tidy()
            return
    raise ClusterError(f"a hundred sessions have clusters named {name}")
