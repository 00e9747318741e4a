"""What runs on the cluster before anybody's own: storage, CoreDNS, JobSet, and on request Kueue, kwok and what
executes NetworkPolicies."""

import os
import subprocess
from string import Template

from devcluster import binaries, images, nodes
from devcluster.control_plane import FIRST, kubectl
from devcluster.settings import NODES, REPOSITORY, SOURCES, Cluster, ClusterError, digest
from devcluster.supervisor import Supervisor

MANIFESTS = SOURCES / "manifests"
ROLLOUT_SECONDS = 900
# Without the one that ends the pods of Jobs as soon as they run.
KWOK_STAGES = (
    "node/fast/node-initialize",
    "node/heartbeat-with-lease/node-heartbeat-with-lease",
    "pod/fast/pod-ready",
    "pod/fast/pod-delete",
)


def apply(cluster: Cluster, name: str) -> None:
    text = Template((MANIFESTS / name).read_text()).substitute(DNS=cluster.dns)
    kubectl(cluster, "apply", "--server-side", "--force-conflicts", "--field-manager=devcluster", "-f", "-", stdin=text)


def helm(cluster: Cluster, *words: str) -> None:
    """Helm with folders of the cluster's own. Raises: ClusterError with its last words."""
    homes = {"KUBECACHEDIR": str(cluster.kubectl_cache)} | {
        f"HELM_{kind}_HOME": str(cluster.state / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
    }
    done = subprocess.run(
        [*FIRST, str(binaries.path_of("helm")), "--kubeconfig", str(cluster.kubeconfig), *words],
        env={**os.environ, **homes},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ROLLOUT_SECONDS,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise ClusterError(f"helm {' '.join(words)}: {done.stderr.strip()}")


def _chart(cluster: Cluster, name: str, path: str, values: str) -> None:
    """Installs the chart in the source of a Go module; does nothing if it is installed with these values."""
    source = binaries.module_folder(name, path) / "charts" / name
    done = cluster.state / f"chart-{name}-{digest(str(source), (MANIFESTS / values).read_bytes())}"
    if not done.exists():
        flags = ["--create-namespace", f"--namespace={name}-system", f"--values={MANIFESTS / values}"]
        helm(cluster, "upgrade", "--install", name, str(source), *flags)
        done.touch()


def wait_rollout(cluster: Cluster, namespace: str, *deployments: str) -> None:
    for deployment in deployments:
        words = ("rollout", "status", f"--timeout={ROLLOUT_SECONDS}s", f"deployment/{deployment}")
        kubectl(cluster, "--namespace", namespace, *words)


def start_volumes(cluster: Cluster, supervisor: Supervisor) -> None:
    volumes = cluster.state / "volumes"
    volumes.mkdir(exist_ok=True)
    program = str(binaries.path_of("volume-provisioner"))
    supervisor.start("volumes", [program, f"-kubeconfig={cluster.kubeconfig}", f"-root={volumes}"])


def install(cluster: Cluster) -> None:
    """Applies all that every cluster has; `wait` waits for it."""
    apply(cluster, "cluster.yaml")
    apply(cluster, "coredns.yaml")
    _chart(cluster, "jobset", "sigs.k8s.io/jobset", "jobset-values.yaml")


def wait(cluster: Cluster) -> None:
    wait_rollout(cluster, "kube-system", "coredns")
    wait_rollout(cluster, "jobset-system", "jobset-controller")


def install_dovetail(cluster: Cluster, namespace: str, values: list[str]) -> None:
    """This checkout's chart, with `values` as for `helm --set`; returns when its deployments are there."""
    flags = ["--create-namespace", f"--namespace={namespace}", f"--values={MANIFESTS / 'dovetail-values.yaml'}"]
    sets = [f"--set={value}" for value in values]
    helm(cluster, "upgrade", "--install", "dovetail", str(REPOSITORY / "helm/dovetail"), *flags, *sets)
    selector = "--selector=app.kubernetes.io/instance=dovetail"
    names = kubectl(cluster, "--namespace", namespace, "get", "deployments", selector, "--output=name")
    wait_rollout(cluster, namespace, *(name.rpartition("/")[2] for name in names.split()))


def install_kueue(cluster: Cluster, supervisor: Supervisor) -> None:
    nodes.load_everywhere(supervisor, images.kueue_archive())
    _chart(cluster, "kueue", "sigs.k8s.io/kueue", "kueue-values.yaml")
    wait_rollout(cluster, "kueue-system", "kueue-controller-manager")


def start_policies(cluster: Cluster, supervisor: Supervisor) -> None:
    """Executes NetworkPolicies. `stop policies` ends that, and takes its rules away."""
    node = NODES[0]
    flags = [f"-node={node.name}", f"-address={cluster.node_address(node)}", f"-services={cluster.services}"]
    program = str(binaries.path_of("kube-router"))
    supervisor.start("policies", [program, f"-kubeconfig={cluster.kubeconfig}", *flags])


def start_kwok(cluster: Cluster, supervisor: Supervisor, *flags: str) -> None:
    """Plays the kubelet of every node that is annotated `kwok.x-k8s.io/node: fake`."""
    selector = "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"
    given = [f"--kubeconfig={cluster.kubeconfig}", selector, "--node-lease-duration-seconds=40"]
    folder = binaries.module_folder("kwok", "sigs.k8s.io/kwok") / "kustomize/stage"
    given += [f"--config={folder / stage}.yaml" for stage in KWOK_STAGES]
    supervisor.start("kwok", [str(binaries.path_of("kwok")), *given, *flags])
