"""The cgroups of a cluster's pods: one folder a node, in every hierarchy of cgroup v1 or in the one of v2."""

import contextlib
import os
import time
from pathlib import Path

from devcluster.settings import NODES, Cluster, ClusterError

ROOT = Path("/sys/fs/cgroup")
SHARES = 32_768  # of cgroup v1; a process outside has 1,024
WEIGHT = 3_200  # of v2, where that is 100


def _unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    if _unified():
        return [ROOT]
    return sorted(path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink())


def create(cluster: Cluster) -> None:
    """Does nothing for those that exist. Raises: ClusterError where this machine does not let us."""
    try:
        for hierarchy in _hierarchies():
            _create(hierarchy, cluster)
    except OSError as error:
        raise ClusterError(f"cannot make cgroups, in which pods run: {error}") from error


def _create(hierarchy: Path, cluster: Cluster) -> None:
    top = hierarchy / cluster.cgroup
    for folder in [top, *(top / node.name for node in NODES)]:
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            # A cpuset of v1 starts empty, and then takes no process.
            if (folder / name).exists() and not _unified():
                (folder / name).write_text((folder.parent / name).read_text())
    if _unified():
        for folder in (hierarchy, top):
            for controller in (folder / "cgroup.controllers").read_text().split():
                (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    # Else all pods together would get as much of a busy machine as any one process outside.
    for name, value in (("cpu.shares", SHARES), ("cpu.weight", WEIGHT)):
        if (top / name).exists():
            (top / name).write_text(str(value))


def remove(cluster: Cluster, seconds: float = 120) -> None:
    """Once all processes in them are dead, which takes the kernel a moment. Raises: ClusterError past the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        left = [hierarchy / cluster.cgroup for hierarchy in _hierarchies() if (hierarchy / cluster.cgroup).is_dir()]
        for top in left:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        left = [folder for folder in left if folder.is_dir()]
        if not left:
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"processes still run in {left[0]}")
        time.sleep(0.1)
