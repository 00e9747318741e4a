"""The chart on a real API server, where no pod starts: what it accepts, an upgrade, and what an uninstall leaves."""

import json
import subprocess

import pytest
import yaml

from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.rlhfjobs import NAME, install_crd

SPACE = "chart-system"
MINE = ("-l", "app.kubernetes.io/instance=charted,app.kubernetes.io/managed-by=Helm")
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    install_crd(api_server)
    metadata = {"name": SPACE, "labels": RESTRICTED}
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return api_server


def helm(server: KubeCluster, *words: str) -> str:
    return server.helm(*words, "--namespace", SPACE)


def dry_run(server: KubeCluster, text: str) -> subprocess.CompletedProcess[str]:
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
    return server.try_kubectl(*words, stdin=text)


def test_every_object_is_accepted_and_no_pod_breaks_the_restricted_standard(server):
    values = ("--set", "jobs.podTemplate.spec.nodeSelector.disk=fast", "--set", "images.pullSecrets={pull}")
    text = helm(server, "template", "dovetail", str(CHART), *values)
    done = dry_run(server, text)
    assert done.returncode == 0, done.stderr
    assert "PodSecurity" not in done.stderr
    careless = dry_run(server, text.replace("runAsNonRoot: true", "runAsNonRoot: false"))
    assert "would violate PodSecurity" in careless.stderr, "so the above says something"


def test_install_upgrade_uninstall(server):
    # The definition is there already, applied by kubectl.
    release = ("charted", str(CHART), "--take-ownership", "--force-conflicts")
    helm(server, "upgrade", "--install", *release)
    try:
        deployments = server.get("deployments", "-n", SPACE, *MINE)["items"]
        assert {d["metadata"]["name"] for d in deployments} == {"charted-dovetail-operator", "charted-dovetail-api"}
        helm(server, "upgrade", *release, "--set", "operator.replicas=3", "--set", "api.enabled=false")
        (operator,) = server.get("deployments", "-n", SPACE, *MINE)["items"]
        assert operator["spec"]["replicas"] == 3
        assert server.get("clusterrole", "charted-dovetail-api") is None, "with the API go its rights"
    finally:
        helm(server, "uninstall", "charted")
    kinds = "deployments,services,serviceaccounts,roles,rolebindings,configmaps,networkpolicies,poddisruptionbudgets"
    wait_for("nothing left", lambda: server.kubectl("get", kinds, "-n", SPACE, *MINE, "-o", "name") == "")
    assert server.kubectl("get", "clusterroles,clusterrolebindings,priorityclasses", *MINE, "-o", "name") == ""
    assert server.get("crd", NAME) is not None, "and with it all jobs"


def test_the_installed_definition_is_the_generated_one(server):
    """So that an upgrade of the chart is an upgrade of the definition."""
    text = helm(server, "template", "dovetail", str(CHART), "--show-only", "templates/crd.yaml")
    crd = yaml.safe_load(text)
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    install_crd(server, json.dumps(crd))
    assert "globalBatchSize" in server.kubectl("explain", "rlhfjob.spec.ppo")
