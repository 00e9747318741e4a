"""The chart's rights on a real API server: exactly what is needed, nothing else, for programs and for users."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dovetail.kube.resources import CHILDREN
from dovetail.operator.cluster.leader import CLAIM, CLAIM_NAMESPACE, LEASE
from dovetail.operator.cluster.tokens import KEY_SECRET
from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.rlhfjobs import install_crd

KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
JOBS, OTHER = "rights-jobs", "rights-other"
Right = tuple[str, str, str, str]  # group, resource, name, verb


def apply(server: KubeCluster, *things: dict[str, Any]) -> None:
    """Of things in several namespaces."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
    server.kubectl("apply", "--server-side", "-f", "-", stdin=text)


class Release:
    """The accounts and roles of one release; nothing runs."""

    def __init__(self, server: KubeCluster, name: str, namespaces: list[str]) -> None:
        self.server, self.name, self.home = server, name, f"{name}-system"
        words = ["template", name, str(CHART), "-n", self.home, "--set-json", f"namespaces={json.dumps(namespaces)}"]
        rendered = [t for t in yaml.safe_load_all(server.helm(*words)) if t and t["kind"] in KINDS]
        self.things = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.home}}, *rendered]
        apply(server, *self.things)

    def account(self, component: str) -> str:
        return f"system:serviceaccount:{self.home}:{self.name}-dovetail-{component}"

    def remove(self) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": self.things})
        self.server.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=text)


def review(server: KubeCluster, user: str, groups: list[str], asked: list[Right], namespace: str) -> dict[Right, bool]:
    """What a user may do, by SubjectAccessReview; resources as `pods/log`."""
    items = []
    for group, resource, name, verb in asked:
        kind, _, sub = resource.partition("/")
        attributes = {"group": group, "resource": kind, "subresource": sub, "name": name, "verb": verb}
        spec = {"user": user, "groups": groups, "resourceAttributes": attributes | {"namespace": namespace}}
        items.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    rest, answers = server.kubectl("create", "-f", "-", "-o", "json", stdin=text).strip(), []
    while rest:  # one document after the other
        answer, end = json.JSONDecoder().raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].lstrip()
    return {right: bool(answer["status"].get("allowed")) for right, answer in zip(asked, answers, strict=True)}


def rights(server: KubeCluster, user: str, namespace: str) -> set[Right]:
    """All that RBAC gives an account in a namespace, but for what every account has."""
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    words = ("create", "--validate=false", "-f", "-", "-o", "json", "--as", user)

    def ask(user: str) -> Any:
        found = json.loads(server.kubectl(*words[:-1], user, stdin=json.dumps(body)))
        return found["status"]["resourceRules"]

    def expand(rules: list[dict[str, Any]]) -> set[Right]:
        return {
            (group, resource, name, verb)
            for rule in rules
            for group in rule.get("apiGroups", [""])
            for resource in rule.get("resources", [])
            for name in rule.get("resourceNames") or [""]
            for verb in rule["verbs"]
        }

    return expand(ask(user)) - expand(ask("system:serviceaccount:default:default"))


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    install_crd(api_server)
    for name in (JOBS, OTHER):
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return api_server


@pytest.fixture(scope="module")
def everywhere(server: KubeCluster) -> Iterator[Release]:
    release = Release(server, "wide", [])
    yield release
    release.remove()


@pytest.fixture(scope="module")
def confined(server: KubeCluster) -> Iterator[Release]:
    release = Release(server, "narrow", [JOBS])
    yield release
    release.remove()


def of(group: str, resource: str, verbs: str, name: str = "") -> set[Right]:
    return {(group, resource, name, verb) for verb in verbs.split()}


RBAC, BATCH = "rbac.authorization.k8s.io", "batch"
# What the operator's calls need: it watches and lists all children, applies (create and patch) what it renders, deletes
# what a job may have to do without, owns what it makes (finalizers), grants on what it may do itself.
OPERATOR = (
    of("dovetail.dev", "rlhfjobs", "get list watch delete")
    | of("dovetail.dev", "rlhfjobs/status", "patch")
    | of("dovetail.dev", "rlhfjobs/finalizers", "update")
    | of("jobset.x-k8s.io", "jobsets", "list watch create patch delete")
    | of(BATCH, "jobs", "list watch create patch delete")
    | of("", "pods", "list watch delete")
    | of("", "configmaps", "get list watch create patch")
    | of("", "services", "list watch create patch")
    | of("", "persistentvolumeclaims", "list watch create patch")
    | of("", "serviceaccounts", "list watch create patch")
    | of("", "secrets", "get create")
    | of(RBAC, "roles", "list watch create patch")
    | of(RBAC, "rolebindings", "list watch create patch")
    | of("networking.k8s.io", "networkpolicies", "list watch create patch")
    | of("policy", "poddisruptionbudgets", "list watch create patch")
    | of("", "events", "create list")
    | of("kueue.x-k8s.io", "workloads", "list")
)
# Nodes and classes belong to no namespace.
CLASSES = of("dovetail.dev", "rlhfjobclasses", "list watch")
EVERYWHERE = {"operator": of("", "nodes", "list watch") | CLASSES, "api": set[Right]()}
LEADER = of("coordination.k8s.io", "leases", "get update", LEASE)
LEADER |= of("", "secrets", "create") | of("", "secrets", "get", KEY_SECRET)
API = (
    of("dovetail.dev", "rlhfjobs", "get list watch")
    | of("", "pods", "get list")
    | of("", "pods/log", "get")
    | of("", "events", "list watch")
)
ASKING = of("authentication.k8s.io", "tokenreviews", "create") | of(
    "authorization.k8s.io", "subjectaccessreviews", "create"
)
# What nobody of ours may do, wherever.
NEVER: list[Right] = [
    *of("", "secrets", "list watch update patch delete deletecollection"),
    *of("", "pods", "create update patch deletecollection"),
    *of("", "pods/exec", "create get"),
    *of("", "pods/eviction", "create"),
    *of("", "nodes", "get patch"),
    *of("", "namespaces", "get list create delete"),
    *of("", "serviceaccounts/token", "create"),
    *of("", "serviceaccounts", "impersonate delete"),
    *of("", "persistentvolumes", "get list create"),
    *of("apps", "deployments", "get list create patch"),
    *of(BATCH, "cronjobs", "create list"),
    *of(RBAC, "roles", "bind escalate delete update"),
    *of(RBAC, "clusterroles", "get list create patch bind escalate"),
    *of(RBAC, "clusterrolebindings", "create patch"),
    *of("dovetail.dev", "rlhfjobs", "create update patch deletecollection"),
    *of("dovetail.dev", "rlhfjobclasses", "get create update patch delete"),
    *of("apiextensions.k8s.io", "customresourcedefinitions", "get list watch create patch"),
    *of("admissionregistration.k8s.io", "validatingwebhookconfigurations", "get create patch"),
    *of("", "configmaps", "delete update"),
    *of("", "persistentvolumeclaims", "delete update"),
    *of("networking.k8s.io", "networkpolicies", "delete update"),
]


@pytest.mark.parametrize(("component", "wanted"), [("operator", OPERATOR), ("api", API)])
def test_rights_in_all_namespaces_are_exactly_these(server, everywhere, component, wanted):
    asking = EVERYWHERE[component] | (ASKING if component == "api" else set())
    wait_for(
        f"the rights of {component}", lambda: rights(server, everywhere.account(component), OTHER) == wanted | asking
    )
    at_home = wanted | asking | (LEADER if component == "operator" else set())
    wait_for("rights at home", lambda: rights(server, everywhere.account(component), everywhere.home) == at_home)
    claim = of("coordination.k8s.io", "leases", "get update", CLAIM) if component == "operator" else set()
    there = wanted | asking | claim
    wait_for("the claim", lambda: rights(server, everywhere.account(component), CLAIM_NAMESPACE) == there)


@pytest.mark.parametrize(("component", "wanted"), [("operator", OPERATOR), ("api", API)])
def test_with_named_namespaces_there_are_no_rights_elsewhere(server, confined, component, wanted):
    asking = ASKING if component == "api" else set()
    wait_for(f"the rights of {component}", lambda: rights(server, confined.account(component), JOBS) == wanted | asking)
    assert rights(server, confined.account(component), OTHER) == asking
    at_home = asking | (LEADER if component == "operator" else set())
    wait_for("rights at home", lambda: rights(server, confined.account(component), confined.home) == at_home)


@pytest.mark.parametrize("component", ["operator", "api"])
def test_can_i(server, confined, everywhere, component):
    """The API server's own answers, yes and no."""
    wanted = {"operator": OPERATOR, "api": API}[component]
    for release in (confined, everywhere):
        user, more = release.account(component), EVERYWHERE[component] if release is everywhere else set()
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{release.home}", "system:authenticated"]
        for _ in range(300):  # the authorizer hears of new roles a moment later
            answers = review(server, user, groups, sorted(wanted | more), JOBS)
            if all(answers.values()):
                break
        assert [right for right, allowed in answers.items() if not allowed] == []
        doubtful = *NEVER, *EVERYWHERE["operator"], *of("", "pods", "delete")
        never = [right for right in doubtful if right not in wanted | more]
        answers = review(server, user, groups, never, JOBS)
        assert [right for right, allowed in answers.items() if allowed] == []
        assert any(review(server, user, groups, sorted(wanted), OTHER).values()) == (release is everywhere)


def test_everything_that_the_operator_handles_is_covered():
    """So that a new kind of child is not forgotten here and in the chart."""
    handled = {(resource.group, resource.plural) for resource in CHILDREN}
    assert handled <= {(group, resource) for group, resource, _, _ in OPERATOR}
    for resource in CHILDREN:
        verbs = {verb for group, kind, _, verb in OPERATOR if (group, kind) == (resource.group, resource.plural)}
        assert {"list", "watch"} <= verbs, resource.kind


def test_a_pods_role_can_be_granted_without_escalation(server, confined):
    """The API server lets the operator give jobs' pods what it renders, and nothing that it has not itself."""
    user = confined.account("operator")
    wait_for("the rights", lambda: rights(server, user, JOBS) == OPERATOR)

    def grant(resource: str, group: str) -> Any:
        rule = {"apiGroups": [group], "resources": [resource], "verbs": ["get"]}
        thing = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {"name": "job-pods"}, "rules": [rule]}
        words = ("apply", "--server-side", "--validate=false", "-n", JOBS, "--as", user, "-f", "-", "--dry-run=server")
        return server.try_kubectl(*words, stdin=json.dumps(thing))

    assert grant("rlhfjobs", "dovetail.dev").returncode == 0
    assert grant("configmaps", "").returncode == 0
    refused = grant("pods", "")
    assert refused.returncode == 1
    assert "attempting to grant RBAC permissions not currently held" in refused.stderr


USERS = {
    "view": (["get", "list", "watch"], ["create", "update", "patch", "delete"]),
    "edit": (["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"], []),
    "admin": (["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"], []),
}


@pytest.mark.parametrize("role", USERS)
def test_users_get_rlhfjobs_with_the_built_in_roles(server, everywhere, role):
    user = f"user-{role}"
    apply(
        server,
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": user, "namespace": JOBS},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
        },
    )
    may, may_not = (["dovetail.dev/rlhfjobs/" + verb for verb in verbs] for verbs in USERS[role])

    def ask(verbs: list[str], namespace: str = JOBS) -> list[bool]:
        asked: list[Right] = [("dovetail.dev", "rlhfjobs", "", verb.rpartition("/")[2]) for verb in verbs]
        return list(review(server, user, ["system:authenticated"], asked, namespace).values()) if asked else []

    wait_for(f"aggregation to {role}", lambda: all(ask(may)))
    assert not any(ask(may_not))
    assert not any(ask(may, OTHER))
    status: list[Right] = [("dovetail.dev", "rlhfjobs/status", "", "patch")]
    written = review(server, user, ["system:authenticated"], status, JOBS)
    assert written == {status[0]: False}, "a status is the operator's alone"


def test_a_user_of_one_namespace_cannot_touch_the_others_job_of_that_name(server):
    """Two teams, two jobs with one name."""
    job = yaml.safe_load((CHART.parents[1] / "examples" / "quickstart.yaml").read_text())
    for namespace in (JOBS, OTHER):
        server.apply(job, namespace=namespace)
    apply(
        server,
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "mallory", "namespace": OTHER},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": RBAC, "kind": "User", "name": "mallory"}],
        },
    )
    name = job["metadata"]["name"]
    words = ("delete", "rlhfjob", name, "--as", "mallory", "--wait=true")
    wait_for(
        "the binding", lambda: server.try_kubectl("get", "rlhfjobs", "--as", "mallory", "-n", OTHER).returncode == 0
    )
    refused = server.try_kubectl(*words, "-n", JOBS)
    assert refused.returncode == 1
    assert "forbidden" in refused.stderr.lower()
    assert server.try_kubectl(*words, "-n", OTHER).returncode == 0
    assert server.get("rlhfjob", name, "-n", OTHER) is None
    assert server.get("rlhfjob", name, "-n", JOBS)["metadata"]["name"] == name
    server.kubectl("delete", "rlhfjob", name, "-n", JOBS)
