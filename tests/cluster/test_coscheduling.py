"""Gangs of scheduler-plugins: the real scheduler with its plug-in Coscheduling, on nodes that kwok plays."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from devcluster import binaries

from helpers.cluster import KubeCluster, external, wait_for
from helpers.gang_jobs import node, placed, pods, prepare, submit
from helpers.operator_process import established, install, kubeconfig, operator
from helpers.patience import PATIENCE
from helpers.rlhfjobs import condition

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(external() is not None, reason="it brings a scheduler of its own"),
]
SPACE = "coscheduled"
SCHEDULER = "scheduler-plugins-scheduler"


@contextmanager
def scheduler(cluster: KubeCluster, folder: Path) -> Iterator[None]:
    """As a process of this machine, until the end of the block."""
    plugins = {
        "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
        "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
    }
    waits = {"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig)},
        "profiles": [{"schedulerName": SCHEDULER, "plugins": plugins, "pluginConfig": [waits]}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = [str(binaries.path_of("coscheduling")), f"--config={folder}/config.json", "--secure-port=0"]
    # The plug-in does not look at a rejected gang again when a node comes, but after this time: else five minutes.
    words.append("--pod-max-in-unschedulable-pods-duration=10s")
    log = folder / "scheduler.log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=dict(os.environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_coscheduling_places_a_gang_as_a_whole_or_not_at_all(gang_server: KubeCluster, tmp_path: Path) -> None:
    """There is a GPU for one of two trainers: not even what needs no GPU is placed."""
    server = gang_server
    source = binaries.module_folder("coscheduling", "sigs.k8s.io/scheduler-plugins")
    definition = str(source / "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml")
    server.kubectl("apply", "--server-side", "-f", definition)
    prepare(server, SPACE)
    install(server, [SPACE], "jobs.gangScheduler=Coscheduling")
    established(server, "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io", "podgroups.scheduling.x-k8s.io")
    config = kubeconfig(server, tmp_path)
    server.apply(node("one", 1))
    with (
        operator(config, tmp_path, "leader", [SPACE], DOVETAIL_GANG="Coscheduling") as process,
        scheduler(server, tmp_path),
    ):
        wait_for("leadership", process.leads)
        submit(server, SPACE, "whole")
        (group,) = wait_for("the gang", lambda: server.items("podgroups.scheduling.x-k8s.io", "-n", SPACE))
        assert group["spec"]["minMember"] == 4
        wait_for("four pods", lambda: len(pods(server, SPACE, "whole")) == 4)
        wait_for(
            "a reason", lambda: condition(server, "Scheduled", "whole", SPACE).get("reason") == "Unschedulable", 180
        )
        assert all(pod["spec"]["schedulerName"] == SCHEDULER for pod in pods(server, SPACE, "whole"))
        assert placed(server, SPACE, "whole") == 0
        server.apply(node("two", 1))
        wait_for("all at once", lambda: placed(server, SPACE, "whole") == 4)
        wait_for("the condition", lambda: condition(server, "Scheduled", "whole", SPACE).get("status") == "True")
        server.kubectl("delete", "rlhfjob", "whole", "-n", SPACE, "--wait=true")
