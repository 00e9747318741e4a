"""Names, paths and addresses of a cluster."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

SOURCES = Path(__file__).resolve().parent.parent
REPOSITORY = SOURCES.parent.parent


class ClusterError(Exception):
    """Something the user can act on; the message says what."""


def cache_root() -> Path:
    """Where built programs and images are kept across clones."""
    told = os.environ.get("DOVETAIL_DEVCLUSTER_CACHE")
    return Path(told) if told else Path.home() / ".cache/dovetail/devcluster"


def state_root() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "dovetail/devcluster"


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[TextIO]:
    """Holds a lock on this file. Whoever holds it alone may remove the file."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, how)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    continue
            except FileNotFoundError:
                continue  # whoever held it removed the file
            yield file
            return


def machine_lock() -> contextlib.AbstractContextManager[TextIO]:
    """For what all clusters of this machine share."""
    return locked(state_root() / ".lock")


def tidy() -> None:
    """Removes the folders of states, if no cluster and no lock is left."""
    root = state_root()
    if not root.exists():
        return
    with machine_lock():
        if not any(root.glob("*/cluster.json")):
            (root / ".lock").unlink()
    with contextlib.suppress(OSError):  # not empty
        root.rmdir()
        root.parent.rmdir()


@dataclass(frozen=True)
class Node:
    """A kubelet that claims to have GPUs; `index` is its place in the cluster's addresses."""

    name: str
    index: int
    product: str
    gpus: int = 8


NODES = (
    Node("a100", 1, "NVIDIA-A100-SXM4-80GB"),
    Node("v100", 2, "Tesla-V100-SXM2-32GB"),
    Node("a10", 3, "NVIDIA-A10"),
)
USERS = ("alice", "bob", "carol", "mallory")


@dataclass(frozen=True)
class Cluster:
    """One cluster; every path and name that it uses derives from its name, every address from `octet`."""

    name: str
    octet: int

    @property
    def state(self) -> Path:
        return state_root() / self.name

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def kubectl_cache(self) -> Path:
        """What kubectl and helm learn of the cluster, which would else be in ~/.kube."""
        return self.state / "kubectl-cache"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def prefix(self) -> str:
        """The cluster's first two bytes: it has the whole of 10.X.0.0/16."""
        return f"10.{self.octet}"

    @property
    def host(self) -> str:
        """This machine, as the cluster sees it."""
        return f"{self.prefix}.0.1"

    @property
    def address(self) -> str:
        """The API server's address, for this machine and for pods."""
        return f"{self.prefix}.0.2"

    @property
    def server(self) -> str:
        return f"https://{self.address}:6443"

    @property
    def pods(self) -> str:
        return f"{self.prefix}.0.0/17"

    @property
    def services(self) -> str:
        return f"{self.prefix}.240.0/20"

    @property
    def dns(self) -> str:
        return f"{self.prefix}.240.10"

    @property
    def link(self) -> str:
        """This machine's end of the cable."""
        return f"dvt{self.octet}"

    @property
    def cgroup(self) -> str:
        return f"dovetail-{self.name}"

    def node_state(self, node: Node) -> Path:
        return self.state / "nodes" / node.name

    def node_address(self, node: Node) -> str:
        """The node's InternalIP, and the gateway of its pods."""
        return f"{self.prefix}.{node.index}.1"

    def bridge(self, node: Node) -> str:
        return f"br-{node.name}"


def cluster_name(told: str | None = None) -> str:
    name = told or os.environ.get("DOVETAIL_CLUSTER") or "dovetail"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", name):
        raise ClusterError(f"{name!r} is no name for a cluster: use up to 22 lower-case letters, digits and dashes")
    return name


def find(name: str) -> Cluster | None:
    """The cluster of that name whose state is on this machine, running or not."""
    try:
        settings = json.loads((state_root() / name / "cluster.json").read_text())
    except FileNotFoundError:
        return None
    return Cluster(name, int(settings["octet"]))


def digest(*parts: bytes | str) -> str:
    """A short name for content."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:16]
