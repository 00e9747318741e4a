"""Bringing a cluster up and taking it down."""

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devcluster import addons, binaries, cgroups, control_plane, images, network, nodes, preflight, sysctls
from devcluster.settings import Cluster, find, locked, state_root, tidy
from devcluster.supervisor import Supervisor


@contextlib.contextmanager
def _alone(name: str) -> Iterator[Path]:
    """One bring-up or take-down of a cluster at a time. Who holds the lock may remove its file."""
    path = state_root() / f".{name}.lock"
    with locked(path):
        yield path


class _Progress:
    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {what}", file=sys.stderr, flush=True)


def _clear(cluster: Cluster) -> None:
    """What a cluster of this name left when its first process was killed: no process or mount can be among it."""
    network.disconnect(cluster)
    cgroups.remove(cluster)
    if cluster.state.exists():
        nodes.forget(cluster)


def up(
    name: str,
    *,
    api_only: bool = False,
    kueue: bool = False,
    kwok: bool = False,
    gangs: bool = False,
    policies: bool = False,
) -> Cluster:
    """Brings the cluster up, or adds to it what is missing; returns when all of it is ready. `gangs`: only of a cluster
    that does not run yet.

    Raises: ClusterError, naming what is missing or what was not ready in time.
    """
    preflight.check(api_only=api_only)
    binaries.build_all(binaries.CONTROL_PLANE if api_only else binaries.CLUSTER)
    with _alone(name):
        progress = _Progress()
        old = find(name)
        if old is not None and Supervisor(old).pid() is None:
            progress("removing what an earlier cluster left")
            _clear(old)
        cluster = network.allocate(name)
        supervisor = Supervisor(cluster)
        supervisor.launch()
        network.connect(cluster, supervisor)
        control_plane.start(cluster, supervisor, scheduler=kwok or not api_only, gangs=gangs)
        progress(f"API server ready at {cluster.server}")
        if not api_only:
            _complete(cluster, supervisor, progress)
        if kueue:
            addons.install_kueue(cluster, supervisor)
            progress("Kueue ready")
        if kwok:
            addons.start_kwok(cluster, supervisor)
            progress("kwok started")
        if policies:
            addons.start_policies(cluster, supervisor)
            progress("NetworkPolicies executed from now on")
    return cluster


def _complete(cluster: Cluster, supervisor: Supervisor, progress: _Progress) -> None:
    archive = images.cluster_archive()
    cgroups.create(cluster)
    sysctls.keep()
    network.bridges(cluster, supervisor)
    addons.start_volumes(cluster, supervisor)
    with ThreadPoolExecutor() as pool:
        installed = pool.submit(addons.install, cluster)
        nodes.start(cluster, supervisor, archive)
        progress("nodes started")
        installed.result()
    nodes.wait_ready(cluster)
    progress("nodes ready")
    addons.wait(cluster)
    progress("CoreDNS and JobSet ready")


def down(name: str) -> bool:
    """Ends and removes the cluster; False when there was none."""
    with _alone(name) as lock:
        cluster = find(name)
        if cluster is not None:
            Supervisor(cluster).terminate()
            _clear(cluster)
            sysctls.restore()
        lock.unlink()
    tidy()
    return cluster is not None
