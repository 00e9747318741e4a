"""Rules about pod templates, of groups and of the coordinator. The API server sees only the parts of a template that
`dovetail.manifest.describe.crd` lists."""

from __future__ import annotations

from typing import Any

from dovetail.manifest.checks.cel import as_seen
from dovetail.manifest.checks.pod_templates import (
    MOUNTS,
    PARENTS,
    VARIABLES,
    VOLUMES,
    merge_problem,
    template_problem,
)
from dovetail.manifest.checks.rules.rule import FoundObject, Rule
from dovetail.manifest.fixed_names import CONTAINER
from dovetail.manifest.types import Coordinator, Group

Pods = Group | Coordinator
_AT = ("spec.groups[]", "spec.coordinator")
_SPEC = "self.podTemplate.spec"
# The API server also tries the rules on {}, the default of `coordinator`.
_NOTHING = f"!has(self.podTemplate) || !has({_SPEC})"
_OWN = f"has(c.name) && c.name == '{CONTAINER}'"


def _listed(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _of_container(field: str, key: str, wrong: str) -> str:
    """The rule that no item of a list in Dovetail's container is `wrong`. (To name the first such item would cost the
    API server too much.)"""
    return (
        f"{_NOTHING} || !has({_SPEC}.containers) || !{_SPEC}.containers.exists(c, {_OWN} && has(c.{field}) "
        f"&& c.{field}.exists(i, has(i.{key}) && {wrong}))"
    )


_below = " || ".join(f"i.mountPath.startsWith('{own}/')" for own in MOUNTS)
_ENV = _of_container("env", "name", f"i.name in {_listed(VARIABLES)}")
_MOUNT = _of_container("volumeMounts", "mountPath", f"(i.mountPath in {_listed((*MOUNTS, *PARENTS))} || {_below})")
_VOLUME = f"has(v.name) && (v.name in {_listed(VOLUMES)} || v.name.matches('^claim-[0-9]+$'))"

POD_RULES = (
    Rule(
        _AT,
        _ENV,
        f"{{path}}.podTemplate gives the container {CONTAINER} a variable that Dovetail sets ({', '.join(VARIABLES)}); "
        "remove it.",
    ),
    Rule(
        _AT,
        _MOUNT,
        f"{{path}}.podTemplate mounts a volume over folders of Dovetail ({', '.join(MOUNTS)}); choose another path.",
    ),
    Rule(
        _AT,
        f"{_NOTHING} || !has({_SPEC}.volumes) || !{_SPEC}.volumes.exists(v, {_VOLUME})",
        "{path}.podTemplate has a volume {first}, which is the name of a volume of Dovetail; choose another.",
        {"first": (f"{_SPEC}.volumes.filter(v, {_VOLUME})[0].name",)},
    ),
    Rule(
        _AT,
        f"{_NOTHING} || !has({_SPEC}.restartPolicy) || {_SPEC}.restartPolicy == 'Never'",
        "{path}.podTemplate.spec.restartPolicy must be Never, because the pod's Job replaces it; remove the field.",
    ),
    Rule(
        _AT,
        lambda pods: not merge_problem(pods.pod_template),
        "{path} has a podTemplate that cannot be applied: {problem}.",
        {"problem": lambda pods: merge_problem(pods.pod_template)},
        by_type=True,  # for the lists that describe/crd.py knows
    ),
    Rule(
        _AT,
        lambda pods: bool(merge_problem(pods.pod_template)) or not template_problem(pods.pod_template),
        "{path} has a podTemplate that would break its pod: {problem}.",
        {"problem": lambda pods: template_problem(pods.pod_template)},
    ),
)


def template_errors(template: dict[str, Any], path: str) -> list[str]:
    """The errors of a pod template that is not in a manifest. `path` is the object that has the podTemplate."""
    pods = Coordinator(pod_template=template)
    found = FoundObject(path, pods, as_seen(pods))
    return [sentence for rule in POD_RULES if (sentence := rule.told(found)) is not None]
