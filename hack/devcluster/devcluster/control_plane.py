"""etcd, API server, controller manager and scheduler, and the credentials to use them."""

import json
import os
import secrets
import subprocess
from pathlib import Path

from devcluster import binaries
from devcluster.settings import NODES, USERS, Cluster, ClusterError
from devcluster.supervisor import Supervisor, wait_for

# A real control plane has machines of its own. Here it and who asks it come before the pods. Else nothing is answered
# for half a minute when many of them start. Linux shares the processors between sessions (autogroups), and `nice`
# counts only inside one, so each has a session of its own.
FIRST = ("sh", "-c", 'echo -10 2>/dev/null >/proc/self/autogroup; exec nice -n -10 "$@"', "first")
API = ("etcd", "kube-apiserver", "kube-controller-manager")


def _tokens(cluster: Cluster) -> dict[str, str]:
    """Token of every user; made on the first call, and the file that the API server reads with it."""
    path = cluster.pki / "tokens.csv"
    if not path.exists():
        groups = {"admin": "system:masters", "system:kube-proxy": ""}
        groups |= {f"system:node:{node.name}": "system:nodes" for node in NODES}
        lines = [f'{secrets.token_hex(16)},{user},{user},"{group}"' for user, group in groups.items()]
        lines += [f"{user}-token,{user},{user}," for user in USERS]
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines))
    return {line.split(",")[1]: line.split(",")[0] for line in path.read_text().splitlines()}


def _service_account_key(cluster: Cluster) -> tuple[Path, Path]:
    private, public = cluster.pki / "sa.key", cluster.pki / "sa.pub"
    if not public.exists():
        for command in (
            ["openssl", "genrsa", "-out", str(private), "2048"],
            ["openssl", "rsa", "-in", str(private), "-pubout", "-out", str(public)],
        ):
            subprocess.run(command, check=True, capture_output=True)
    return private, public


def kubeconfig(cluster: Cluster, user: str) -> dict[str, object]:
    """A kubeconfig for one of the users. Needs the API server's certificate, so an API server that has started once."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": cluster.name,
        "clusters": [
            {
                "name": cluster.name,
                "cluster": {"server": cluster.server, "certificate-authority": str(cluster.pki / "apiserver.crt")},
            }
        ],
        "users": [{"name": user, "user": {"token": _tokens(cluster)[user]}}],
        "contexts": [{"name": cluster.name, "context": {"cluster": cluster.name, "user": user}}],
    }


def write_kubeconfig(cluster: Cluster, user: str, path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text(json.dumps(kubeconfig(cluster, user), indent=1))
    return path


def kubectl(cluster: Cluster, *words: str, stdin: str | None = None, check: bool = True) -> str:
    """kubectl as the administrator, from this machine. Raises: ClusterError with its last words."""
    done = subprocess.run(
        [*FIRST, str(binaries.path_of("kubectl")), "--kubeconfig", str(cluster.kubeconfig), *words],
        env={**os.environ, "KUBECACHEDIR": str(cluster.kubectl_cache)},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        start_new_session=True,
    )
    if check and done.returncode != 0:
        raise ClusterError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout if done.returncode == 0 else ""


def _etcd(cluster: Cluster) -> list[str]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        f"--data-dir={cluster.state / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--auto-compaction-retention=5m",
        "--quota-backend-bytes=4294967296",
    ]


def _apiserver(cluster: Cluster, key: Path, public: Path) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={cluster.address}",
        "--secure-port=6443",
        f"--cert-dir={cluster.pki}",
        f"--service-cluster-ip-range={cluster.services}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={key}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--token-auth-file={cluster.pki / 'tokens.csv'}",
        # Else it looks up the nodes' names.
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged",
        "--event-ttl=2h",
    ]


# Alpha in Kubernetes 1.36: PodGroups, and the scheduler's plug-in for them.
GANGS = "--feature-gates=GenericWorkload=true,GangScheduling=true"
GANG_KINDS = "--runtime-config=scheduling.k8s.io/v1alpha2=true"


def start(cluster: Cluster, supervisor: Supervisor, *, scheduler: bool, gangs: bool = False) -> None:
    """Returns when the API server is ready and the kubeconfig is written. `gangs`: with Kubernetes' own gangs."""
    program = binaries.build("kubernetes")
    cluster.pki.mkdir(parents=True, exist_ok=True)
    os.chmod(cluster.pki, 0o700)
    _tokens(cluster)
    key, public = _service_account_key(cluster)
    supervisor.start("etcd", [*FIRST, str(program / "etcd"), *_etcd(cluster)])
    more = [GANGS] if gangs else []
    server = [*_apiserver(cluster, key, public), *([GANG_KINDS] if gangs else []), *more]
    supervisor.start("kube-apiserver", [*FIRST, str(program / "kube-apiserver"), *server])
    certificate = cluster.pki / "apiserver.crt"
    wait_for("the API server's certificate", lambda: certificate.exists() and certificate.stat().st_size, 120)
    write_kubeconfig(cluster, "admin", cluster.kubeconfig)

    config = f"--kubeconfig={cluster.kubeconfig}"
    many = ["--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400"]
    manager = [
        config,
        *many,
        f"--service-account-private-key-file={key}",
        f"--root-ca-file={certificate}",
        "--use-service-account-credentials",
        "--concurrent-job-syncs=20",
        *more,
    ]
    supervisor.start("kube-controller-manager", [str(program / "kube-controller-manager"), *manager])
    if scheduler:
        supervisor.start("kube-scheduler", [str(program / "kube-scheduler"), config, *many, *more])
    wait_ready(cluster)


def wait_ready(cluster: Cluster, seconds: float = 400) -> None:
    def ready() -> bool:
        return kubectl(cluster, "get", "--raw", "/readyz", check=False) == "ok"

    try:
        wait_for("the API server", ready, seconds, interval=0.2)
        # Made by the controller manager, and without it no pod is admitted.
        wait_for(
            "the default service account",
            lambda: kubectl(cluster, "get", "serviceaccount", "default", "--output=name", check=False),
            seconds,
            interval=0.2,
        )
    except ClusterError as error:
        raise ClusterError(f"{error}; see {cluster.logs}/*.log") from error
