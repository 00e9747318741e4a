"""What hack/devcluster leaves on a machine: the kernel's settings as they were, and a cache of a stated size."""

import fcntl
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "hack/devcluster"))

from devcluster import binaries, lifecycle, sysctls
from devcluster.settings import Cluster, ClusterError, locked, machine_lock, state_root, tidy

from helpers.cluster import running
from helpers.patience import PATIENCE


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /proc/sys."""
    proc = tmp_path / "proc"
    for name in sysctls.NAMES[:3]:
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text("0\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return proc


def a_cluster(machine: Path, name: str) -> Path:
    mark = state_root() / name / "cluster.json"
    mark.parent.mkdir(parents=True)
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


def test_the_last_cluster_leaves_no_file_and_no_folder(machine):
    mark = a_cluster(machine, "one")
    with machine_lock():
        pass
    tidy()
    assert mark.exists()
    shutil.rmtree(mark.parent)
    with locked(state_root() / ".one.users", fcntl.LOCK_SH):
        tidy()
        (state_root() / ".one.users").unlink()
    tidy()
    assert not (machine.parent / "state" / "dovetail").exists()


def test_who_waits_for_a_lock_whose_file_was_removed_has_the_next_one(machine):
    path, order = state_root() / ".x.lock", []

    def second():
        with locked(path):
            order.append("second")

    with locked(path):
        (thread := threading.Thread(target=second)).start()
        order.append("first")
        path.unlink()
    thread.join(PATIENCE)
    assert order == ["first", "second"]
    assert path.exists()


def test_each_session_of_the_tests_has_a_new_cluster_of_its_own(machine, monkeypatch):
    calls = []

    def up(name, **options):
        calls.append(f"up {name}")
        if options:
            raise ClusterError("not ready")
        return Cluster(name, 200)

    monkeypatch.setattr(lifecycle, "up", up)
    monkeypatch.setattr(lifecycle, "down", lambda name: calls.append(f"down {name}"))
    monkeypatch.setattr(binaries, "folder", lambda module: machine)
    monkeypatch.delenv("DOVETAIL_TEST_CLUSTER", raising=False)
    with running("t") as one, running("t") as two:
        assert (one.name, two.name) == ("t", "t-2")
    # What a killed session left goes first.
    assert calls == ["down t", "up t", "down t-2", "up t-2", "down t-2", "down t"]
    calls.clear()
    with pytest.raises(ClusterError, match="not ready"), running("t", kueue=True):
        pass
    assert calls == ["down t", "up t", "down t"], "nothing of it goes on"
    calls.clear()
    monkeypatch.setenv("DOVETAIL_TEST_CLUSTER", "keep")
    with running("t"):
        pass
    assert calls == ["up t"]


def test_archives_of_images_take_a_stated_room(tmp_path):
    for age, name in enumerate(["cluster-new.tar", "kueue-old.tar", "cluster-old.tar"]):
        (tmp_path / name).write_bytes(b"x" * 1000)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    binaries.trim(tmp_path, {tmp_path / "cluster-new.tar"}, 2500)
    assert {path.name for path in tmp_path.iterdir()} == {"cluster-new.tar", "kueue-old.tar"}


def test_programs_of_other_versions_go_when_the_cache_is_full(tmp_path):
    for age, name in enumerate(["helm-now", "helm-last", "helm-older", "links"]):
        (folder := tmp_path / name).mkdir()
        (folder / "helm").write_bytes(b"x" * 1000)
        os.utime(folder, (1e9 - age, 1e9 - age))
    binaries.trim(tmp_path, {tmp_path / "helm-now"}, 2500)
    assert {path.name for path in tmp_path.iterdir()} == {"helm-now", "helm-last", "links"}
    binaries.trim(tmp_path, {tmp_path / "helm-now"}, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"helm-now", "links"}, "what is in use stays"


def go_caches(root):
    """Three compiled packages of 1000 bytes, the first one used last, and a module of 1000 bytes."""
    for age, name in enumerate(["00/new-d", "00/older-d", "ff/oldest-d"]):
        (file := root / "compiled" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 1000)
        os.utime(file, (1e9 - age, 1e9 - age))
    (root / "compiled/trim.txt").write_text("1")
    for name in ("modules/m@v1/m.go", "fetched/m-v1"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x" * 1000)
    return lambda: {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {".lock"}


def test_gos_caches_are_within_a_stated_size_after_a_build(tmp_path):
    left = go_caches(tmp_path)
    binaries.trim_go(tmp_path, 2500, 1000)
    rest = {"compiled/00/new-d", "compiled/00/older-d", "compiled/trim.txt", "modules/m@v1/m.go", "fetched/m-v1"}
    assert left() == rest
    with locked(tmp_path / ".lock", fcntl.LOCK_SH):
        binaries.trim_go(tmp_path, 0, 0)
        assert left() == rest, "somebody builds with it"
    binaries.trim_go(tmp_path, 1000, 999)
    assert left() == {"compiled/00/new-d", "compiled/trim.txt"}, "modules that are fetched again are known as such"


def test_builds_leave_nothing_in_the_home_folder(tmp_path, monkeypatch):
    """But take modules from there, so that they are not downloaded twice."""
    go = tmp_path / "bin/go"
    go.parent.mkdir()
    go.write_text(
        '#!/bin/sh\nif [ "$1" = env ]; then echo "$HOME/go/pkg/mod"; echo https://proxy.example,direct; exit; fi\n'
        'mkdir -p "$GOCACHE" "$GOMODCACHE"; echo "$GOCACHE $GOMODCACHE $GOPROXY"\n'
    )
    go.chmod(0o755)
    (mine := tmp_path / "home/go/pkg/mod/cache/download").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOVETAIL_DEVCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binaries, "_proxy", binaries._proxy.__wrapped__)
    before = sorted((tmp_path / "home").rglob("*"))
    compiled, modules, proxy = binaries._go("kubernetes", "build").split()
    assert (compiled, modules) == (f"{tmp_path}/cache/go/compiled", f"{tmp_path}/cache/go/modules")
    assert proxy == f"{mine.as_uri()},https://proxy.example,direct"
    assert sorted((tmp_path / "home").rglob("*")) == before
