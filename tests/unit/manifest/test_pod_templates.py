"""Pod templates of a manifest that would break the pod are refused with a sentence."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from dovetail.kube import names
from dovetail.manifest.checks import pod_templates
from dovetail.manifest.checks.rules import check
from dovetail.manifest.types import RLHFJobSpec
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.protocol.process import env
from helpers.plain import plain_spec


def _container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "dovetail", **fields}]}}


BROKEN = {
    "metadata and spec": {"containers": [{"name": "dovetail"}]},
    "would remove Dovetail's own": {"spec": {"containers": [{"$patch": "replace"}]}},
    "would remove the container": _container(**{"$patch": "delete"}),
    "spec would remove": {"spec": None},
    "restartPolicy must be Never": {"spec": {"restartPolicy": "OnFailure"}},
    "has a volume files": {"spec": {"volumes": [{"name": "files", "emptyDir": {}}]}},
    "has a volume claim-0": {"spec": {"volumes": [{"name": "claim-0", "emptyDir": {}}]}},
    "has a volume output": {"spec": {"volumes": [{"name": "output", "emptyDir": {}}]}},
    "mounts a volume over folders of Dovetail (": _container(
        volumeMounts=[{"name": "mine", "mountPath": "/var/dovetail-output"}]
    ),
    "volumes has tmp": {"spec": {"volumes": [{"name": "tmp", "$patch": "delete"}]}},
    "mounts a volume over folders of Dovetail (/var/dovetail": _container(
        volumeMounts=[{"name": "mine", "mountPath": "/var/dovetail/models"}]
    ),
    "mounts a volume over folders of Dovetail": _container(volumeMounts=[{"name": "mine", "mountPath": "/etc"}]),
    "volumeMounts has /tmp": _container(volumeMounts=[{"name": "mine", "mountPath": "/tmp"}]),
    "env would remove": _container(env=None),
    "a variable that Dovetail sets": _container(env=[{"name": "DOVETAIL_TOKEN", "value": "x"}]),
    "labels has dovetail.dev/job": {"metadata": {"labels": {"dovetail.dev/job": "other"}}},
    "the pod's own container": {"spec": {"initContainers": [{"name": "dovetail", "image": "x"}]}},
    "lacks name": {"spec": {"containers": [{"image": "x"}]}},
    "lacks ip": {"spec": {"hostAliases": [{"ip": {"a": "b"}, "hostnames": ["x"]}]}},
    "containers would remove": {"spec": {"containers": "none", "restartPolicy": "Never"}},
    "env would remove Dovetail's own; give a list": _container(env="none"),
}


def _told(template: dict[str, Any]) -> list[str]:
    """What is said of this template, of a group and of the coordinator."""
    document = plain_spec().model_dump(mode="json", by_alias=True)
    document["groups"][1]["podTemplate"] = document["coordinator"]["podTemplate"] = template
    return check(RLHFJobSpec.model_validate(document))


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_template_that_breaks_the_pod_is_refused(sentence: str) -> None:
    told = _told(BROKEN[sentence])
    assert [each.split(" ")[0].removesuffix(".spec.restartPolicy").removesuffix(".podTemplate") for each in told] == [
        "spec.groups[1]",
        "spec.coordinator",
    ]
    assert all(sentence in each for each in told)


def test_templates_that_people_write_are_accepted() -> None:
    template = yaml.safe_load("""
    metadata: {labels: {team: blue}, annotations: {a: b}}
    spec:
      tolerations: [{key: gpu, operator: Exists}]
      nodeSelector: null
      imagePullSecrets: [{name: registry}]
      restartPolicy: Never
      containers:
        - name: dovetail
          env: [{name: HF_ENDPOINT, value: "http://hub"}, {name: DOVETAIL_LOG, value: x}]
          envFrom: [{secretRef: {name: s}}]
          resources: {limits: {memory: 8Gi}}
          volumeMounts: [{name: data, mountPath: /data}, {name: big, mountPath: /tmp/big}]
        - {name: sidecar, image: x}
      volumes:
        - {name: data, persistentVolumeClaim: {claimName: data}}
        - {name: big, emptyDir: {}}
        - {name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}
    """)
    assert _told(template) == []


def test_the_names_are_those_that_pods_have() -> None:
    mounts = {value for name, value in vars(names).items() if name.endswith("_MOUNT")}
    assert mounts == set(pod_templates.MOUNTS)
    assert all(str(path) in pod_templates.PARENTS for mount in mounts for path in PurePosixPath(mount).parents)
    variables = {env.JOB, env.NAME, env.RUN_DIR, env.COORDINATOR, env.TOKEN, env.HOST, env.PORT, env.GROUP, env.INDEX}
    assert variables | {env.CONFIG_DIR} == set(pod_templates.VARIABLES)


# Of the chart's jobs.podTemplate, which no API server reads.
MISTAKES = {
    "jobs.podTemplate.spec.nodeselector is no field of Kubernetes; did you mean nodeSelector?": "nodeselector: {a: b}",
    "jobs.podTemplate.spec.image_pull_secrets is no field of Kubernetes; did you mean imagePullSecrets?": (
        "image_pull_secrets: [{name: x}]"
    ),
    "resources.limit is no field of Kubernetes; did you mean limits?": (
        "containers: [{name: dovetail, resources: {limit: {memory: 2Gi}}}]"
    ),
    "did you mean containers: [{name: dovetail, env: ...}]?": "env: [{name: A, value: b}]",
    "jobs.podTemplate.spec.tolerations is an object; it must be a list.": "tolerations: {key: gpu, operator: Exists}",
    "jobs.podTemplate.spec.nodeSelector.gpu is true; it must be text; put it in quotes.": "nodeSelector: {gpu: true}",
    "jobs.podTemplate.spec.containers[0].env[0].value is 1; it must be text": (
        "containers: [{name: dovetail, env: [{name: A, value: 1}]}]"
    ),
    "imagePullSecrets[0] is 'pull'; it must be an object.": "imagePullSecrets: [pull]",
    "terminationGracePeriodSeconds is '30s'; it must be a number.": "terminationGracePeriodSeconds: 30s",
    "containers[trainer] has no image; the container of Dovetail is called dovetail.": (
        "containers: [{name: trainer, resources: {limits: {memory: 2Gi}}}]"
    ),
    "mounts the volume cache, which it does not have": (
        "containers: [{name: dovetail, volumeMounts: [{name: cache, mountPath: /cache}]}]"
    ),
    "jobs.podTemplate has a volume files": "volumes: [{name: files, emptyDir: {}}]",
    "jobs.podTemplate gives the container dovetail a variable": (
        "containers: [{name: dovetail, env: [{name: DOVETAIL_JOB, value: x}]}]"
    ),
    "jobs has a podTemplate that would break its pod": "containers: [{name: dovetail, $patch: delete}]",
    "jobs has a podTemplate that cannot be applied": "volumes: [{emptyDir: {}}]",
    "is no YAML": "[",
}


def _settings(tmp_path: Path, spec: str) -> dict[str, Any]:
    (path := tmp_path / "pod-template.yaml").write_text(f"spec: {{{spec}}}\n")
    return OperatorSettings.read({"DOVETAIL_POD_TEMPLATE": str(path)}).pod_template


@pytest.mark.parametrize("sentence", MISTAKES)
def test_an_operator_with_a_wrong_template_says_so_and_ends(sentence: str, tmp_path: Path) -> None:
    """All jobs would have the mistake."""
    with pytest.raises(ValueError, match=f"^DOVETAIL_POD_TEMPLATE: .*{re.escape(sentence)}"):
        _settings(tmp_path, MISTAKES[sentence])


@pytest.mark.parametrize(
    "spec",
    [
        "aFieldOfALaterKubernetes: {a: b}, nodeSelector: {disk: fast}, imagePullSecrets: null",
        "containers: [{name: dovetail, resources: {limits: {memory: 2Gi, a/gpu: 1}}}, {name: x, $patch: delete}]",
        "volumes: [{name: tmp, emptyDir: {sizeLimit: 5e9}}, {name: a, csi: {driver: x, volumeAttributes: {b: c}}}]",
        "securityContext: {seLinuxOptions: {level: s0}, sysctls: [{name: a, value: '1'}]}, hostNetwork: false",
        "containers: [{name: dovetail, volumeMounts: [{name: tmp, mountPath: /home/me}], livenessProbe: {tcpSocket: "
        "{port: http}}, lifecycle: {postStart: {httpGet: {port: 80}}}}]",
    ],
)
def test_what_kubernetes_takes_is_taken(spec: str, tmp_path: Path) -> None:
    assert _settings(tmp_path, spec) == {"spec": yaml.safe_load(f"{{{spec}}}")}
