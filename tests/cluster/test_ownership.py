"""Objects of other people that have a name which a job needs, on a real API server with the chart's rights."""

import base64
import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.kube import names
from helpers.cluster import REPOSITORY, KubeCluster, wait_for
from helpers.operator_process import OperatorProcess, established, install, kubeconfig, operator, preserving
from helpers.rlhfjobs import condition, quickstart

SPACE = "ownership"
TENANTS = {"alice": "tenant-alice", "mallory": "tenant-mallory"}
SPACES = [SPACE, *TENANTS.values()]
JOB = "llama"
RBAC = "rbac.authorization.k8s.io"
KINDS = (
    *("jobset", "job", "configmap", "service", "serviceaccount", "role", "rolebinding", "networkpolicy"),
    *("poddisruptionbudget", "persistentvolumeclaim", "secret"),
)


def thing(kind: str, version: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": SPACE}, **fields}


CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
PORTS = [{"port": 8000}]
# What a job needs before its pods start.
TAKEN = {
    "Secret": thing("Secret", "v1", f"{JOB}-token", stringData={"token": "hugging-face"}),
    "PersistentVolumeClaim": thing("PersistentVolumeClaim", "v1", f"{JOB}-files", spec=CLAIM),
    "ConfigMap": thing("ConfigMap", "v1", f"{JOB}-plan", data={"plan.json": "mine"}),
    "ServiceAccount": thing("ServiceAccount", "v1", f"{JOB}-pods"),
    "Role": thing("Role", f"{RBAC}/v1", f"{JOB}-pods", rules=[]),
    "RoleBinding": thing(
        "RoleBinding",
        f"{RBAC}/v1",
        f"{JOB}-pods",
        roleRef={"apiGroup": RBAC, "kind": "Role", "name": "theirs"},
        subjects=[],
    ),
    "Service": thing("Service", "v1", f"{JOB}-coordinator", spec={"ports": PORTS, "selector": {"app": "theirs"}}),
    "NetworkPolicy": thing("NetworkPolicy", "networking.k8s.io/v1", JOB, spec={"podSelector": {}, "ingress": []}),
    "JobSet": thing("JobSet", "jobset.x-k8s.io/v1alpha2", JOB, spec={"replicatedJobs": []}),
}
LATER = ("Secret", "Role", "RoleBinding", "JobSet")


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    if api_server.get("crd", "jobsets.jobset.x-k8s.io") is None:
        api_server.apply(preserving("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2"))
    for space in SPACES:
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    install(api_server, SPACES)
    established(api_server, "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io")
    return api_server


@pytest.fixture(scope="module", autouse=True)
def leader(server: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    config: Path = kubeconfig(server, tmp_path_factory.mktemp("account"))
    with operator(config, tmp_path_factory.mktemp("leader"), "owner", SPACES, DOVETAIL_CONFLICT_SECONDS="1") as process:
        wait_for("leadership", process.leads)
        yield process


@pytest.fixture(autouse=True)
def clean(server: KubeCluster) -> Iterator[None]:
    yield
    server.delete("rlhfjobs", "--all", "-n", SPACE)
    server.delete("pvc", "--all", "-n", SPACE)  # kept
    theirs = [f"{item['kind']}/{item['metadata']['name']}" for item in TAKEN.values()]
    server.kubectl("delete", "--ignore-not-found", "-n", SPACE, *theirs)
    selector = ("-l", names.UID_LABEL, "-o", "name")
    wait_for("nothing left", lambda: server.kubectl("get", ",".join(KINDS), "-n", SPACE, *selector) == "")


def untouched(before: dict[str, Any], after: dict[str, Any] | None) -> bool:
    return after is not None and all(
        before["metadata"].get(key) == after["metadata"].get(key)
        for key in ("uid", "resourceVersion", "ownerReferences", "labels")
    )


def get(server: KubeCluster, item: dict[str, Any]) -> Any:
    return server.get(item["kind"], item["metadata"]["name"], "-n", SPACE)


def create(server: KubeCluster, item: dict[str, Any]) -> Any:
    text = server.kubectl("create", "-n", SPACE, "-f", "-", "-o", "json", stdin=json.dumps(item))
    return json.loads(text)


def conflict(server: KubeCluster) -> str:
    """What the condition says of a name that is taken; "" if it says nothing."""
    found = condition(server, "Scheduled", JOB, SPACE)
    return str(found["message"]) if found.get("reason") == "NameConflict" else ""


def test_objects_of_others_are_left_alone_and_named(server: KubeCluster) -> None:
    """And the job starts by itself when they are gone. Some of its objects are made after the others."""
    theirs = {kind: create(server, item) for kind, item in TAKEN.items()}
    create(server, quickstart(JOB, SPACE))
    for kinds in ([kind for kind in TAKEN if kind not in LATER], *([kind] for kind in LATER)):
        said = wait_for(f"{kinds}", lambda kinds=kinds: conflict(server) if kinds[0] in conflict(server) else "")
        assert all(f"{kind} {TAKEN[kind]['metadata']['name']} " in said for kind in kinds), said
        assert "NameConflict" in server.kubectl("describe", "rlhfjob", JOB, "-n", SPACE)
        for kind in kinds:
            assert untouched(theirs[kind], get(server, TAKEN[kind])), kind
            server.kubectl("delete", kind, TAKEN[kind]["metadata"]["name"], "-n", SPACE)
    uid = server.get("rlhfjob", JOB, "-n", SPACE)["metadata"]["uid"]
    made = wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    assert made["metadata"]["ownerReferences"][0]["uid"] == uid
    wait_for("no conflict", lambda: condition(server, "Scheduled", JOB, SPACE).get("reason") == "CreatingPods")


def test_a_suspended_job_adopts_nothing(server: KubeCluster) -> None:
    kinds = ("PersistentVolumeClaim", "ConfigMap", "ServiceAccount")
    theirs = {kind: create(server, TAKEN[kind]) for kind in kinds}
    create(server, quickstart(JOB, SPACE, suspend=True))
    wait_for("the conflict", lambda: conflict(server))
    assert condition(server, "Suspended", JOB, SPACE)["status"] == "True"
    server.kubectl("delete", "rlhfjob", JOB, "-n", SPACE, "--wait=true")
    selector = ("-l", f"dovetail.dev/job={JOB}", "-o", "name")
    wait_for("the job's objects gone", lambda: server.kubectl("get", ",".join(KINDS), "-n", SPACE, *selector) == "")
    for kind in kinds:
        assert untouched(theirs[kind], get(server, TAKEN[kind])), kind


def test_a_claim_outlives_its_job_and_the_next_one_uses_it(server: KubeCluster) -> None:
    """Nothing else outlives the job. The same manifest, applied again, starts anew beside the files of before. A folder
    in the manifest goes on with an earlier run."""
    create(server, quickstart(JOB, SPACE))
    wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    where = (f"{JOB}-files", "-n", SPACE)
    uid = server.get("rlhfjob", JOB, "-n", SPACE)["metadata"]["uid"]
    folder = f"{JOB}-{uid[:8]}"
    before = server.get("pvc", *where)
    delete_job(server)
    wait_for("nothing else", lambda: mine(server) == [f"persistentvolumeclaim/{JOB}-files"])
    assert untouched(before, server.get("pvc", *where))
    create(server, quickstart(JOB, SPACE))
    jobset = wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    other = server.get("rlhfjob", JOB, "-n", SPACE)["metadata"]["uid"]
    assert f'"/var/dovetail/{JOB}-{other[:8]}"' in json.dumps(jobset)
    claim = server.get("pvc", *where)["metadata"]
    assert (claim["uid"], "ownerReferences" in claim) == (before["metadata"]["uid"], False)
    assert claim["annotations"]["dovetail.dev/earlier-folders"] == folder
    told = wait_for("the Event", lambda: events(server, "StartedAnew", other))
    assert f"in the folder {JOB}-{other[:8]} of the claim" in told[0]
    assert f"stay: {folder}." in told[0]
    delete_job(server)
    create(server, quickstart(JOB, SPACE, storage={"folder": folder, "retain": "Delete"}))
    jobset = wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    assert f'"/var/dovetail/{folder}"' in json.dumps(jobset)
    claim, job = server.get("pvc", *where), server.get("rlhfjob", JOB, "-n", SPACE)
    assert claim["metadata"]["uid"] == before["metadata"]["uid"]
    assert claim["metadata"]["labels"]["dovetail.dev/job-uid"] == job["metadata"]["uid"]
    assert "ownerReferences" not in claim["metadata"], "the operator did not make it for this job"
    wait_for("a plan", lambda: condition(server, "Planned", JOB, SPACE).get("status") == "True")
    patch = json.dumps({"spec": {"storage": {"folder": "other"}}})
    refused = server.try_kubectl("patch", "rlhfjob", JOB, "-n", SPACE, "--type=merge", "-p", patch)
    assert "spec.storage.folder cannot change once the job is planned" in refused.stderr


def test_the_manifest_decides_whether_the_claim_goes_with_the_job(server: KubeCluster) -> None:
    """Keep is the default also for a claim that an earlier release made, and for a change of mind."""
    create(server, quickstart(JOB, SPACE, storage={"retain": "Delete"}))
    where = (f"{JOB}-files", "-n", SPACE)
    wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    owners = server.get("pvc", *where)["metadata"]["ownerReferences"]
    assert owners[0]["kind"] == "RLHFJob"
    patch = ("patch", "rlhfjob", JOB, "-n", SPACE, "--type=merge", "-p")
    server.kubectl(*patch, '{"spec":{"storage":{"retain":"Keep"}}}')
    wait_for("no owner", lambda: "ownerReferences" not in server.get("pvc", *where)["metadata"])
    wait_for("a plan", lambda: condition(server, "Planned", JOB, SPACE).get("status") == "True")
    refused = server.try_kubectl(*patch, '{"spec":{"storage":{"retain":"Delete"}}}')
    assert "spec.storage.retain cannot change to Delete" in refused.stderr
    # As earlier releases made it. Argo CD would take it for its own by the label, and delete it.
    label = "app.kubernetes.io/instance"
    for old in ({"ownerReferences": owners}, {"labels": {label: JOB}, "annotations": {"by": "others"}}):
        server.kubectl("patch", "pvc", *where, "--type=merge", "-p", json.dumps({"metadata": old}))
        wait_for("no owner", lambda: "ownerReferences" not in server.get("pvc", *where)["metadata"])
        wait_for("no label", lambda: label not in server.get("pvc", *where)["metadata"]["labels"])
    kept = server.get("pvc", *where)["metadata"]["annotations"]
    assert kept.items() >= ({"by": "others"} | names.NEVER_PRUNED).items()
    delete_job(server)
    wait_for("nothing else", lambda: mine(server) == [f"persistentvolumeclaim/{JOB}-files"])
    server.kubectl("delete", "pvc", *where)
    create(server, quickstart(JOB, SPACE, storage={"retain": "Delete"}))
    wait_for("the claim", lambda: server.get("pvc", *where))
    delete_job(server)
    wait_for("nothing", lambda: mine(server) == [])


def test_a_webhook_that_labels_everything_blinds_nobody(server: KubeCluster) -> None:
    """With the recommended labels, on every object of a namespace."""
    path = "/metadata/labels/app.kubernetes.io~1"
    values = [f'JSONPatch{{op: "add", path: "{path}{name}", value: "team"}}' for name in ("managed-by", "name")]
    group = "admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": ["*"]}]
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": rules},
        "matchConditions": [{"name": "labelled", "expression": "has(object.metadata.labels)"}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{', '.join(values)}]"}}],
    }
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SPACE}}}
    webhook = {"policyName": "labels", "matchResources": here}
    things = (("MutatingAdmissionPolicy", policy), ("MutatingAdmissionPolicyBinding", webhook))
    for kind, spec in things:
        server.apply({"apiVersion": group, "kind": kind, "metadata": {"name": "labels"}, "spec": spec})
    try:

        def labelled() -> bool:
            probe = thing("ConfigMap", "v1", "probe")
            probe["metadata"]["labels"] = {"a": "b"}
            words = ("create", "--dry-run=server", "-n", SPACE, "-o", "json", "-f", "-")
            text = server.kubectl(*words, stdin=json.dumps(probe))
            return "app.kubernetes.io/managed-by" in json.loads(text)["metadata"]["labels"]

        wait_for("the policy", labelled)
        create(server, quickstart(JOB, SPACE))
        made = wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
        assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "team"
        done = {"type": "Completed", "status": "True", "reason": "x", "lastTransitionTime": "2026-11-21T12:00:00Z"}
        words = ("jobset", JOB, "-n", SPACE, "--subresource=status", "--type=merge", "-p")
        server.kubectl("patch", *words, json.dumps({"status": {"conditions": [done]}}))
        wait_for("the end", lambda: condition(server, "Completed", JOB, SPACE).get("status") == "True")
    finally:
        for kind, _ in things:
            server.delete(kind, "labels")


def events(server: KubeCluster, reason: str, uid: str) -> list[str]:
    """Messages of the Events about the job with this uid."""
    fields = f"reason={reason},involvedObject.uid={uid}"
    found = server.kubectl("get", "events", "-n", SPACE, "--field-selector", fields, "-o", "json")
    return [event["message"] for event in json.loads(found)["items"]]


def delete_job(server: KubeCluster) -> None:
    server.delete("rlhfjob", JOB, "-n", SPACE)


def mine(server: KubeCluster) -> list[str]:
    """What is left of the job."""
    words = ("get", ",".join(KINDS), "-n", SPACE, "-l", f"dovetail.dev/job={JOB}", "-o", "name")
    return server.kubectl(*words).split()


def test_jobs_whose_names_and_groups_join_to_the_same_word(server: KubeCluster) -> None:
    """Both would have a Job llama-old-c-0. The second waits, and starts when the first is gone."""
    groups = [{"name": "train", "roles": ["trainer"]}, {"name": "old-c", "roles": ["rollout"]}]
    create(server, quickstart(JOB, SPACE, groups=groups))
    wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    second = f"{JOB}-old"
    create(server, quickstart(second, SPACE, groups=[groups[0], groups[1] | {"name": "c"}]))
    found = wait_for(
        "the conflict",
        lambda: (c := condition(server, "Scheduled", second, SPACE)).get("reason") == "NameConflict" and c["message"],
    )
    assert f"Jobs of group c would have the names of the Jobs of RLHFJob {JOB}, group old-c ({second}-c-0)" in found
    assert server.get("jobset", second, "-n", SPACE) is None
    delete_job(server)
    wait_for("the second JobSet", lambda: server.get("jobset", second, "-n", SPACE))


def test_labels_alone_make_nothing_the_jobs_own(server: KubeCluster) -> None:
    """A pod that failed and a Job that is surplus, by their labels: the job neither fails nor deletes them."""
    create(server, quickstart(JOB, SPACE))
    uid = server.get("rlhfjob", JOB, "-n", SPACE)["metadata"]["uid"]
    wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    labels = {
        "app.kubernetes.io/managed-by": "dovetail-operator",
        "dovetail.dev/job": JOB,
        "dovetail.dev/job-uid": uid,
        "dovetail.dev/role": "trainer",
    }
    template = {"spec": {"containers": [{"name": "dovetail", "image": "none"}], "restartPolicy": "Never"}}
    surplus = thing("Job", "batch/v1", "theirs", spec={"suspend": True, "template": template})
    surplus["metadata"]["labels"] = labels | {"dovetail.dev/surplus": "true"}
    pods = [thing("Pod", "v1", f"theirs-{number}", spec=template["spec"]) for number in range(8)]
    job = create(server, surplus)
    try:
        for pod in pods:
            pod["metadata"]["labels"] = labels
            create(server, pod)
            words = ("pod", pod["metadata"]["name"], "-n", SPACE, "--subresource=status", "--type=merge")
            server.kubectl("patch", *words, "-p", json.dumps({"status": {"phase": "Failed"}}))
        look(server)
        assert condition(server, "Failed", JOB, SPACE).get("status") != "True"
        server.kubectl("patch", "rlhfjob", JOB, "-n", SPACE, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        wait_for("suspended", lambda: condition(server, "Suspended", JOB, SPACE).get("status") == "True")
        wait_for("no JobSet", lambda: server.get("jobset", JOB, "-n", SPACE) is None)
        there = server.get("job", "theirs", "-n", SPACE)["metadata"]
        assert (there["uid"], there.get("deletionTimestamp")) == (job["metadata"]["uid"], None)
    finally:
        server.kubectl("delete", "job", "theirs", "-n", SPACE)
        server.kubectl("delete", "pods", "--all", "-n", SPACE, "--force", "--grace-period=0")


def look(server: KubeCluster) -> None:
    """Another job shows that the operator has seen all that came before."""
    name = f"look-{uuid.uuid4().hex[:6]}"
    create(server, quickstart(name, SPACE))
    wait_for("a look", lambda: server.get("jobset", name, "-n", SPACE))
    server.kubectl("delete", "rlhfjob", name, "-n", SPACE, "--wait=true")


def test_a_token_that_a_tenant_made_is_not_used(server: KubeCluster) -> None:
    """With an owner reference as the operator writes it, before the operator could make its own."""
    create(server, TAKEN["ConfigMap"])  # keeps the job from starting
    create(server, quickstart(JOB, SPACE))
    wait_for("the conflict", lambda: conflict(server))
    job = server.get("rlhfjob", JOB, "-n", SPACE)
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": "RLHFJob",
        "name": JOB,
        "uid": job["metadata"]["uid"],
        "controller": True,
    }
    forged = thing("Secret", "v1", f"{JOB}-token", stringData={"token": "known"}, immutable=True)
    forged["metadata"] |= {"ownerReferences": [owner]}
    before = create(server, forged)
    server.kubectl("delete", "configmap", f"{JOB}-plan", "-n", SPACE)
    wait_for("the Secret named", lambda: f"Secret {JOB}-token" in conflict(server))
    assert server.get("jobset", JOB, "-n", SPACE) is None
    assert untouched(before, get(server, TAKEN["Secret"]))
    server.kubectl("delete", "secret", f"{JOB}-token", "-n", SPACE)
    wait_for("the JobSet", lambda: server.get("jobset", JOB, "-n", SPACE))
    made = get(server, TAKEN["Secret"])
    assert len(base64.b64decode(made["data"]["token"])) == 64


def grant(server: KubeCluster, user: str, space: str, role: str, kind: str = "ClusterRole") -> None:
    binding = thing("RoleBinding", f"{RBAC}/v1", user, roleRef={"apiGroup": RBAC, "kind": kind, "name": role})
    binding["metadata"]["namespace"] = space
    server.apply(binding | {"subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}]}, namespace=space)
    ask = ("auth", "can-i", "create", "rlhfjobs.dovetail.dev", "-n", space, "--as", user)
    wait_for(f"the rights of {user}", lambda: server.try_kubectl(*ask).returncode == 0)


def create_as(server: KubeCluster, user: str, space: str, item: dict[str, Any]) -> Any:
    item = item | {"metadata": item["metadata"] | {"namespace": space}}
    words = ("create", "-n", space, "--as", user, "-f", "-", "-o", "json")
    return json.loads(server.kubectl(*words, stdin=json.dumps(item)))


def reason(server: KubeCluster, job: str, space: str) -> str:
    """What a job waits for."""
    found = condition(server, "Scheduled", job, space)
    return f"{found.get('reason')}: {found.get('message')}"


def everything(server: KubeCluster, space: str) -> dict[str, Any]:
    """What a tenant would lose: identity and owners of all objects in a namespace, and what Secrets hold."""
    things = json.loads(server.kubectl("get", ",".join(("rlhfjob", *KINDS)), "-n", space, "-o", "json"))["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}": (
            *(item["metadata"].get(key) for key in ("uid", "ownerReferences", "labels", "deletionTimestamp")),
            item.get("data") if item["kind"] in ("Secret", "ConfigMap") else None,
        )
        for item in things
    }


def test_tenants_who_attack_each_other_lose_nothing(server: KubeCluster) -> None:
    """With the built-in role edit in a namespace each: by the same names, by labels and owners, by what a manifest
    names, by a quota that is used up. The authorizer is the API server's own."""
    quota = thing("ResourceQuota", "v1", "claims", spec={"hard": {"persistentvolumeclaims": "2"}})
    before, jobs = {}, {}
    for user, space in TENANTS.items():
        grant(server, user, space, "edit")
        server.apply(quota | {"metadata": {"name": "claims", "namespace": space}}, namespace=space)
        create_as(server, user, space, thing("Secret", "v1", "hub", stringData={"token": f"of {user}"}))
        create_as(server, user, space, thing("PersistentVolumeClaim", "v1", "data", spec=CLAIM))
        job = quickstart(JOB, space, checkpoint={"volume": "data"}, hub={"tokenSecret": {"name": "hub"}})
        jobs[user] = create_as(server, user, space, job)
        wait_for("the JobSet", lambda space=space: server.get("jobset", JOB, "-n", space))
        create_as(server, user, space, thing("PersistentVolumeClaim", "v1", "more", spec=CLAIM))  # the quota is used up
    for space in TENANTS.values():
        wait_for("a status", lambda space=space: condition(server, "Planned", JOB, space).get("status") == "True")
        before[space] = everything(server, space)
    tokens = {before[space][f"Secret/{JOB}-token"][-1]["token"] for space in TENANTS.values()}
    assert len(tokens) == 2

    for user, space in TENANTS.items():
        (victim,) = (other for other in TENANTS if other != user)
        theirs, target = TENANTS[victim], jobs[victim]
        for words in (
            ("get", "secret", f"{JOB}-token"),
            ("get", "secret", "hub"),
            ("get", "rlhfjob", JOB),
            ("delete", "rlhfjob", JOB),
            ("delete", "pvc", "data"),
            ("patch", "rlhfjob", JOB, "--subresource=status", "--type=merge", "-p", '{"status":{"state":"Failed"}}'),
            ("create", "token", f"{JOB}-pods"),
            ("create", "rolebinding", "mine", f"--role={JOB}-pods", f"--user={user}"),
        ):
            refused = server.try_kubectl(*words, "-n", theirs, "--as", user)
            assert "forbidden" in refused.stderr.lower(), (words, refused)
        mine = ("patch", "rlhfjob", JOB, "-n", space, "--as", user, "--subresource=status", "--type=merge", "-p", "{}")
        assert "forbidden" in server.try_kubectl(*mine).stderr.lower(), "nor a status of their own"
        # In their own namespace they may write what they like: labels and owners of the other's job.
        owner = {key: target[key] for key in ("apiVersion", "kind")} | {"name": JOB, "uid": target["metadata"]["uid"]}
        labels = {
            "app.kubernetes.io/managed-by": "dovetail-operator",
            "dovetail.dev/job": JOB,
            "dovetail.dev/job-uid": owner["uid"],
            "dovetail.dev/role": "coordinator",
        }
        for kind, version, more in (
            ("ConfigMap", "v1", {"data": {"plan.json": "{}"}}),
            ("Pod", "v1", {"spec": {"containers": [{"name": "dovetail", "image": "none"}]}}),
        ):
            forged = thing(kind, version, "forged", **more)
            forged["metadata"] |= {"labels": labels, "ownerReferences": [owner | {"controller": True}]}
            create_as(server, user, space, forged)
        failed = ("patch", "pod", "forged", "-n", space, "--subresource=status", "--type=merge", "-p")
        server.try_kubectl(*failed, '{"status":{"phase":"Failed"}}')  # the garbage collector may be faster
        # Jobs that name what the other has, and that the used up quota holds up.
        for number in range(4):
            named = quickstart(f"greedy-{number}", space, storage={"folder": f"{JOB}-{owner['uid'][:8]}"})
            create_as(server, user, space, named)
        wait_for("the quota", lambda space=space: "quota: claims" in reason(server, "greedy-3", space))
        # The other still works with the operator meanwhile.
        second = quickstart("second", theirs, checkpoint={"volume": "data"})
        create_as(server, victim, theirs, second)
        wait_for("the other's next job", lambda theirs=theirs: server.get("jobset", "second", "-n", theirs))
        server.kubectl("delete", "rlhfjob", "second", "-n", theirs, "--as", victim, "--wait=true")
        assert condition(server, "Failed", JOB, theirs).get("status") != "True"

    for user, space in TENANTS.items():
        names = [f"greedy-{number}" for number in range(4)]
        server.delete("rlhfjob", *names, "-n", space, "--as", user)
        server.kubectl("delete", "pod,configmap", "forged", "-n", space, "--ignore-not-found", "--force")
    for space in TENANTS.values():
        with contextlib.suppress(AssertionError):  # what differs is shown below
            wait_for("the rest gone", lambda space=space: everything(server, space) == before[space])
        assert everything(server, space) == before[space]
    for space in TENANTS.values():
        server.kubectl("delete", "namespace", space, "--wait=false")


def test_a_manifest_cannot_make_a_pod_pass_for_another_jobs(server: KubeCluster) -> None:
    """By labels of a podTemplate: the other job's Service would lead to the pod, which would get that job's token."""
    create(server, quickstart(JOB, SPACE))
    service = wait_for("the Service", lambda: server.get("service", f"{JOB}-coordinator", "-n", SPACE))
    for number, label in enumerate(service["spec"]["selector"].items()):
        template = {"podTemplate": {"metadata": {"labels": dict([label])}}}
        create(server, quickstart(f"attack-{number}", SPACE, coordinator=template))
    for number, key in enumerate(service["spec"]["selector"]):
        name = f"attack-{number}"
        planned = wait_for("the refusal", lambda name=name: condition(server, "Planned", name, SPACE))
        assert (planned["reason"], f"labels has {key}," in planned["message"]) == ("InvalidSpec", True), planned
        assert server.get("jobset", name, "-n", SPACE) is None


def test_a_quota_limits_a_tenants_jobs(server: KubeCluster) -> None:
    """As helm/dovetail/README.md has it."""
    text = (REPOSITORY / "helm/dovetail/README.md").read_text().split("## Limits of tenants")[1].split("## ")[0]
    code = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    quota = yaml.safe_load("\n".join(code))
    key = "count/rlhfjobs.dovetail.dev"
    assert int(quota["spec"]["hard"][key]) > 1
    quota["spec"]["hard"] = {key: "1"}
    quota["metadata"]["namespace"] = SPACE
    server.apply(quota, namespace=SPACE)
    name = quota["metadata"]["name"]
    try:
        wait_for("the quota", lambda: (server.get("resourcequota", name, "-n", SPACE) or {}).get("status"))
        create(server, quickstart(JOB, SPACE, suspend=True))
        refused = server.try_kubectl("create", "-f", "-", stdin=json.dumps(quickstart("more", SPACE, suspend=True)))
        assert f"exceeded quota: {name}" in refused.stderr, refused
    finally:
        server.kubectl("delete", "resourcequota", name, "-n", SPACE)


def test_who_may_only_create_rlhfjobs_gains_nothing_in_the_same_namespace(server: KubeCluster) -> None:
    """By names of RLHFJobs whose children have the names of others' objects, and of the API's rights on a job."""
    rules = [{"apiGroups": ["dovetail.dev"], "resources": ["rlhfjobs"], "verbs": ["create", "get", "delete"]}]
    create(server, thing("Role", f"{RBAC}/v1", "submitter", rules=rules))
    grant(server, "eve", SPACE, "submitter", "Role")
    theirs = {kind: create(server, TAKEN[kind]) for kind in ("Secret", "PersistentVolumeClaim", "ConfigMap")}
    for storage in ({"retain": "Delete"}, {"folder": "runs", "retain": "Delete"}):
        create_as(server, "eve", SPACE, quickstart(JOB, SPACE, storage=storage))
        wait_for("the conflict", lambda: f"PersistentVolumeClaim {JOB}-files" in conflict(server))
        for words in (("get", "secret", f"{JOB}-token"), ("get", "configmap", f"{JOB}-plan"), ("get", "pods")):
            assert "forbidden" in server.try_kubectl(*words, "-n", SPACE, "--as", "eve").stderr.lower()
        server.delete("rlhfjob", JOB, "-n", SPACE, "--as", "eve")
        for kind, before in theirs.items():
            assert untouched(before, get(server, TAKEN[kind])), kind
    server.kubectl("delete", "role,rolebinding", "submitter", "eve", "-n", SPACE, "--ignore-not-found")
