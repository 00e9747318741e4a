"""The operator on an API server that gets and loses JobSet while the operator runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cluster import KubeCluster, wait_for
from helpers.operator_process import established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import condition, create, quickstart

SPACE = "kinds"
JOBSETS = "jobsets.jobset.x-k8s.io"


@pytest.fixture
def server(api_server: KubeCluster) -> Iterator[KubeCluster]:
    """Without JobSet."""
    if api_server.name is None:
        pytest.skip("this test removes the JobSet controller's CustomResourceDefinition")
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    install(api_server, [SPACE])
    established(api_server, "rlhfjobs.dovetail.dev")
    api_server.delete("crd", JOBSETS, "--ignore-not-found")
    yield api_server
    api_server.delete("rlhfjobs", "--all", "-n", SPACE)


def finish(server: KubeCluster, name: str) -> None:
    done = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    patch = json.dumps({"status": {"conditions": [done]}})
    server.kubectl("patch", "jobset", name, "-n", SPACE, "--subresource=status", "--type=merge", "-p", patch)


def test_jobset_may_be_installed_after_the_operator_and_come_back(server: KubeCluster, tmp_path: Path) -> None:
    with operator(kubeconfig(server, tmp_path), tmp_path, "one", [SPACE]) as process:
        wait_for("leadership", process.leads)
        for name in ("first", "second"):
            assert create(server, quickstart(name, SPACE)).returncode == 0
            wait_for(
                "a sentence",
                lambda name=name: (
                    "install the JobSet controller" in condition(server, "Scheduled", name, SPACE).get("message", "")
                ),
            )
            server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
            wait_for("the JobSet", lambda name=name: server.try_kubectl("get", "jobset", name, "-n", SPACE).stdout)
            finish(server, name)
            # A watch tells it; the operator lists JobSets every ten minutes only.
            wait_for("the end", lambda name=name: condition(server, "Completed", name, SPACE).get("status") == "True")
            if name == "first":
                before = len(process.events("kind.missing"))
                server.delete("crd", JOBSETS)
                wait_for("notice", lambda before=before: len(process.events("kind.missing")) > before)
        assert process.stop() == 0, "it was the same process all the time"


@pytest.mark.nightly
def test_a_gang_of_another_scheduler(server: KubeCluster, tmp_path: Path) -> None:
    """Volcano's PodGroup, whose definition comes after the operator. No Volcano runs here."""
    install(server, [SPACE], "jobs.gangScheduler=Volcano")
    server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    with operator(kubeconfig(server, tmp_path), tmp_path, "one", [SPACE], DOVETAIL_GANG="Volcano") as process:
        wait_for("leadership", process.leads)
        assert create(server, quickstart("gang", SPACE)).returncode == 0
        wait_for(
            "a sentence", lambda: "no PodGroup" in condition(server, "Scheduled", "gang", SPACE).get("message", "")
        )
        server.apply(preserving("PodGroup", "podgroups", "scheduling.volcano.sh", "v1beta1"))
        jobset = wait_for("the JobSet", lambda: found(server, "jobset", "gang"))
        (group,) = server.items("podgroups.scheduling.volcano.sh", "-n", SPACE)
        parts = jobset["spec"]["replicatedJobs"]
        assert group["spec"]["minMember"] == sum(part["template"]["spec"]["completions"] for part in parts)
        metadata = parts[0]["template"]["spec"]["template"]["metadata"]
        assert metadata["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
        assert process.stop() == 0
    server.kubectl("delete", "crd", "podgroups.scheduling.volcano.sh")


def found(server: KubeCluster, kind: str, name: str) -> Any:
    """The object; None while the API server does not serve the kind yet."""
    done = server.try_kubectl("get", kind, name, "-n", SPACE, "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else None
