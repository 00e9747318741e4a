"""Sandboxes on a real API server, with the definition of agent-sandbox's own release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import make_objects

from dovetail.kube.resources import SANDBOX
from helpers.cluster import KubeCluster, wait_for
from helpers.operator_process import established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import condition, create
from helpers.sandboxes import definition

SPACE = "sandboxes"
CRD = f"{SANDBOX.plural}.{SANDBOX.group}"


@pytest.fixture
def server(api_server: KubeCluster) -> Iterator[KubeCluster]:
    if api_server.name is None:
        pytest.skip("this test removes the definition of Sandboxes")
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    api_server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    install(api_server, [SPACE], "jobs.sandboxes.enabled=true")
    established(api_server, "rlhfjobs.dovetail.dev")
    api_server.delete("crd", CRD, "--ignore-not-found")
    yield api_server
    api_server.delete("rlhfjobs", "--all", "-n", SPACE)
    api_server.delete("crd", CRD, "--ignore-not-found")


def manifest(name: str) -> dict[str, Any]:
    job = make_objects.jobs()["sandboxed"][0].model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {**job, "apiVersion": "dovetail.dev/v1beta1", "metadata": {"name": name, "namespace": SPACE}}


def test_what_the_operator_makes_fits_the_definition(server: KubeCluster) -> None:
    server.apply(definition())
    established(server, CRD)
    job, settings = make_objects.jobs()["sandboxed"]
    things = list(yaml.safe_load_all(make_objects.rendered(job, settings)))
    made = [each for each in things if each["kind"] == SANDBOX.kind]
    assert len(made) == 2
    for each in made:
        each["metadata"] |= {"namespace": SPACE, "ownerReferences": []}
        server.kubectl("create", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(each))
        found = server.get("sandbox", each["metadata"]["name"], "-n", SPACE)
        assert found is not None
        assert found["spec"]["podTemplate"] == each["spec"]["podTemplate"], "nothing was dropped"


def test_a_cluster_without_agent_sandbox_and_an_operator_that_may_make_none(
    server: KubeCluster, tmp_path: Path
) -> None:
    def says(kind: str, name: str, text: str) -> bool:
        return text in condition(server, kind, name, SPACE).get("message", "")

    config = kubeconfig(server, tmp_path)
    with operator(config, tmp_path, "without", [SPACE]) as process:
        wait_for("leadership", process.leads)
        assert create(server, manifest("refused")).returncode == 0
        wait_for("a sentence", lambda: says("Planned", "refused", "spec.sessions.sandbox is Pod, which this operator"))
        assert process.stop() == 0
    with operator(config, tmp_path, "with", [SPACE], DOVETAIL_SANDBOXES="true") as process:
        wait_for("leadership", process.leads)
        assert create(server, manifest("lacks")).returncode == 0
        wait_for("a sentence", lambda: says("Scheduled", "lacks", "install kubernetes-sigs/agent-sandbox"))
        assert server.get("jobset", "lacks", "-n", SPACE) is None, "its pods would take GPUs"
        server.apply(definition())
        wait_for("the JobSet", lambda: server.get("jobset", "lacks", "-n", SPACE))
        assert process.stop() == 0
