"""What a tenant gains who may write RLHFJobs and nothing else, with any podTemplate, on a real API server that has the
chart's policy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.rlhfjobs import install_crd, quickstart

LAB, NODES = "tenants-lab", "tenants-nodes"
RBAC = "rbac.authorization.k8s.io"
POLICY = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
WRITE = ["get", "list", "watch", "create", "update", "patch", "delete"]


def grant(name: str, namespace: str, user: str, *rules: dict[str, Any]) -> list[dict[str, Any]]:
    metadata = {"name": name, "namespace": namespace}
    subject = {"kind": "User", "name": user, "apiGroup": RBAC}
    reference = {"kind": "Role", "name": name, "apiGroup": RBAC}
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": list(rules)},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]


JOBS = {"apiGroups": ["dovetail.dev"], "resources": ["rlhfjobs"], "verbs": WRITE}
MINE = {
    "apiGroups": [""],
    "resources": ["secrets"],
    "resourceNames": ["mine", *(f"mine-{number}" for number in range(21))],
    "verbs": ["get"],
}
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> Iterator[KubeCluster]:
    """mallory may write jobs and read one Secret, alice may also make pods; NODES is privileged by its label."""
    install_crd(api_server)
    for name, labels in ((LAB, {}), (NODES, {"pod-security.kubernetes.io/enforce": "privileged"})):
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    text = api_server.helm("template", "tenants", str(CHART), "-n", "tenants-system")
    policy = [thing for thing in yaml.safe_load_all(text) if thing and thing["kind"] in POLICY]
    assert [thing["kind"] for thing in policy] == list(POLICY), "it is on where one release serves all namespaces"
    things = [*grant("mallory", LAB, "mallory", JOBS, MINE), *grant("mallory", NODES, "mallory", JOBS)]
    things += [*grant("alice", LAB, "alice", JOBS, PODS), *policy]
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
    api_server.kubectl("apply", "--server-side", "-f", "-", stdin=items)
    wait_for("the policy", lambda: "hostNetwork" in create(api_server, job({"hostNetwork": True})).stderr)
    yield api_server
    api_server.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=items)


def job(pod: dict[str, Any] | None = None, where: str = "groups", namespace: str = LAB, **spec: Any) -> dict[str, Any]:
    document = quickstart("demo", namespace, **spec)
    if pod is not None:
        owner = document["spec"]["groups"][-1] if where == "groups" else document["spec"].setdefault("coordinator", {})
        owner["podTemplate"] = {"spec": pod}
    return document


def create(
    server: KubeCluster, document: dict[str, Any], user: str = "mallory", verb: str = "create"
) -> subprocess.CompletedProcess[str]:
    """As the user; nothing is stored."""
    return server.try_kubectl(verb, "--dry-run=server", "--as", user, "-f", "-", stdin=json.dumps(document))


def container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "dovetail", **fields}]}


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "extra", **source}]}


def security(**fields: Any) -> dict[str, Any]:
    return container(securityContext=fields)


SECRET = "a Secret that you may not read"
NODE = "podTemplate.spec may not share the node's network or processes"
KIND = "podTemplate.spec.volumes has a kind of volume"
ROOT = "podTemplate.spec.securityContext asks for root"
LOOSE = "a container of a podTemplate asks for root"
OF_PODS = "are for those who may create pods here"
REFUSED = [
    (container(envFrom=[{"secretRef": {"name": "other"}}]), SECRET),
    (container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]), SECRET),
    ({"initContainers": [{"name": "i", "image": "i", "envFrom": [{"secretRef": {"name": "other"}}]}]}, SECRET),
    (volume(secret={"secretName": "other"}), SECRET),
    (volume(projected={"sources": [{"secret": {"name": "other"}}]}), SECRET),
    (volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "other"}}), SECRET),
    ({"imagePullSecrets": [{"name": "other"}]}, SECRET),
    ({"serviceAccountName": "builder"}, OF_PODS),
    ({"serviceAccount": "builder"}, OF_PODS),
    ({"nodeName": "control-plane"}, OF_PODS),
    ({"hostNetwork": True}, NODE),
    ({"hostPID": True}, NODE),
    ({"hostIPC": True}, NODE),
    (volume(hostPath={"path": "/"}), KIND),
    (volume(nfs={"server": "10.0.0.1", "path": "/"}), KIND),
    ({"securityContext": {"runAsUser": 0}}, ROOT),
    ({"securityContext": {"runAsNonRoot": False}}, ROOT),
    ({"securityContext": {"$patch": "replace"}}, ROOT),
    ({"securityContext": None}, ROOT),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, ROOT),
    (security(privileged=True), LOOSE),
    (security(allowPrivilegeEscalation=True), LOOSE),
    (security(runAsUser=0), LOOSE),
    (security(capabilities={"add": ["SYS_ADMIN"]}), LOOSE),
    (security(procMount="Unmasked"), LOOSE),
    (container(ports=[{"containerPort": 1, "hostPort": 22}]), LOOSE),
    ({"terminationGracePeriodSeconds": 86400}, "terminationGracePeriodSeconds is above 120"),
]


@pytest.mark.parametrize("where", ["groups", "coordinator"])
def test_no_pod_template_gives_a_tenant_more_than_his_rights(server: KubeCluster, where: str) -> None:
    for pod, sentence in REFUSED:
        done = create(server, job(pod, where))
        assert done.returncode != 0, pod
        assert sentence in done.stderr, (pod, done.stderr)


@pytest.mark.parametrize(
    "spec",
    [
        {"hub": {"tokenSecret": {"name": "other"}}},
        {"trackers": [{"kind": "wandb", "secret": "other"}]},
        {"output": {"s3": {"bucket": "models", "credentialsSecret": "other"}}},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_no_field_reads_a_secret_for_a_tenant(server: KubeCluster, spec: dict[str, Any]) -> None:
    done = create(server, job(**spec))
    assert done.returncode != 0
    assert SECRET in done.stderr
    mine = json.loads(json.dumps(spec).replace("other", "mine"))
    assert create(server, job(**mine)).returncode == 0, "he may read this one"


def test_what_a_tenant_may_do_otherwise_stays_allowed(server: KubeCluster) -> None:
    for pod in (
        {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
        volume(emptyDir={}),
        volume(configMap={"name": "code"}),
        volume(secret={"secretName": "mine"}),
        volume(persistentVolumeClaim={"claimName": "data"}),
        container(env=[{"name": "A", "value": "b"}], resources={"limits": {"memory": "1Gi"}}),
        {"securityContext": {"runAsUser": 1000}, "terminationGracePeriodSeconds": 60},
    ):
        done = create(server, job(pod))
        assert done.returncode == 0, done.stderr


def test_who_may_make_pods_may_name_what_his_pods_could(server: KubeCluster) -> None:
    """He gains nothing by it. The node is out of his reach all the same."""
    for pod, sentence in REFUSED:
        done = create(server, job(pod), "alice")
        assert (done.returncode == 0) is (sentence in (SECRET, OF_PODS)), (pod, done.stderr)


def test_a_namespace_that_is_privileged_by_its_label_has_the_nodes(server: KubeCluster) -> None:
    assert create(server, job({"hostNetwork": True}, namespace=NODES)).returncode == 0
    kinds = ("cephfs", "rbd", "iscsi", "flexVolume", "scaleIO", "storageos")
    volumes = [volume(**{kind: {"secretRef": {"name": "other"}}}) for kind in kinds]
    volumes += [volume(secret={"secretName": "other"}), volume(azureFile={"shareName": "s", "secretName": "other"})]
    volumes += [volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "other"}})]
    for pod in volumes:
        assert SECRET in create(server, job(pod, namespace=NODES)).stderr, pod
    assert create(server, job(volume(cephfs={"monitors": ["a"]}), namespace=NODES)).returncode == 0


def test_what_a_job_of_a_class_may_name_is_for_its_class_to_say(server: KubeCluster) -> None:
    for pod, sentence in REFUSED:
        done = create(server, job(pod, **{"class": "some"}))
        of_the_class = sentence in (SECRET, OF_PODS)
        assert (done.returncode == 0) is of_the_class, (pod, done.stderr)


def test_an_edit_of_anothers_job_may_only_suspend_it_and_try_it_again(server: KubeCluster) -> None:
    """An administrator has set it up with a Secret of his. Whatever a tenant lets run in it could read that."""
    document = job(volume(secret={"secretName": "other"}), hub={"tokenSecret": {"name": "other"}})
    server.apply(document, namespace=LAB)
    try:
        for fields in ({"suspend": True}, {"retry": 1}, {"suspend": False, "retry": 2}):
            document["spec"] |= fields
            done = create(server, document, verb="apply")
            assert done.returncode == 0, done.stderr
        edits: list[Callable[[dict[str, Any]], Any]] = [
            lambda spec: spec["groups"][0].update(image="registry.example.com/mallory"),
            lambda spec: spec.update(coordinator={"podTemplate": {"spec": container(command=["cat"])}}),
            lambda spec: spec["groups"][-1].pop("podTemplate"),
            lambda spec: spec.pop("hub"),
        ]
        for number, edit in enumerate(edits):
            changed = json.loads(json.dumps(document))
            edit(changed["spec"])
            assert SECRET in create(server, changed, verb="replace").stderr, number
            assert create(server, changed, "alice", "replace").returncode == 0, "she may make pods"
    finally:
        server.kubectl("delete", "rlhfjob", "demo", "-n", LAB)


def test_a_tenant_may_edit_a_job_whose_secrets_he_may_read(server: KubeCluster) -> None:
    document = job(volume(secret={"secretName": "mine"}), hub={"tokenSecret": {"name": "mine"}})
    server.apply(document, namespace=LAB)
    try:
        document["spec"]["groups"][0]["image"] = "registry.example.com/mine"
        done = create(server, document, verb="apply")
        assert done.returncode == 0, done.stderr
    finally:
        server.kubectl("delete", "rlhfjob", "demo", "-n", LAB)


def test_a_tenant_may_name_several_secrets_of_his(server: KubeCluster) -> None:
    """API servers bound what a policy may cost, and each Secret is asked for."""

    def naming(*secrets: str) -> dict[str, Any]:
        keys = [{"secretKeyRef": {"name": name, "key": "k"}} for name in secrets]
        return job(container(env=[{"name": f"A{number}", "valueFrom": key} for number, key in enumerate(keys)]))

    many = [f"mine-{number}" for number in range(21)]
    for secrets in (many[:20], ["mine"] * 60):
        done = create(server, naming(*secrets))
        assert done.returncode == 0, done.stderr
    assert SECRET in create(server, naming(*many[:19], "other")).stderr
    assert SECRET in create(server, naming("other", *many[:19])).stderr
    assert "name more than 20 Secrets" in create(server, naming(*many)).stderr
    done = create(server, naming(*many), "alice")
    assert done.returncode == 0, done.stderr
