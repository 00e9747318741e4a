"""What an RLHFJobClass allows a job, and what it gives to its pods."""

import json
from typing import Any

import pytest

from dovetail.manifest.documents import ManifestError, parse
from dovetail.manifest.job_class import RLHFJobClass, parse_class
from helpers.manifests import changed

CLASS = {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJobClass", "metadata": {"name": "gpu"}}


def a_class(**spec: Any) -> RLHFJobClass:
    return parse_class(CLASS | {"spec": spec})


def a_job(pod: dict[str, Any] | None = None, **changes: Any) -> Any:
    document = changed(**({"groups.0.podTemplate": {"spec": pod}} if pod else {}), **changes)
    document["metadata"]["namespace"] = "team-a"
    return parse(document)


def with_container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "dovetail", **fields}]}


def with_volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "extra", **source}]}


SECRETS = [
    {"imagePullSecrets": [{"name": "other"}]},
    with_container(envFrom=[{"secretRef": {"name": "other"}}]),
    with_container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]),
    {"initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "other"}}]}]},
    with_volume(secret={"secretName": "other"}),
    with_volume(projected={"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "other"}}]}),
    with_volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "other"}}),
    with_volume(azureFile={"shareName": "s", "secretName": "other"}),
    *(
        with_volume(**{kind: {"secretRef": {"name": "other"}}})
        for kind in ("cephfs", "rbd", "iscsi", "flexVolume", "scaleIO", "storageos")
    ),
]


@pytest.mark.parametrize("pod", SECRETS, ids=str)
def test_a_secret_of_any_kind_must_be_listed(pod):
    (problem,) = a_class(allowed={"fields": ["spec"]}).problems(a_job(pod))
    assert problem.startswith("spec.groups[0].podTemplate names other, which class gpu does not allow (secrets: none)")
    assert a_class(allowed={"fields": ["spec"], "secrets": ["other"]}).problems(a_job(pod)) == []


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"hub": {"tokenSecret": {"name": "other"}}}, "spec.hub.tokenSecret"),
        ({"trackers": [{"kind": "wandb", "secret": "other"}]}, "spec.trackers[0].secret"),
        ({"output": {"s3": {"bucket": "abc", "credentialsSecret": "other"}}}, "spec.output.s3.credentialsSecret"),
    ],
)
def test_a_secret_that_a_field_names_must_be_listed(changes, path):
    (problem,) = a_class().problems(a_job(**changes))
    assert problem.startswith(f"{path} names other")
    assert a_class(allowed={"secrets": ["other"]}).problems(a_job(**changes)) == []


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"nodeSelector": {"a": "b"}}, "spec.nodeSelector.a"),
        ({"securityContext": None}, "spec.securityContext"),
        ({"tolerations": []}, "spec.tolerations"),
        (with_container(securityContext={"$patch": "replace"}), "spec.containers.securityContext.$patch"),
        (with_container(resources={"limits": {"memory": "1Ti"}}), "spec.containers.resources.limits.memory"),
        (with_volume(hostPath={"path": "/"}), "spec.volumes.hostPath.path"),
        (with_container(volumeMounts=[{"mountPath": "/x", "name": "y"}]), "spec.containers.volumeMounts.name"),
    ],
)
def test_a_field_that_is_not_listed_may_not_be_set(pod, field):
    problems = a_class().problems(a_job(pod))
    assert problems[0].startswith(f"spec.groups[0].podTemplate.{field} is set, and class gpu lets jobs set other")
    while "." in field:
        assert a_class(allowed={"fields": [field.replace(".$patch", "")]}).problems(a_job(pod)) == []
        field = field.rpartition(".")[0]
    others = {"fields": ["spec.nodeSel", "spec.containers.image", "spec.containers.env", "metadata"]}
    assert a_class(allowed=others).problems(a_job(pod)) == problems_with(problems, others["fields"])


def problems_with(problems: list[str], fields: list[str]) -> list[str]:
    """The same, with these fields in place of none."""
    return [problem.replace("(none)", f"({', '.join(fields)})") for problem in problems]


def test_accounts_and_images_must_be_listed():
    allowed = {"fields": ["spec"], "images": ["registry.example.com/team-a/*"], "serviceAccounts": ["uploader"]}
    given = a_class(allowed=allowed)
    mine, other = "registry.example.com/team-a/x:1", "registry.example.com/team-b/x:1"
    for changes in (
        {"groups.0.image": mine},
        {"coordinator": {"image": mine}},
        {"pod": {"serviceAccountName": "uploader"}},
        {"pod": {"initContainers": [{"name": "i", "image": mine}]}},
        {"pod": with_volume(image={"reference": mine})},
    ):
        assert given.problems(a_job(**changes)) == []
        wrong = json.loads(json.dumps(changes).replace(mine, other).replace("uploader", "admin"))
        (problem,) = given.problems(a_job(**wrong))
        assert "which class gpu does not allow" in problem, wrong


def test_a_class_is_for_its_namespaces():
    (problem,) = a_class(namespaces=["team-b"]).problems(a_job())
    assert problem.startswith("spec.class is gpu, which is for jobs of other namespaces than team-a")
    assert a_class(namespaces=["team-b", "team-a"]).problems(a_job()) == []


def test_a_job_cannot_change_what_its_class_says():
    pod = {"nodeSelector": {"pool": "mine", "disk": "fast"}, "volumes": [{"name": "corpus", "emptyDir": {}}]}
    given = a_class(
        podTemplate={
            "spec": {"nodeSelector": {"pool": "rlhf"}, "volumes": [{"name": "corpus", "nfs": {"server": "a"}}]}
        },
        rollout={"image": "rollout:1", "podTemplate": {"spec": {"nodeSelector": {"gpu": "a100"}}}},
    )
    spec = given.given_to(a_job(pod).spec)
    trainers, rollouts = spec.groups
    assert trainers.pod_template["spec"]["nodeSelector"] == {"pool": "rlhf", "disk": "fast"}
    assert trainers.pod_template["spec"]["volumes"][0]["nfs"] == {"server": "a"}
    assert trainers.image is None
    assert rollouts.pod_template["spec"]["nodeSelector"] == {"pool": "rlhf", "gpu": "a100"}
    assert rollouts.image == "rollout:1"
    assert "rollout image rollout:1" in given.told()
    assert "pods' spec.nodeSelector.pool" in given.told()


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "The class must be a mapping with"),
        (CLASS | {"kind": "RLHFJob"}, "kind: RLHFJobClass"),
        (CLASS | {"spec": {"quue": "a"}}, "spec.quue of the class"),
        (CLASS | {"spec": {"allowed": {"fields": ["containers"]}}}, "spec.allowed.fields[0] of the class"),
        (
            CLASS | {"spec": {"podTemplate": {"spec": {"restartPolicy": "Always"}}}},
            "spec.podTemplate.spec.restartPolicy",
        ),
        (CLASS | {"spec": {"trainer": {"podTemplate": {"$patch": "replace"}}}}, "spec.trainer has a podTemplate that"),
    ],
)
def test_a_wrong_class_is_refused(document, sentence):
    with pytest.raises(ManifestError, match=r".") as caught:
        parse_class(document)
    assert sentence in str(caught.value)
