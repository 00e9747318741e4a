"""Nodes: for each a mount namespace, containerd, a kubelet and the GPU device plugin; and one kube-proxy for all."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from devcluster import binaries, images
from devcluster.control_plane import kubectl, write_kubeconfig
from devcluster.settings import NODES, Cluster, Node
from devcluster.supervisor import Supervisor, wait_for

CONTAINERD_CONFIG = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

# Else it makes /opt/containerd.
[plugins.'io.containerd.internal.v1.opt']
path = "/var/lib/containerd/opt"

[grpc]
address = "/run/containerd/containerd.sock"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"

[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "{folder}/registries"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "dovetail-dev/pause:dev"

[plugins.'io.containerd.cri.v1.runtime']
# Without CAP_SYS_RESOURCE no score can be lowered.
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{folder}/cni"

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "mounted"

# Mounts this machine's /usr, Python and repository into every container: see the README.
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mounted]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{folder}/runtime-spec.json"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mounted.options]
SystemdCgroup = false

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.plain]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.plain.options]
SystemdCgroup = false
"""

# Shared, as kubelets want it, but not with the same folders under the machine's own path.
NODE_SCRIPT = """\
set -e
for folder in var run; do
  mount --bind {folder}/$folder /$folder
  mount --make-private /$folder
  mount --make-shared /$folder
done
exec sleep infinity
"""


def _runtime_spec(containerd: Path) -> dict[str, Any]:
    """containerd's own default, with the host's mounts and without the limits that it lifts for pods as well."""
    done = subprocess.run([str(containerd / "ctr"), "oci", "spec"], check=True, capture_output=True, text=True)
    spec: dict[str, Any] = json.loads(done.stdout)
    spec["process"].pop("rlimits", None)
    spec["process"].pop("apparmorProfile", None)
    spec["linux"].pop("seccomp", None)
    options = ["rbind", "ro", "nosuid", "nodev"]
    spec["mounts"] += [
        {"destination": name, "source": str(path), "type": "bind", "options": options}
        for name, path in images.host_mounts().items()
    ]
    return spec


def _cni(cluster: Cluster, node: Node) -> dict[str, Any]:
    subnet = f"{cluster.prefix}.{node.index}.0/24"
    bridge = {
        "type": "bridge",
        "bridge": cluster.bridge(node),
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _kubelet(cluster: Cluster, node: Node) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": cluster.node_address(node),
        "healthzPort": 0,
        "readOnlyPort": 0,
        "oomScoreAdj": 0,
        # The API server has no client certificate; only pods and this machine can reach the address.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [cluster.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": str(cluster.node_state(node) / "resolv.conf"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.cgroup}/{node.name}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "evictionHard": {"memory.available": "100Mi"},
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        "maxPods": 200,
        # The machine's disk may be fuller than that, and images are pinned.
        "imageGCHighThresholdPercent": 100,
        # How soon a mounted Secret follows: webhooks wait for their certificates at first.
        "syncFrequency": "5s",
    }


def _write(cluster: Cluster, node: Node, containerd: Path) -> Path:
    folder = cluster.node_state(node)
    for name in ("var/lib", "var/log", "var/tmp", "run", "cni"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "var/run").is_symlink():
        (folder / "var/run").symlink_to("/run")
    (folder / "resolv.conf").write_text("# no servers but the cluster's own\n")
    (folder / "containerd.toml").write_text(CONTAINERD_CONFIG.format(folder=folder))
    (folder / "runtime-spec.json").write_text(json.dumps(_runtime_spec(containerd)))
    (folder / "cni/pods.conflist").write_text(json.dumps(_cni(cluster, node)))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(cluster, node)))
    write_kubeconfig(cluster, f"system:node:{node.name}", folder / "kubeconfig")
    return folder


def _start(cluster: Cluster, supervisor: Supervisor, node: Node, archive: Path) -> None:
    containerd, kubernetes = binaries.build("containerd"), binaries.build("kubernetes")
    folder = _write(cluster, node, containerd)
    namespace = ["unshare", "--mount", "--propagation", "private", "--"]
    supervisor.start(f"node-{node.name}", [*namespace, "sh", "-c", NODE_SCRIPT.format(folder=folder)])
    ready = f"mountpoint -q /run && test {folder}/run -ef /run"
    wait_for(
        f"node {node.name}'s folders",
        lambda: subprocess.run([*supervisor.enter(node), "sh", "-c", ready], capture_output=True).returncode == 0,
        30,
    )
    # As the supervisor's own child, in the namespace of the node's first process.
    holder = supervisor.ask(do="status")[f"node-{node.name}"]["pid"]
    enter = ["nsenter", "--target", str(holder), "--mount", "--"]
    path = {"PATH": f"{containerd}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    config = ["--config", str(folder / "containerd.toml")]
    supervisor.start(f"containerd-{node.name}", [*enter, str(containerd / "containerd"), *config], path)
    kubelet = [
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={folder / 'kubeconfig'}",
        f"--hostname-override={node.name}",
        f"--node-ip={cluster.node_address(node)}",
        f"--node-labels=nvidia.com/gpu.product={node.product},nvidia.com/gpu.count={node.gpus}",
    ]
    load(supervisor, node, archive)
    supervisor.start(f"kubelet-{node.name}", [*enter, str(kubernetes / "kubelet"), *kubelet], path)
    plugin = [str(kubernetes / "gpu-device-plugin"), f"-count={node.gpus}"]
    supervisor.start(f"gpus-{node.name}", [*enter, *plugin])


def load(supervisor: Supervisor, node: Node, archive: Path) -> None:
    """The archive's images into the node's containerd; does nothing for an archive that was loaded before."""
    marks = supervisor.cluster.node_state(node) / "loaded"
    marks.mkdir(exist_ok=True)
    mark = marks / f"{archive.stem}-{int(archive.stat().st_mtime)}"
    if mark.exists():
        return
    ctr = str(binaries.path_of("ctr"))
    answers = ("sh", "-c", '"$0" version >/dev/null 2>&1 && echo yes', ctr)
    wait_for(f"containerd on {node.name}", lambda: supervisor.run(*answers, node=node, check=False), 120)
    # Images are put there by hand, and nothing could fetch them again: a kubelet that frees disk leaves them.
    pinned = "--label=io.cri-containerd.pinned=pinned"
    supervisor.run(ctr, "--namespace=k8s.io", "images", "import", pinned, str(archive), node=node)
    mark.touch()


def allow_plain_registry(cluster: Cluster, address: str) -> None:
    """Lets all nodes pull from the registry at host:port without TLS."""
    hosts = f'server = "http://{address}"\n[host."http://{address}"]\ncapabilities = ["pull", "resolve"]\n'
    for node in NODES:
        folder = cluster.node_state(node) / "registries" / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(hosts)


def load_everywhere(supervisor: Supervisor, archive: Path) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: load(supervisor, node, archive), NODES))


def start(cluster: Cluster, supervisor: Supervisor, archive: Path) -> None:
    """Starts all nodes and kube-proxy; `wait_ready` waits for them."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: _start(cluster, supervisor, node, archive), NODES))
    config = write_kubeconfig(cluster, "system:kube-proxy", cluster.state / "kube-proxy.kubeconfig")
    flags = [
        f"--kubeconfig={config}",
        f"--hostname-override={NODES[0].name}",
        f"--cluster-cidr={cluster.pods}",
        "--proxy-mode=iptables",
        "--iptables-min-sync-period=200ms",
        # Limits of the whole machine, which stay as they are.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--oom-score-adj=0",
        "--metrics-bind-address=127.0.0.1:10249",
    ]
    if not Path("/proc/sys/net/bridge").exists():
        # Two pods of one node would answer each other over the bridge, past the address translation.
        flags.append("--masquerade-all")
    supervisor.start("kube-proxy", [str(binaries.build("kubernetes") / "kube-proxy"), *flags])


def wait_ready(cluster: Cluster, seconds: float = 600) -> None:
    """All nodes Ready, with their GPUs."""

    def ready() -> bool:
        items = json.loads(kubectl(cluster, "get", "nodes", "--output=json", check=False) or '{"items": []}')["items"]
        found = {item["metadata"]["name"]: item["status"] for item in items}
        return all(
            any(c["type"] == "Ready" and c["status"] == "True" for c in found[node.name]["conditions"])
            and found[node.name].get("allocatable", {}).get("nvidia.com/gpu") == str(node.gpus)
            for node in NODES
            if node.name in found
        ) and len(found) >= len(NODES)

    wait_for(f"three Ready nodes with GPUs (see {cluster.logs})", ready, seconds, interval=0.3)


def forget(cluster: Cluster) -> None:
    """Removes the cluster's folders; call it when nothing of the cluster runs."""
    shutil.rmtree(cluster.state, ignore_errors=False)
