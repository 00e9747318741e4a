"""What hack/devcluster leaves on a machine: the kernel's settings as they were, and a cache of a stated size."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hack/devcluster"))

from devcluster import binaries, sysctls


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /proc/sys."""
    proc = tmp_path / "proc"
    for name in sysctls.NAMES[:3]:
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text("0\n")
    (state := tmp_path / "state").mkdir()
    monkeypatch.setattr(sysctls, "state_root", lambda: state)
    return proc


def a_cluster(machine: Path, name: str) -> Path:
    mark = machine.parent / "state" / name / "cluster.json"
    mark.parent.mkdir()
    mark.touch()
    return mark


def test_the_last_cluster_sets_the_kernels_settings_back(machine):
    one, two = a_cluster(machine, "one"), a_cluster(machine, "two")
    sysctls.keep(machine)
    (machine / "kernel/panic").write_text("10\n")
    sysctls.keep(machine)  # of the second cluster, when kubelets have written
    one.unlink()
    sysctls.restore(machine)
    assert (machine / "kernel/panic").read_text() == "10\n", "the other cluster's kubelets want it"
    two.unlink()
    sysctls.restore(machine)
    assert (machine / "kernel/panic").read_text() == "0\n"
    (machine / "kernel/panic").write_text("5\n")  # by somebody else, later
    sysctls.restore(machine)
    assert (machine / "kernel/panic").read_text() == "5\n"


def test_programs_of_other_versions_go_when_the_cache_is_full(tmp_path):
    for age, name in enumerate(["helm-now", "helm-last", "helm-older", "links"]):
        (folder := tmp_path / name).mkdir()
        (folder / "helm").write_bytes(b"x" * 1000)
        os.utime(folder, (1e9 - age, 1e9 - age))
    binaries._trim(tmp_path, {tmp_path / "helm-now"}, 2500)
    assert {path.name for path in tmp_path.iterdir()} == {"helm-now", "helm-last", "links"}
    binaries._trim(tmp_path, {tmp_path / "helm-now"}, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"helm-now", "links"}, "what is in use stays"
