"""The RLHFJobClass resource: what an administrator gives to the pods of some jobs, and what these jobs may name. The
rules are here alone. The operator and `dovetail validate` ask `problems`, and both make pods by `patched`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dovetail.manifest.base import FIELD_PATTERN, Model, Name, ObjectMeta, ObjectName, Text
from dovetail.manifest.checks.rules.pod_rules import template_errors
from dovetail.manifest.documents import ManifestError, dotted
from dovetail.manifest.merge import MERGE_KEYS, merge
from dovetail.manifest.types import API_VERSION, API_VERSIONS, ApiVersion, Group, RLHFJob, RLHFJobSpec, Role

CLASS_KIND = "RLHFJobClass"
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
FieldName = Annotated[str, Field(max_length=253, pattern=FIELD_PATTERN)]


class ClassPods(Model):
    """What some of a job's pods get."""

    image: Text | None = Field(default=None, description="The image, where the job names none. Default: the chart's.")
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        description="Strategic merge patch of these pods. It is applied last, so no job can change what it says.",
    )


class AllowedNames(Model):
    """What a job of the class may name. What is not listed, it may not name."""

    fields: list[FieldName] = Field(
        default_factory=list,
        max_length=64,
        description="Fields of podTemplates that the job may set, each with all that is below it, such as "
        "spec.nodeSelector, spec.volumes.configMap or spec.containers.env.",
    )
    images: list[Text] = Field(
        default_factory=list,
        max_length=64,
        description="Images, with * for any text, such as registry.example.com/team-a/*.",
    )
    service_accounts: list[ObjectName] = Field(
        default_factory=list, max_length=64, description="ServiceAccounts of the job's namespace, for podTemplates."
    )
    secrets: list[ObjectName] = Field(
        default_factory=list,
        max_length=64,
        description="Secrets of the job's namespace. The job's author needs no right to read them, but code of the "
        "job can.",
    )


class RLHFJobClassSpec(Model):
    """What jobs of the class get, and what they may name."""

    namespaces: list[Name] = Field(
        default_factory=list, max_length=64, description="Namespaces whose jobs may name the class. Empty: all."
    )
    queue: Name | None = Field(
        default=None, description="Kueue's LocalQueue of jobs that have no label kueue.x-k8s.io/queue-name."
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        description="Strategic merge patch of every pod of the job. It is applied after the job's own podTemplates, so "
        "no job can change what it says.",
    )
    coordinator: ClassPods = Field(default_factory=ClassPods, description="What the coordinator's pod gets.")
    trainer: ClassPods = Field(default_factory=ClassPods, description="What pods of trainers get.")
    rollout: ClassPods = Field(
        default_factory=ClassPods,
        description="What pods of rollouts get. Pods with both roles get this image, and both podTemplates.",
    )
    allowed: AllowedNames = Field(default_factory=AllowedNames, description="What a job of the class may name.")


class RLHFJobClass(Model):
    """What an administrator gives to the pods of some jobs, and what these jobs may name. It belongs to no
    namespace."""

    api_version: ApiVersion = Field(description="The version of the API. Both have the same fields.")
    kind: Literal["RLHFJobClass"] = Field(description="RLHFJobClass")
    metadata: ObjectMeta = Field(description="Standard object metadata.")
    spec: RLHFJobClassSpec = Field(
        default_factory=RLHFJobClassSpec, description="What jobs of the class get, and what they may name."
    )

    @property
    def name(self) -> str:
        return self.metadata.name

    def image(self, group: Group | None) -> str | None:
        """The class's image for a group's pods. None stands for the coordinator."""
        pods = self.spec.coordinator if group is None else self._of_groups(group)[-1]
        return pods.image

    def patched(self, template: dict[str, Any], group: Group | None) -> dict[str, Any]:
        """A pod template with the class's parts, which come last. A group of None stands for the coordinator."""
        parts = [self.spec.coordinator] if group is None else self._of_groups(group)
        for patch in (self.spec.pod_template, *(part.pod_template for part in parts)):
            template = merge(template, patch)
        return template

    def _of_groups(self, group: Group) -> list[ClassPods]:
        roles = {Role.TRAINER: self.spec.trainer, Role.ROLLOUT: self.spec.rollout}
        return [pods for role, pods in roles.items() if role in group.roles]

    def given_to(self, spec: RLHFJobSpec) -> RLHFJobSpec:
        """The spec as its pods will be, for who plans them: with the class's images, and its podTemplates merged into
        those of the groups."""
        groups = [
            group.model_copy(
                update={
                    "image": group.image or self.image(group),
                    "pod_template": self.patched(group.pod_template, group),
                }
            )
            for group in spec.groups
        ]
        return spec.model_copy(update={"groups": groups})

    def told(self) -> str:
        """What the class gives, in words."""
        spec = self.spec
        parts = [f"queue {spec.queue}"] if spec.queue else []
        pods = {"coordinator": spec.coordinator, "trainer": spec.trainer, "rollout": spec.rollout}
        parts += [f"{name} image {each.image}" for name, each in pods.items() if each.image]
        templates = {"": spec.pod_template, **{f"{name} ": each.pod_template for name, each in pods.items()}}
        parts += [f"{name}pods' {field}" for name, template in templates.items() for field in _leaves(template)]
        return f"class {self.name}" + (f" ({', '.join(dict.fromkeys(parts))})" if parts else "")

    # ------------------------------------------------------------ what a job may name

    def problems(self, job: RLHFJob) -> list[str]:
        """One sentence for each thing that the class does not allow the job. [] if there is none."""
        return list(dict.fromkeys(self._problems(job)))

    def _problems(self, job: RLHFJob) -> Iterator[str]:
        allowed, where, spec = self.spec.allowed, job.metadata.namespace, job.spec
        if where is not None and self.spec.namespaces and where not in self.spec.namespaces:
            yield (
                f"spec.class is {self.name}, which is for jobs of other namespaces than {where}; name a class for this "
                "one, or ask the administrator to add it to the class's namespaces."
            )
        pods = {f"spec.groups[{index}]": (group.image, group.pod_template) for index, group in enumerate(spec.groups)}
        pods["spec.coordinator"] = spec.coordinator.image, spec.coordinator.pod_template
        for path, (image, template) in pods.items():
            if image is not None and not self._allows_image(image):
                yield self._refused(f"{path}.image", image, "images", allowed.images)
            yield from self._template_problems(template, f"{path}.podTemplate")
        for path, secret in _named_secrets(spec):
            if secret not in allowed.secrets:
                yield self._refused(path, secret, "secrets", allowed.secrets)

    def _template_problems(self, template: dict[str, Any], path: str) -> Iterator[str]:
        allowed = self.spec.allowed
        for field in _leaves(template):
            if not any(f"{field}.".startswith(f"{each}.") for each in allowed.fields):
                listed = ", ".join(allowed.fields) or "none"
                yield (
                    f"{path}.{field} is set, and class {self.name} lets jobs set other fields of podTemplates only "
                    f"({listed}); remove it, or ask the administrator to add it to the class's allowed.fields."
                )
        pod = template.get("spec")
        for key in ("serviceAccountName", "serviceAccount"):
            if isinstance(pod, dict) and (account := pod.get(key)) and account not in allowed.service_accounts:
                yield self._refused(f"{path}.spec.{key}", account, "serviceAccounts", allowed.service_accounts)
        for image in _images(pod):
            if not self._allows_image(image):
                yield self._refused(path, image, "images", allowed.images)
        for secret in _secrets(pod):
            if secret not in allowed.secrets:
                yield self._refused(path, secret, "secrets", allowed.secrets)

    def _allows_image(self, image: str) -> bool:
        return any(fnmatchcase(image, pattern) for pattern in self.spec.allowed.images)

    def _refused(self, path: str, name: Any, kind: str, names: list[str]) -> str:
        listed = ", ".join(names) or "none"
        return (
            f"{path} names {name}, which class {self.name} does not allow ({kind}: {listed}); name another, or ask the "
            f"administrator to add it to the class's allowed.{kind}."
        )


def _named_secrets(spec: RLHFJobSpec) -> Iterator[tuple[str, str]]:
    """The Secrets that fields of a job name, each with the field."""
    if (token := spec.hub.token_secret) is not None:
        yield "spec.hub.tokenSecret", token.name
    if spec.output is not None and spec.output.s3 is not None and (keys := spec.output.s3.credentials_secret):
        yield "spec.output.s3.credentialsSecret", keys
    for index, tracker in enumerate(spec.trackers):
        if tracker.secret is not None:
            yield f"spec.trackers[{index}].secret", tracker.secret


def _leaves(value: Any, path: str = "", key: str | None = None) -> Iterator[str]:
    """The paths of all that a patch sets. Items of lists share a path. `key` is left out, because an item is only
    found by it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name != key:
                yield from _leaves(inner, f"{path}.{name}" if path else str(name), MERGE_KEYS.get(name))
    elif isinstance(value, list) and value:
        for item in value:
            yield from _leaves(item, path, key)
    else:
        yield path


def _secrets(value: Any, key: str = "") -> Iterator[str]:
    """The Secrets that a part of a pod names, in any kind of volume and variable. Every field for one is called so."""
    if isinstance(value, list):
        for item in value:
            yield from _secrets(item, key)
    elif isinstance(value, Mapping):
        names = key in ("imagePullSecrets", "secret") or key.lower().endswith(("secretref", "secretkeyref"))
        if names and value.get("name"):
            yield str(value["name"])
        for name, inner in value.items():
            if name == "secretName" and inner:
                yield str(inner)
            yield from _secrets(inner, str(name))


def _images(pod: Any) -> Iterator[str]:
    """The images that a part of a pod names, of containers and of volumes."""
    pod = {key: value for key, value in pod.items() if isinstance(value, list)} if isinstance(pod, Mapping) else {}
    for name in _CONTAINERS:
        for container in pod.get(name, ()):
            if isinstance(container, Mapping) and container.get("image"):
                yield str(container["image"])
    for volume in pod.get("volumes", ()):
        image = volume.get("image") if isinstance(volume, Mapping) else None
        if isinstance(image, Mapping) and image.get("reference"):
            yield str(image["reference"])


def parse_class(document: Any) -> RLHFJobClass:
    """An RLHFJobClass from plain YAML or JSON data. Raises ManifestError."""
    if (
        not isinstance(document, dict)
        or document.get("apiVersion") not in API_VERSIONS
        or document.get("kind") != CLASS_KIND
    ):
        raise ManifestError([f"The class must be a mapping with apiVersion: {API_VERSION} and kind: {CLASS_KIND}."])
    known = {key: value for key, value in document.items() if key in ("apiVersion", "kind", "metadata", "spec")}
    try:
        found = RLHFJobClass.model_validate_json(
            json.dumps(known, default=str), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise ManifestError([f"{dotted(each['loc'])} of the class: {each['msg']}." for each in problems]) from error
    spec = found.spec
    templates = {"spec": spec.pod_template} | {
        f"spec.{name}": getattr(spec, name).pod_template for name in ("coordinator", "trainer", "rollout")
    }
    errors = [sentence for path, template in templates.items() for sentence in template_errors(template, path)]
    if errors:
        raise ManifestError(errors)
    return found
