"""The cgroups of hack/devcluster in a real cgroup v2 hierarchy, also where v1 has most of the controllers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "hack/devcluster"))

from devcluster import cgroups
from devcluster.settings import NODES, Cluster, ClusterError

from helpers.patience import PATIENCE


@pytest.fixture
def root(monkeypatch):
    """Where cgroup v2 is mounted; its own controllers are as before afterwards."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        lines = []
    found = next((Path(words[1]) for words in lines if words[2] == "cgroup2"), None)
    if found is None or not os.access(found, os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs root, and cgroup v2 mounted somewhere")
    monkeypatch.setattr(cgroups, "ROOT", found)
    control = found / "cgroup.subtree_control"
    before = set(control.read_text().split())
    yield found
    for controller in set(control.read_text().split()) - before:
        control.write_text(f"-{controller}")


def test_cgroups_of_v2_are_made_twice_and_removed_when_their_processes_are_gone(root):
    cluster = Cluster(f"v2-{os.getpid()}", 200)
    top, node = root / cluster.cgroup, root / cluster.cgroup / NODES[0].name
    process = subprocess.Popen(["sleep", "600"])
    try:
        try:
            cgroups.create(cluster)
            cgroups.create(cluster)
        except ClusterError as error:
            pytest.skip(f"this machine lends no cgroups: {error}")
        controllers = set((root / "cgroup.controllers").read_text().split())
        assert {folder.name for folder in top.iterdir() if folder.is_dir()} == {n.name for n in NODES}
        assert set((node / "cgroup.controllers").read_text().split()) == controllers, "a kubelet can limit its pods"
        if "cpu" in controllers:
            assert int((top / "cpu.weight").read_text()) == cgroups.WEIGHT
        pod = node / "kubepods"
        pod.mkdir()
        (pod / "cgroup.procs").write_text(str(process.pid))
        with pytest.raises(ClusterError, match="processes still run in"):
            cgroups.remove(cluster, seconds=0.2)
    finally:
        process.kill()
        process.wait(PATIENCE)
        cgroups.remove(cluster)
    assert not top.exists()
