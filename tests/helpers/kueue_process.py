"""Kueue's controllers as a process of this machine, for an API server without nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devcluster import binaries

from helpers.cluster import KubeCluster, wait_for
from helpers.free_ports import free_port
from helpers.operator_process import established
from helpers.patience import PATIENCE

NAMESPACE = "kueue-system"
# In a mount namespace of its own: Kueue wants its certificate at this path.
START = """\
mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/etc,workdir={folder}/work /etc
exec {program} --config={folder}/config.json
"""
CERTIFICATES = "etc/kueue/metrics/certs"


def install_kinds(cluster: KubeCluster) -> None:
    """The definitions of Kueue and of JobSet, without their webhooks."""
    kueue, jobset = (binaries.module_folder(name, f"sigs.k8s.io/{name}") for name in ("kueue", "jobset"))
    for folder in (kueue, jobset):
        words = ("apply", "--server-side", "--force-conflicts", "-f", str(folder / "config/components/crd/bases"))
        cluster.kubectl(*words)
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.apply(space)
    kinds = ("workloads.kueue.x-k8s.io", "multikueueclusters.kueue.x-k8s.io", "jobsets.jobset.x-k8s.io")
    established(cluster, *kinds)


@contextmanager
def kueue(cluster: KubeCluster, folder: Path, **settings: Any) -> Iterator[None]:
    """Running until the end of the block. `settings`: more of its configuration."""
    for name in (CERTIFICATES, "work"):
        (folder / name).mkdir(parents=True)
    pair = ("-keyout", str(folder / CERTIFICATES / "tls.key"), "-out", str(folder / CERTIFICATES / "tls.crt"))
    words = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", *pair)
    subprocess.run(words, check=True, capture_output=True)
    webhooks, health = free_port(), free_port()
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(folder / CERTIFICATES)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 200, "burst": 400},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "featureGates": {"VisibilityOnDemand": False},
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    script = START.format(folder=folder, program=binaries.path_of("kueue"))
    log = folder / "kueue.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "--", "sh", "-ec", script],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def listens() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", health)) == 0

    try:
        wait_for("Kueue", listens)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
