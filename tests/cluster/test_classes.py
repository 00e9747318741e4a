"""RLHFJobClasses and the namespaces of teams on a real API server, as an administrator and a tenant meet them."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.kube import names
from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.operator_process import established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import condition, quickstart

SPACE, TEAM = "classes-a", "classes-research"
MEMBER = ("--as", "mallory", "--as-group", "research")


def job_class(name: str = "cpus", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "dovetail.dev/v1alpha1",
        "kind": "RLHFJobClass",
        "metadata": {"name": name},
        "spec": spec,
    }


def as_member(
    server: KubeCluster, document: dict[str, Any], *words: str, verb: str = "create"
) -> subprocess.CompletedProcess[str]:
    return server.try_kubectl(verb, *MEMBER, "-f", "-", *words, stdin=json.dumps(document))


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    if api_server.get("crd", "jobsets.jobset.x-k8s.io") is None:
        api_server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    install(api_server, [])
    established(api_server, "rlhfjobs.dovetail.dev", "rlhfjobclasses.dovetail.dev", "jobsets.jobset.x-k8s.io")
    return api_server


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"podTemplate": {"spec": {"restartPolicy": "Always"}}}, "spec.podTemplate.spec.restartPolicy must be Never"),
        (
            {"trainer": {"podTemplate": {"spec": {"volumes": [{"name": "plan", "emptyDir": {}}]}}}},
            "spec.trainer.podTemplate has a volume plan",
        ),
        ({"allowed": {"fields": ["containers.env"]}}, "spec.allowed.fields[0] in body should match"),
        ({"queues": "a"}, 'unknown field "spec.queues"'),
    ],
)
def test_a_wrong_class_is_refused_when_it_is_applied(server: KubeCluster, spec: Any, sentence: str) -> None:
    text = json.dumps(job_class(**spec))
    done = server.try_kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=text)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_what_becomes_of_a_job_and_its_class(server: KubeCluster, tmp_path: Path) -> None:
    """The operator has the chart's rights."""

    def planned() -> dict[str, Any]:
        return condition(server, "Planned", "demo", SPACE)

    def told(what: str, words: str) -> None:
        wait_for(what, lambda: words in planned().get("message", ""))

    def give(disk: str) -> None:
        pods, allowed = {"spec": {"nodeSelector": {"disk": disk}}}, {"images": ["registry.example.com/*"]}
        text = json.dumps(job_class(podTemplate=pods, queue="research", allowed=allowed))
        server.kubectl("apply", "--server-side", "-f", "-", stdin=text)

    def jobset() -> dict[str, Any]:
        return server.get("jobset", "demo", "-n", SPACE) or {}

    with operator(kubeconfig(server, tmp_path), tmp_path, "one", []) as process:
        try:
            wait_for("leadership", process.leads)
            server.apply(quickstart("demo", SPACE, **{"class": "cpus"}), namespace=SPACE)
            told("the missing class", "the cluster has no such class")
            assert (planned()["status"], planned()["reason"]) == ("False", "ClassMissing")
            assert jobset() == {}
            give("fast")
            wait_for("the JobSet", jobset)
            made = jobset()
            templates = [job["template"]["spec"]["template"] for job in made["spec"]["replicatedJobs"]]
            assert all(template["spec"]["nodeSelector"]["disk"] == "fast" for template in templates)
            assert made["metadata"]["labels"][names.QUEUE_LABEL] == "research"
            assert "cpus" in server.kubectl("get", "rlhfjob", "demo", "-n", SPACE, "-o", "wide")
            assert "research" in server.kubectl("get", "rlhfjobclasses")
            give("slow")
            told("the change", "class cpus has changed since the pods were made")
            assert jobset()["metadata"]["uid"] == made["metadata"]["uid"]
            server.delete("rlhfjobclass", "cpus")
            told("the loss", "pods that run stay, but no more are made")
            assert jobset()["metadata"]["uid"] == made["metadata"]["uid"]
            assert planned()["status"] == "True"
        finally:
            server.try_kubectl("delete", "rlhfjobclass", "cpus", "--ignore-not-found")
            server.delete("rlhfjob", "demo", "-n", SPACE)


def test_an_operator_that_may_not_list_classes_leaves_queued_jobs_alone(server: KubeCluster, tmp_path: Path) -> None:
    """As after an upgrade of the operator whose ClusterRole was not upgraded. Kueue suspends the JobSet."""
    role = server.get("clusterrole", "dovetail-operator")
    del role["metadata"]["resourceVersion"]
    rules = [rule for rule in role["rules"] if rule["resources"] != ["rlhfjobclasses"]]
    assert len(rules) == len(role["rules"]) - 1
    config = kubeconfig(server, tmp_path)

    def told(words: str) -> None:
        wait_for(words, lambda: words in condition(server, "Planned", "queued", SPACE).get("message", ""))

    def replace(rules: list[Any]) -> None:
        server.kubectl("replace", "-f", "-", stdin=json.dumps(role | {"rules": rules}))
        words = ("auth", "can-i", "list", "rlhfjobclasses.dovetail.dev", "-A", "--kubeconfig", str(config))
        wanted = "yes" if rules == role["rules"] else "no"
        wait_for("the rights", lambda: server.try_kubectl(*words).stdout.strip() == wanted)

    text = json.dumps(job_class(queue="research", allowed={"images": ["registry.example.com/*"]}))
    server.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    try:
        with operator(config, tmp_path, "before", []) as process:
            wait_for("leadership", process.leads)
            server.apply(quickstart("queued", SPACE, **{"class": "cpus"}), namespace=SPACE)
            wait_for("the JobSet", lambda: server.get("jobset", "queued", "-n", SPACE))
            process.stop()
        server.kubectl("patch", "jobset", "queued", "-n", SPACE, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        made = server.get("jobset", "queued", "-n", SPACE)["metadata"]["uid"]
        replace(rules)
        with operator(config, tmp_path, "after", []) as process:
            wait_for("leadership", process.leads)
            told("its pods will be as the class said before: spec.class is cpus: the operator cannot see classes")
            assert server.get("jobset", "queued", "-n", SPACE)["metadata"]["uid"] == made
            replace(role["rules"])
            wait_for("the class", lambda: process.events("class.seen"))
            wait_for("the end", lambda: "cannot see" not in condition(server, "Planned", "queued", SPACE)["message"])
            assert server.get("jobset", "queued", "-n", SPACE)["metadata"]["uid"] == made
    finally:
        replace(role["rules"])
        server.try_kubectl("delete", "rlhfjobclass", "cpus", "--ignore-not-found")
        server.delete("rlhfjob", "queued", "-n", SPACE)


@pytest.fixture(scope="module")
def team(server: KubeCluster) -> Iterator[None]:
    """What the chart makes of one team, and the policy by which its members need a class."""
    members = [{"kind": "Group", "name": "research", "apiGroup": "rbac.authorization.k8s.io"}]
    allowed = {"secrets": ["wandb"], "images": ["registry.example.com/*"]}
    quota = {"count/rlhfjobs.dovetail.dev": 1}
    teams = {TEAM: {"members": members, "quota": quota, "class": {"allowed": allowed}}}
    policy = {"policy": "Always", "requireClass": True}

    def rendered(part: str, **values: Any) -> list[dict[str, Any]]:
        words = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
        words += ["--api-versions", "dovetail.dev/v1alpha1/RLHFJobClass", "--show-only", f"templates/{part}.yaml"]
        text = server.helm("template", "teams", str(CHART), "-n", "teams-system", *words)
        return [thing for thing in yaml.safe_load_all(text) if thing]

    things = [*rendered("teams", teams=teams), *rendered("tenant-policy", tenants=policy, namespaces=[TEAM])]
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
    server.kubectl("apply", "--server-side", "-f", "-", stdin=items)
    refused = "spec.class is missing"
    wait_for("the policy", lambda: refused in as_member(server, quickstart("a", TEAM), "--dry-run=server").stderr)
    yield
    server.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=items)


def test_a_member_of_a_team_can_run_jobs_and_nothing_else(server: KubeCluster, team: None) -> None:
    def may(verb: str, what: str, *words: str) -> bool:
        return server.try_kubectl("auth", "can-i", verb, what, *MEMBER, *words).stdout.strip() == "yes"

    here = ("-n", TEAM)
    for verb, what, *words in (
        ("create", "rlhfjobs.dovetail.dev"),
        ("create", "configmaps"),
        ("get", "pods", "--subresource=log"),
        ("list", "resourcequotas"),
        ("get", f"rlhfjobclasses.dovetail.dev/{TEAM}"),
    ):
        assert may(verb, what, *words, *here), (verb, what)
    for verb, what, *words in (
        ("get", "secrets"),
        ("create", "pods"),
        ("create", "pods", "--subresource=exec"),
        ("create", "serviceaccounts", "--subresource=token"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("patch", "rlhfjobs.dovetail.dev", "--subresource=status"),
        ("patch", f"rlhfjobclasses.dovetail.dev/{TEAM}"),
        ("get", "rlhfjobclasses.dovetail.dev/other"),
    ):
        assert not may(verb, what, *words, *here), (verb, what)
    assert not may("create", "rlhfjobs.dovetail.dev", "-n", SPACE)


def test_pod_security_and_the_class_are_those_of_the_team(server: KubeCluster, team: None) -> None:
    labels = (server.get("namespace", TEAM) or {})["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    found = server.get("rlhfjobclass", TEAM) or {}
    assert found["spec"]["namespaces"] == [TEAM]
    assert found["spec"]["allowed"]["secrets"] == ["wandb"]


def test_a_tenant_names_what_the_class_lists_without_a_right_to_read_it(server: KubeCluster, team: None) -> None:
    """At admission any name of a class's job passes. The operator asks the class before it makes a pod. What belongs to
    the node is refused to everybody."""
    named = quickstart("a", TEAM, **{"class": TEAM, "trackers": [{"kind": "wandb", "secret": "wandb"}]})
    done = as_member(server, named, "--dry-run=server")
    assert done.returncode == 0, done.stderr
    named["spec"]["groups"][0]["podTemplate"] = {"spec": {"hostNetwork": True}}
    assert "podTemplate.spec may not share the node's network" in as_member(server, named, "--dry-run=server").stderr


def test_the_quota_counts_jobs(server: KubeCluster, team: None) -> None:
    first, second = (quickstart(name, TEAM, **{"class": TEAM}) for name in ("first", "second"))
    try:
        done = as_member(server, first)
        assert done.returncode == 0, done.stderr
        wait_for("the quota", lambda: "exceeded quota" in as_member(server, second, "--dry-run=server").stderr)
    finally:
        server.delete("rlhfjob", "first", "-n", TEAM)


def test_the_operator_of_a_team_refuses_what_the_class_does_not_list(server: KubeCluster, tmp_path: Path) -> None:
    server.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(job_class(allowed={"secrets": ["wandb"]})))
    document = quickstart("hostile", SPACE, **{"class": "cpus", "hub": {"tokenSecret": {"name": "admin"}}})
    document["spec"]["groups"][0]["podTemplate"] = {"spec": {"serviceAccountName": "admin", "hostPID": True}}
    with operator(kubeconfig(server, tmp_path), tmp_path, "two", []) as process:
        try:
            wait_for("leadership", process.leads)
            server.apply(document, namespace=SPACE)
            reason = "ClassRefuses"
            wait_for("the refusal", lambda: condition(server, "Planned", "hostile", SPACE).get("reason") == reason)
            said = condition(server, "Planned", "hostile", SPACE)["message"]
            for field in ("spec.serviceAccountName is set", "spec.hostPID is set", "spec.hub.tokenSecret names admin"):
                assert field in said
            assert server.get("jobset", "hostile", "-n", SPACE) is None
        finally:
            server.try_kubectl("delete", "rlhfjobclass", "cpus", "--ignore-not-found")
            server.delete("rlhfjob", "hostile", "-n", SPACE)
