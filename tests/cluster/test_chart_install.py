"""The chart on a real API server, where no pod starts: what it accepts, an upgrade, and what an uninstall leaves."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import make_objects

from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset, surplus_jobs
from dovetail.planner.make_plan import make_plan
from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.earlier_chart import earlier_chart
from helpers.operator_process import established, kubeconfig, operator, preserving
from helpers.rlhfjobs import NAME, condition, install_crd, quickstart

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


@pytest.mark.parametrize("user", [65532, 0])
def test_the_api_server_lets_pods_of_jobs_into_a_restricted_namespace(server, user):
    """Also if the platform chooses the user, as OpenShift does."""
    job = parse(quickstart("strict", SPACE))
    job = job.model_copy(update={"spec": resolve(job.spec)})
    context = RenderContext(job, make_objects.UID, make_plan(job.spec), OperatorSettings(pod_user=user))
    templates = {
        each["name"]: each["template"]["spec"]["template"] for each in jobset(context)["spec"]["replicatedJobs"]
    }
    templates |= {each["metadata"]["name"]: each["spec"]["template"] for each in surplus_jobs(context)}
    assert len(templates) > 3
    pods = []
    for name, template in templates.items():
        spec = template["spec"] | {"serviceAccountName": "default", "priorityClassName": ""}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": SPACE}, "spec": spec})
    wait_for("the account", lambda: server.get("serviceaccount", "default", "-n", SPACE))

    def created(*things):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
        return server.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=text)

    done = created(*pods)
    assert done.returncode == 0, done.stderr
    pods[0]["spec"]["securityContext"] = {}
    assert "violates PodSecurity" in created(pods[0]).stderr, "so the above says something"


def test_install_upgrade_uninstall(server):
    # The definition is there already, applied by kubectl.
    release = ("charted", str(CHART), "--take-ownership", "--force-conflicts")
    helm(server, "upgrade", "--install", *release)
    try:
        deployments = server.items("deployments", "-n", SPACE, *MINE)
        assert {d["metadata"]["name"] for d in deployments} == {"charted-dovetail-operator", "charted-dovetail-api"}
        helm(server, "upgrade", *release, "--set", "operator.replicas=3", "--set", "api.enabled=false")
        (operator,) = server.items("deployments", "-n", SPACE, *MINE)
        assert operator["spec"]["replicas"] == 3
        assert server.get("clusterrole", "charted-dovetail-api") is None, "with the API go its rights"
    finally:
        helm(server, "uninstall", "charted")
    kinds = "deployments,services,serviceaccounts,roles,rolebindings,configmaps,networkpolicies,poddisruptionbudgets"
    wait_for("nothing left", lambda: server.kubectl("get", kinds, "-n", SPACE, *MINE, "-o", "name") == "")
    assert server.kubectl("get", "clusterroles,clusterrolebindings,priorityclasses", *MINE, "-o", "name") == ""
    assert server.get("crd", NAME) is not None, "and with it all jobs"


def test_the_installed_definition_is_the_generated_one(server):
    """So that an upgrade of the chart is an upgrade of the definitions."""
    text = helm(server, "template", "dovetail", str(CHART), "--show-only", "templates/crd.yaml")
    job_class, job = (each for each in yaml.safe_load_all(text) if each is not None)
    for crd, plural in ((job, "rlhfjobs"), (job_class, "rlhfjobclasses")):
        assert crd["spec"]["names"]["plural"] == plural
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(job_class))
    install_crd(server, json.dumps(job))
    assert "globalBatchSize" in server.kubectl("explain", "rlhfjob.spec.ppo")


EARLIER = Path(make_objects.__file__).parent / "earlier"


def earlier_objects(server: KubeCluster, space: str) -> str:
    """A job of the earlier version that runs, as far as the API server knows. Returns the uid of its JobSet."""
    document = yaml.safe_load((EARLIER / "manifest.yaml").read_text())
    server.apply(document | {"metadata": {"name": "demo", "namespace": space}}, namespace=space)
    uid = server.get("rlhfjob", "demo", "-n", space)["metadata"]["uid"]
    text = (EARLIER / "objects.yaml").read_text().replace(make_objects.UID, uid)
    for thing in yaml.safe_load_all(text.replace("namespace: default", f"namespace: {space}")):
        if thing["kind"] != "Job":
            server.kubectl("create", "-f", "-", stdin=json.dumps(thing))
    return str(server.get("jobset", "demo", "-n", space)["metadata"]["uid"])


def test_two_releases_and_an_upgrade_with_a_job_that_runs(server, tmp_path):
    if server.get("crd", "jobsets.jobset.x-k8s.io") is None:
        server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    for space in ("upgrade-jobs", "other-jobs", "other-system"):
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    established(server, "jobsets.jobset.x-k8s.io")
    adopt = ("--take-ownership", "--force-conflicts")
    mine = ("--set", "namespaces={upgrade-jobs}", *adopt)
    helm(server, "install", "first", str(earlier_chart(tmp_path)), *mine)
    others = ("--set", "namespaces={other-jobs}", "--set", "crds.enabled=false")
    server.helm("install", "second", str(CHART), *others, "--namespace", "other-system")
    try:
        leases = [server.get("lease", "dovetail-leader", "-n", space) for space in (SPACE, "other-system")]
        assert all(leases), "each release has its own"
        with pytest.raises(AssertionError, match="Lease"):  # two operators in one namespace would share it
            server.helm("install", "third", str(CHART), *others, "--namespace", "other-system")
        pods = earlier_objects(server, "upgrade-jobs")
        retry = ("patch", "rlhfjob", "demo", "-n", "upgrade-jobs", "--type=merge", "-p", '{"spec":{"retry":1}}')
        server.kubectl(*retry)
        assert "retry" not in server.get("rlhfjob", "demo", "-n", "upgrade-jobs")["spec"], "it does not know the field"
        helm(server, "upgrade", "first", str(CHART), *mine)
        wait_for("the new field", lambda: server.try_kubectl(*retry).returncode == 0 and "retry" in asked(server))
        assert asked(server)["retry"] == 1
        config = kubeconfig(server, tmp_path, "first-dovetail-operator", SPACE)
        with operator(config, tmp_path, "new", ["upgrade-jobs"], DOVETAIL_NAMESPACE=SPACE) as process:
            wait_for("leadership", process.leads)
            wait_for("its status", lambda: condition(server, "Planned", "demo", "upgrade-jobs"))
            policy = ("networkpolicy", "demo", "-n", "upgrade-jobs")
            wait_for("the new version's small objects", lambda: "policyTypes" in json.dumps(server.get(*policy)))
            assert server.get("jobset", "demo", "-n", "upgrade-jobs")["metadata"]["uid"] == pods
            helm(server, "rollback", "first", "1", "--force-conflicts")
            server.kubectl("annotate", "jobset", "demo", "-n", "upgrade-jobs", "looked=again")
            wait_for("the old definition", lambda: "retry" not in asked(server))
            assert process.stop() == 0
        assert server.get("jobset", "demo", "-n", "upgrade-jobs")["metadata"]["uid"] == pods
        # What starts after the rollback has the rights and the definition of before. Then the upgrade is tried again.
        with operator(config, tmp_path, "back", ["upgrade-jobs"], DOVETAIL_NAMESPACE=SPACE) as process:
            wait_for("leadership", process.leads)
            server.kubectl("delete", *policy)
            wait_for("a small object made anew", lambda: server.get(*policy))
            helm(server, "upgrade", "first", str(CHART), *mine)
            wait_for("the new field", lambda: server.try_kubectl(*retry).returncode == 0 and "retry" in asked(server))
            assert not process.events("reconcile.failed")
            assert process.stop() == 0
        assert condition(server, "Planned", "demo", "upgrade-jobs")["status"] == "True"
        assert server.get("jobset", "demo", "-n", "upgrade-jobs")["metadata"]["uid"] == pods
    finally:
        server.delete("rlhfjobs", "--all", "-n", "upgrade-jobs")
        helm(server, "uninstall", "first")
        server.helm("uninstall", "second", "--namespace", "other-system")
        install_crd(server)
    for space in (SPACE, "other-system"):
        assert server.get("lease", "dovetail-leader", "-n", space) is None
    left = "clusterroles,clusterrolebindings,priorityclasses"
    assert server.kubectl("get", left, "-l", "app.kubernetes.io/instance in (first,second)", "-o", "name") == ""


def asked(server: KubeCluster) -> dict[str, Any]:
    spec: dict[str, Any] = server.get("rlhfjob", "demo", "-n", "upgrade-jobs")["spec"]
    return spec
