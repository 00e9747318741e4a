"""Both versions of the API on a real API server: a job that an earlier release stored lives through the upgrade of the
definitions and the way back, with an operator at work."""

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.kube.resources import RLHFJOB
from helpers.cluster import REPOSITORY, KubeCluster, wait_for
from helpers.operator_process import established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import install_crd, quickstart

SPACE = "versions-a"
STORED, NEWER = "dovetail.dev/v1alpha1", "dovetail.dev/v1beta1"
FOLDER = REPOSITORY / "helm/dovetail/files/crds"
JOBS, CLASSES = "rlhfjobs.dovetail.dev", "rlhfjobclasses.dovetail.dev"


def definition(name: str, *versions: str) -> str:
    """The definition with these versions only, as a release without the others has it."""
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    kept = [each for each in document["spec"]["versions"] if each["name"] in versions]
    document["spec"]["versions"] = kept
    return json.dumps(document)


def serve(server: KubeCluster, *versions: str) -> None:
    """As `helm upgrade` and `helm rollback` do; returns when the API server serves these versions and no others."""
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=definition(CLASSES, *versions))
    install_crd(server, definition(JOBS, *versions))

    def served() -> bool:
        groups = json.loads(server.kubectl("get", "--raw", "/apis/dovetail.dev"))
        return {each["version"] for each in groups["versions"]} == set(versions)

    wait_for(f"the versions {versions}", served)


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> Iterator[KubeCluster]:
    if api_server.get("crd", "jobsets.jobset.x-k8s.io") is None:
        api_server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    install(api_server, [])
    established(api_server, JOBS, CLASSES, "jobsets.jobset.x-k8s.io")
    yield api_server
    serve(api_server, "v1alpha1", "v1beta1")
    api_server.delete("rlhfjobs.v1alpha1.dovetail.dev", "--all", "-n", SPACE)
    api_server.try_kubectl("delete", "rlhfjobclass", "versioned", "--ignore-not-found")


def job(name: str, api_version: str, **spec: Any) -> dict[str, Any]:
    return quickstart(name, SPACE, **spec) | {"apiVersion": api_version}


def read(server: KubeCluster, version: str, name: str) -> dict[str, Any]:
    """By its version, because kubectl remembers for hours which one a server likes best."""
    found: dict[str, Any] = server.get(f"rlhfjobs.{version}.dovetail.dev", name, "-n", SPACE)
    return found


def apply(server: KubeCluster, document: dict[str, Any], manager: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = ("apply", "--server-side", "--field-manager", manager, "-n", SPACE, "-f", "-", *more)
    return server.try_kubectl(*words, stdin=json.dumps(document))


def wanted(document: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What nobody but its author may change."""
    return document["metadata"]["uid"], document["spec"]


def test_a_stored_job_lives_through_the_upgrade_and_the_way_back(server: KubeCluster, tmp_path: Path) -> None:
    serve(server, "v1alpha1")
    job_class = {"apiVersion": STORED, "kind": "RLHFJobClass", "metadata": {"name": "versioned"}}
    server.apply(job_class | {"spec": {"allowed": {"images": ["registry.example.com/*"]}}})
    started = job("started", STORED, **{"class": "versioned"})
    waiting = job("waiting", STORED, suspend=True, failurePolicy={"maxRestarts": 7})
    for document in (started, waiting):
        done = apply(server, document, "gitops")
        assert done.returncode == 0, done.stderr

    with operator(kubeconfig(server, tmp_path), tmp_path, "one", []) as process:

        def jobset(name: str) -> Any:
            return server.get("jobset", name, "-n", SPACE)

        def resumed(name: str, version: str) -> dict[str, Any]:
            """The job's JobSet, after the job was suspended no more, by a client of that version."""
            kind = f"rlhfjobs.{version}.dovetail.dev"
            server.kubectl("patch", kind, name, "-n", SPACE, "--type=merge", "-p", '{"spec": {"suspend": false}}')
            found: dict[str, Any] = wait_for(f"the JobSet of {name}", lambda: jobset(name))
            return found

        wait_for("leadership", process.leads)
        wait_for("the JobSet", lambda: jobset("started"))
        wait_for("the status", lambda: read(server, "v1alpha1", "started").get("status", {}).get("conditions"))
        before, made = read(server, "v1alpha1", "started"), jobset("started")

        serve(server, "v1alpha1", "v1beta1")
        assert wanted(read(server, "v1beta1", "started")) == wanted(before)

        def same_status() -> bool:
            """The operator may write between the two."""
            newer, older = (read(server, version, "started") for version in ("v1beta1", "v1alpha1"))
            return bool(newer["status"]) and newer["status"] == older["status"]

        wait_for("one status in both versions", same_status)
        assert server.get("rlhfjobclasses.v1beta1.dovetail.dev", "versioned")["spec"]["allowed"]["images"]
        # The same manager goes on with the newer version: what it gives up goes back to its default.
        changed = copy.deepcopy(waiting) | {"apiVersion": NEWER}
        del changed["spec"]["failurePolicy"]
        done = apply(server, changed, "gitops")
        assert done.returncode == 0, done.stderr
        assert read(server, "v1alpha1", "waiting")["spec"]["failurePolicy"]["maxRestarts"] != 7
        # Manifests and tools of both versions make jobs that the operator runs.
        assert apply(server, job("newer", NEWER, suspend=True), "gitops").returncode == 0
        assert apply(server, job("older", STORED, suspend=True), "old-tool").returncode == 0
        for name, version in (("newer", "v1beta1"), ("older", "v1alpha1"), ("waiting", "v1beta1")):
            owner = resumed(name, version)["metadata"]["ownerReferences"][0]
            assert (owner["apiVersion"], owner["uid"]) == (
                RLHFJOB.api_version,
                read(server, version, name)["metadata"]["uid"],
            )
        assert jobset("started")["metadata"]["uid"] == made["metadata"]["uid"]
        # Fields and rules are those of both.
        wrong = job("wrong", NEWER, ppo={"clip": -1})
        assert "spec.ppo.clip" in apply(server, wrong, "gitops").stderr
        assert apply(server, job("held", NEWER, suspend=True), "gitops").returncode == 0
        kept = {name: read(server, "v1alpha1", name) for name in ("started", "waiting", "newer", "older", "held")}
        assert server.get("crd", JOBS)["status"]["storedVersions"] == ["v1alpha1"]

        serve(server, "v1alpha1")
        for name, document in kept.items():
            assert wanted(read(server, "v1alpha1", name)) == wanted(document), name
        assert jobset("started")["metadata"]["uid"] == made["metadata"]["uid"]
        # The operator and the manager of before go on. The API server cannot read what it noted by the version that is
        # gone, so server-side apply asks to forget it.
        kind, forgotten = "rlhfjobs.v1alpha1.dovetail.dev", '{"metadata": {"managedFields": [{}]}}'
        server.kubectl("patch", kind, "waiting", "-n", SPACE, "--type=merge", "-p", forgotten)
        back = waiting | {"spec": waiting["spec"] | {"suspend": False}}
        done = apply(server, back, "gitops", "--force-conflicts")
        assert done.returncode == 0, done.stderr
        assert read(server, "v1alpha1", "waiting")["spec"]["failurePolicy"]["maxRestarts"] == 7
        resumed("held", "v1alpha1")
        server.delete("rlhfjobs.v1alpha1.dovetail.dev", "newer", "-n", SPACE)
        wait_for("the end of its JobSet", lambda: jobset("newer") is None)
