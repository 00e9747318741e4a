"""A job whose environments live in Sandboxes, on real kubelets with agent-sandbox's own controller."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import binaries

from dovetail.kube import names
from dovetail.kube.resources import SANDBOX
from helpers.cluster import REPOSITORY, KubeCluster, external, wait_for
from helpers.cluster_jobs import ClusterJob
from helpers.jobs import events, history
from helpers.operator_process import established, install, kubeconfig, operator
from helpers.patience import PATIENCE
from helpers.rlhfjobs import condition
from helpers.sandboxes import definition

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(external() is not None, reason="it brings a controller of its own"),
]
# What a program in a sandbox tries before each episode. It says so in the coordinator's log if one succeeds.
TRIES = """

import glob, os, socket, sys


class Hostile(Boxes):
    def reset(self, box: str, things: dict[str, str]) -> None:
        for path in ("/proc/1/environ", "/var/dovetail", "/etc/dovetail/job.json", "/var/run/secrets/kubernetes.io"):
            try:
                open(path, "rb").read(1) if os.path.isfile(path) else os.listdir(path)
                print("OPENED", path, file=sys.stderr)
            except OSError:
                pass
        if any("TOKEN" in name for name in os.environ):
            print("OPENED the environment", file=sys.stderr)
        super().reset(box, things)
"""


@contextmanager
def controller(cluster: KubeCluster, folder: Path) -> Iterator[None]:
    """agent-sandbox's, as a process of this machine, until the end of the block."""
    words = [str(binaries.path_of("agent-sandbox-controller")), "--enable-webhook=false", "--leader-elect=false"]
    words += ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    log = folder / "controller.log"
    with log.open("wb") as output:
        given = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        process = subprocess.Popen(words, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(PATIENCE)


def manifest(namespace: str) -> dict[str, Any]:
    """examples/agent.yaml with what docs/how-to/agents.md changes in it for a cluster, and fewer steps."""
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples/agent.yaml").read_text())
    document["metadata"] = {"name": "tiny", "namespace": namespace}
    spec = document["spec"]
    spec["models"]["tokenizer"] = {"pvc": "my-data/agent/tokenizer"}
    spec["models"]["reward"].pop("importPath")
    spec["models"]["reward"]["code"] = {"pvc": "my-data/agent"}
    for kind in ("demonstrations", "prompts"):
        spec["data"][kind] = [{"pvc": f"my-data/agent/{kind}.jsonl"}]
    spec["sessions"] |= {"sandbox": "Pod", "sandboxPods": 2}
    spec["sessions"]["environment"]["function"] = "boxes:Hostile"
    spec["sft"]["steps"] = 100
    spec["ppo"] |= {"iterations": 6, "globalBatchSize": 64, "miniBatchSize": 32}
    return document


def test_environments_in_pods_of_their_own_one_of_which_is_killed(
    cluster: KubeCluster, namespace: str, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "examples/agent", tmp_path / "agent", ignore=shutil.ignore_patterns("*.jsonl"))
    runpy.run_path(str(tmp_path / "agent/make.py"))["write_task"](tmp_path / "agent")
    with (tmp_path / "agent/boxes.py").open("a") as code:
        code.write(TRIES)
    cluster.upload(tmp_path, namespace, image="dovetail-dev/busybox:dev")
    cluster.apply(definition())
    install(cluster, [], "jobs.sandboxes.enabled=true")
    established(cluster, "rlhfjobs.dovetail.dev", f"{SANDBOX.plural}.{SANDBOX.group}")
    images = {f"DOVETAIL_{name.upper()}_IMAGE": f"dovetail-dev/{name}:dev" for name in ("trainer", "rollout")}
    images |= {"DOVETAIL_COORDINATOR_IMAGE": "dovetail-dev/operator:dev", "DOVETAIL_SANDBOXES": "true"}

    def says(kind: str) -> dict[str, Any]:
        failed = condition(cluster, "Failed", "tiny", namespace)
        assert failed.get("status") != "True", failed
        return condition(cluster, kind, "tiny", namespace)

    def iteration() -> int:
        says("Running")
        found = cluster.get("rlhfjob", "tiny", "-n", namespace).get("status", {})
        return int(found.get("iteration") or 0) if found.get("stage") == "ppo" else 0

    config = kubeconfig(cluster, tmp_path)
    with controller(cluster, tmp_path), operator(config, tmp_path, "sandboxes", [], **images) as process:
        wait_for("leadership", process.leads)
        cluster.apply(manifest(namespace), namespace=namespace)
        wait_for("iterations", lambda: iteration() >= 2, PATIENCE)
        pods = cluster.items("pods", "-n", namespace, "-l", names.SANDBOX_LABEL)
        assert [pod["metadata"]["name"] for pod in pods] == ["tiny-sandbox-0", "tiny-sandbox-1"]
        cluster.kubectl("delete", "pod", "tiny-sandbox-0", "-n", namespace, "--grace-period=0", "--force")
        wait_for("the end", lambda: says("Completed").get("status") == "True", PATIENCE)
        wait_for("no sandbox", lambda: not cluster.items("sandboxes", "-n", namespace))
        assert process.stop() == 0
    run = ClusterJob(cluster, namespace).run_dir()
    rows = history(run, "ppo")
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert all(row["episode_calls"] > 0 and row["episodes_discarded"] == 0 for row in rows.values())
    assert not events(run, "episode.discarded")
    said = cluster.kubectl("logs", "-n", namespace, "-l", f"{names.ROLE_LABEL}=coordinator", "--tail=-1")
    assert "OPENED" not in said
