"""hack/devcluster is a real cluster, and leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devcluster import lifecycle, preflight, settings
from devcluster.supervisor import Supervisor

from helpers import cluster as helper
from helpers.cluster import KubeCluster, own_name, wait_for
from helpers.patience import PATIENCE

BUSYBOX = "dovetail-dev/busybox:dev"
PRODUCTS = {"a100": "NVIDIA-A100-SXM4-80GB", "v100": "Tesla-V100-SXM2-32GB", "a10": "NVIDIA-A10"}
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode(), end=str())"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

pytestmark = pytest.mark.skipif(
    helper.external() is not None, reason="for hack/devcluster, and KUBECONFIG is another's"
)


def pod(name: str, script: str, node: str, gpus: int = 0, **container: Any) -> dict[str, Any]:
    """A pod of one container that runs a shell script on a node; `volumes` is the pod's, the rest the container's."""
    volumes = container.pop("volumes", [])
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    container = {"name": "main", "image": BUSYBOX, "command": ["sh", "-ec", script], **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"nvidia.com/gpu.product": PRODUCTS[node]},
            "containers": [container],
            "volumes": volumes,
        },
    }


def log_of(cluster: KubeCluster, namespace: str, name: str) -> str:
    """What the pod wrote, once it has ended well."""
    found = cluster.wait_pod(namespace, name, "Succeeded", "Failed")
    log = cluster.kubectl("--namespace", namespace, "logs", name)
    assert found["status"]["phase"] == "Succeeded", log
    return log


def ready_nodes(cluster: KubeCluster) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in cluster.items("nodes")
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
    }


def test_three_nodes_are_ready_with_their_gpus(cluster: KubeCluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in cluster.items("nodes")}
    assert {name: node["metadata"]["labels"]["nvidia.com/gpu.product"] for name, node in nodes.items()} == PRODUCTS
    assert ready_nodes(cluster) == set(PRODUCTS)
    for node in nodes.values():
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert node["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.36")


def test_gpus_are_given_out_on_the_right_node_and_no_more_than_there_are(cluster: KubeCluster, namespace: str) -> None:
    cluster.apply(
        pod("fits", "echo $NVIDIA_VISIBLE_DEVICES", "v100", gpus=8),
        pod("too-many", "true", "a10", gpus=9),
        namespace=namespace,
    )
    assert len(set(log_of(cluster, namespace, "fits").strip().split(","))) == 8
    assert cluster.get("--namespace", namespace, "pod", "fits")["spec"]["nodeName"] == "v100"

    def refusal() -> str:
        status = cluster.get("--namespace", namespace, "pod", "too-many")["status"]
        return next((c.get("message", "") for c in status.get("conditions", []) if c["type"] == "PodScheduled"), "")

    assert "Insufficient nvidia.com/gpu" in wait_for("the scheduler's verdict", refusal)


def test_pods_of_unlike_nodes_reach_each_other_by_service_name_and_by_pod_name(
    cluster: KubeCluster, namespace: str
) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    service["spec"] = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]}
    headless = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "peers"}}
    headless["spec"] = {"selector": {"app": "server"}, "clusterIP": "None", "ports": [{"port": 8080}]}
    serve = "mkdir www; echo hello from $HOSTNAME > www/index.html; exec python -m http.server 8080 --directory www"
    image = {"image": "dovetail-dev/operator:dev", "workingDir": "/tmp"}
    server = pod("server", serve, "a10", **image)
    server["spec"] |= {"hostname": "server", "subdomain": "peers"}
    cluster.apply(service, headless, server, namespace=namespace)
    address = cluster.wait_pod(namespace, "server", "Running")["status"]["podIP"]
    urls = ("http://web", f"http://web.{namespace}.svc.cluster.local", "http://server.peers:8080")
    script = "\n".join(f"until python -c '{ASK}' {url} 2>/tmp/error; do sleep 0.2; done" for url in urls)
    # From another node, and from the server's own, where the answer must not take a short cut.
    cluster.apply(pod("far", script, "a100", **image), pod("near", script, "a10", **image), namespace=namespace)
    for client in ("far", "near"):
        assert log_of(cluster, namespace, client).splitlines() == ["hello from server"] * 3
    service_address = cluster.get("--namespace", namespace, "service", "web")["spec"]["clusterIP"]
    for url in (f"http://{address}:8080", f"http://{service_address}"):
        with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
            assert reply.read() == b"hello from server\n", "this machine reaches pods and services"


def test_the_application_image_runs_this_checkout_under_the_restricted_standard(cluster: KubeCluster) -> None:
    with cluster.namespace({"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        script = "python -c 'import dovetail.manifest.types as types, numpy; print(types.__file__)'; id -u"
        program = pod("program", script, "a100", image="dovetail-dev/trainer:dev", securityContext=RESTRICTED)
        cluster.apply(program, namespace=namespace)
        where, user = log_of(cluster, namespace, "program").splitlines()
        assert where == "/opt/checkout/src/dovetail/manifest/types.py"
        assert user == "65532"


def test_a_claim_is_shared_by_nodes_and_its_folder_goes_with_it(cluster: KubeCluster, namespace: str) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}}
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    mounts: dict[str, Any] = {
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        "securityContext": {"runAsUser": 1000},
    }
    cluster.apply(
        claim,
        pod("writer", "echo from a100 > /shared/file", "a100", **mounts),
        pod("reader", "until test -s /shared/file; do sleep 0.1; done; cat /shared/file", "v100", **mounts),
        namespace=namespace,
    )
    assert log_of(cluster, namespace, "reader") == "from a100\n"
    volume = cluster.get("--namespace", namespace, "pvc", "shared")["spec"]["volumeName"]
    folder = Path(cluster.get("pv", volume)["spec"]["hostPath"]["path"])
    assert (folder / "file").exists()
    cluster.kubectl("--namespace", namespace, "delete", "pod", "--all", "--now")
    cluster.kubectl("--namespace", namespace, "delete", "pvc", "shared", "--wait=false")
    wait_for("the folder's end", lambda: not folder.exists())


def test_a_jobset_runs_to_its_end(cluster: KubeCluster, namespace: str) -> None:
    template = pod("x", "true", "v100")["spec"]
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "small"}}
    jobset["spec"] = {
        "replicatedJobs": [{"name": "all", "replicas": 2, "template": {"spec": {"template": {"spec": template}}}}]
    }
    cluster.apply(jobset, namespace=namespace)

    def state() -> bool:
        status = cluster.get("--namespace", namespace, "jobset", "small").get("status", {})
        return bool(status.get("terminalState") == "Completed")

    wait_for("the JobSet's end", state)


def test_a_user_may_do_what_he_is_bound_to_and_no_more(cluster: KubeCluster, namespace: str) -> None:
    alice = KubeCluster(cluster.user("alice"), None)
    assert "forbidden" in alice.try_kubectl("--namespace", namespace, "get", "pods").stderr
    words = ("create", "rolebinding", "alice", "--clusterrole=view", "--user=alice")
    cluster.kubectl("--namespace", namespace, *words)
    wait_for("the binding", lambda: alice.try_kubectl("-n", namespace, "get", "pods").returncode == 0)
    assert "forbidden" in alice.try_kubectl("--namespace", namespace, "delete", "pod", "any").stderr


def test_a_killed_kubelet_and_a_stopped_etcd_come_back(cluster: KubeCluster, namespace: str) -> None:
    cluster.apply(pod("steady", "exec sleep 3600", "v100", gpus=2), namespace=namespace)
    before = cluster.wait_pod(namespace, "steady", "Running")["status"]["containerStatuses"][0]["containerID"]

    def process(name: str) -> dict[str, Any]:
        return dict(json.loads(cluster.devcluster("status"))["processes"][name])

    restarts = process("kubelet-v100")["restarts"]
    cluster.devcluster("kill", "kubelet-v100")
    cluster.devcluster("stop", "etcd")
    wait_for("the end of etcd", lambda: process("etcd")["pid"] is None)
    cluster.devcluster("start", "etcd")
    wait_for("the API server", lambda: cluster.try_kubectl("get", "--raw", "/readyz").stdout == "ok")
    wait_for("the nodes", lambda: ready_nodes(cluster) == set(PRODUCTS))

    assert wait_for("the kubelet", lambda: process("kubelet-v100")["restarts"] - restarts) == 1
    cluster.apply(pod("later", "echo $NVIDIA_VISIBLE_DEVICES", "v100", gpus=6), namespace=namespace)
    assert len(log_of(cluster, namespace, "later").split(",")) == 6, "the other two are still taken"
    steady = cluster.wait_pod(namespace, "steady", "Running")["status"]["containerStatuses"][0]
    assert steady["containerID"] == before, "a kubelet that restarts leaves its pods alone"


def test_bringing_up_a_cluster_that_runs_changes_nothing(cluster: KubeCluster) -> None:
    assert cluster.name
    before = json.loads(cluster.devcluster("status"))["processes"]
    lifecycle.up(cluster.name)
    assert json.loads(cluster.devcluster("status"))["processes"] == before


def traces(mine: str) -> dict[str, set[str]]:
    """What the cluster `mine` could leave on this machine, by kind; without that of the clusters that run beside it."""

    def lines(*command: str) -> set[str]:
        return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())

    def below(folder: Path) -> set[str]:
        return {str(path) for path in folder.glob("[!.]*")}

    found = {
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "links": {line.split(":")[1].strip() for line in lines("ip", "-o", "link")},
        "routes": lines("ip", "route"),
        "iptables": {line for table in ("filter", "nat", "mangle") for line in lines("iptables", "-t", table, "-S")},
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.is_dir()},
        "namespaces": below(Path("/run/netns")),
        "folders": below(settings.state_root()) | below(Path("/var/lib/cni")) | below(Path("/var/lib/kubelet")),
        "programs": below(Path("/opt")),
        "forwarding": {Path("/proc/sys/net/ipv4/ip_forward").read_text()},
    }
    names = [path.parent.name for path in settings.state_root().glob("*/cluster.json")]
    others = [other for name in names if name != mine and (other := settings.find(name))]
    marks = [re.escape(mark) for other in others for mark in (other.link, f"{other.prefix}.")]
    # The name of one cluster may begin with another's: gone, and gone-2.
    marks += [re.escape(mark) + r"(?![\w-])" for other in others for mark in (other.cgroup, str(other.state))]
    theirs = re.compile("|".join(marks) or "(?!)")
    return {kind: {one for one in all if not theirs.search(one)} for kind, all in found.items()}


def processes(cluster: settings.Cluster, namespace: str) -> set[str]:
    """Every process in the cluster's own PID namespace or in one of its cgroups."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            inside = os.readlink(process / "ns/pid") == namespace
            if inside or f"/{cluster.cgroup}/" in (process / "cgroup").read_text():
                found.add((process / "comm").read_text().strip())
        except OSError:
            continue  # it has just ended
    return found


@pytest.fixture
def gone() -> Iterator[str]:
    """The name of a cluster that does not run, and that no other session of the tests uses."""
    with own_name("gone") as name:
        lifecycle.down(name)  # a session that was killed may have left it
        yield name


@pytest.mark.nightly
def test_nothing_is_left_of_a_cluster_and_its_pods_not_even_of_one_that_was_killed(gone: str) -> None:
    name, before = gone, traces(gone)
    try:
        cluster = lifecycle.up(name)
        first = Supervisor(cluster).pid()
        assert first is not None
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        kube = KubeCluster(cluster.kubeconfig, name)
        kube.apply(pod("victim", "exec sleep 3600", "a10", gpus=1))
        kube.wait_pod("default", "victim", "Running")
        assert {"etcd", "kubelet", "containerd", "sleep"} <= processes(cluster, namespace)
        assert traces(name)["cgroups"] - before["cgroups"]
        # As when a session ends: nobody tidies up.
        os.kill(first, signal.SIGKILL)
        wait_for("the end of all processes", lambda: not processes(cluster, namespace))
        # It clears away what is left, and starts from nothing.
        lifecycle.up(name, api_only=True)
        assert kube.get("pod", "victim") is None
    finally:
        lifecycle.down(name)

    def left() -> dict[str, set[str]]:
        return {kind: new for kind, found in traces(name).items() if (new := found - before[kind])}

    # Another worker of the tests may be taking a cluster of its own down.
    with contextlib.suppress(AssertionError):  # what is left is shown below
        wait_for("nothing left", lambda: not left(), 60, 1.0)
    assert left() == {}


def test_the_control_plane_alone_serves_and_keeps_what_it_is_given(api_server: KubeCluster) -> None:
    with api_server.namespace() as namespace:
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"key": "value"}}
        api_server.apply(manifest, namespace=namespace)
        assert api_server.get("--namespace", namespace, "configmap", "kept")["data"] == {"key": "value"}
    wait_for("the namespace's end", lambda: api_server.get("namespace", namespace) is None)


def test_what_the_machine_lacks_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(settings.ClusterError, match="needs root"):
            preflight.check()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(
            settings.ClusterError, match=r"missing Debian packages: .*iptables.* \(make cluster-packages"
        ):
            preflight.check()
    with pytest.raises(settings.ClusterError, match="no name for a cluster"):
        settings.cluster_name("Not A Name")
