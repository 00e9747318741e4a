"""Makes the CustomResourceDefinitions from the pydantic types and the rules. They have a structural schema, defaults,
CEL rules and columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from pydantic import BaseModel

from dovetail.manifest.base import NAME_PATTERN
from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.checks.immutable import TRANSITION_RULES
from dovetail.manifest.checks.name_rules import NAME_RULES
from dovetail.manifest.checks.rules import CEL_RULES
from dovetail.manifest.checks.rules.pod_rules import POD_RULES
from dovetail.manifest.job_class import CLASS_KIND, RLHFJobClassSpec
from dovetail.manifest.merge import DIRECTIVE
from dovetail.manifest.status import RLHFJobStatus
from dovetail.manifest.type_descriptions import model_in
from dovetail.manifest.types import API_VERSIONS, KIND, STORED_API_VERSION, RLHFJobSpec

GROUP, STORED_VERSION = STORED_API_VERSION.split("/")
PLURAL, CLASS_PLURAL = "rlhfjobs", "rlhfjobclasses"

# These bound what the types leave open, so that the cost of CEL rules is bounded.
MAX_STRING, MAX_ITEMS, MAX_PROPERTIES = 1024, 64, 256

Schema = dict[str, Any]

_COLUMNS = (
    ("State", "string", ".status.state", "Completed, Failed, Suspended, Running, Scheduled, Planned or Pending", 0),
    ("Stage", "string", ".status.stage", "Stage under way", 0),
    ("Iteration", "integer", ".status.iteration", "Finished iterations or steps of the stage", 0),
    ("Reward", "number", ".status.reward", "Mean score of the last iteration", 0),
    ("KL", "number", ".status.kl", "Mean KL from the reference, nats per sample", 1),
    ("Samples/s", "number", ".status.samplesPerSecond", "Throughput of the last iteration", 0),
    ("Evaluation", "number", ".status.evaluation.value", "Mean of the first metric of the last evaluation", 1),
    ("Running", "string", '.status.conditions[?(@.type=="Running")].status', "Whether all processes work", 1),
    ("Completed", "string", '.status.conditions[?(@.type=="Completed")].status', "Whether all stages are done", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Failed")].reason', "Why the job failed", 1),
    ("Waits for", "string", '.status.conditions[?(@.type=="Running")].message', "How many pods are ready, and why", 1),
    ("Suspended", "boolean", ".spec.suspend", "Whether the job may run", 1),
    ("Class", "string", ".spec.class", "The RLHFJobClass that the job names", 1),
    ("Age", "date", ".metadata.creationTimestamp", "Since the job was created", 0),
)
_CLASS_COLUMNS = (
    ("Namespaces", "string", ".spec.namespaces", "Whose jobs may name the class; empty: all", 0),
    ("Queue", "string", ".spec.queue", "The LocalQueue of jobs that name none", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Since the class was created", 0),
)


def crd() -> Schema:
    """The CustomResourceDefinition of RLHFJobs, as plain data."""
    root = _root("An RLHF training job: SFT, reward model and PPO from one manifest.", RLHFJobSpec)
    root["properties"]["status"] = object_schema(RLHFJobStatus)
    _add(root, ("spec.groups[]", "spec.coordinator"), (*NAME_RULES, *CEL_RULES, *TRANSITION_RULES))
    names = {"kind": KIND, "plural": PLURAL, "shortNames": ["rlhf"], "categories": ["all", "dovetail"]}
    more = {
        "subresources": {"status": {}},
        "selectableFields": [{"jsonPath": ".spec.suspend"}, {"jsonPath": ".status.stage"}],
        "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
    }
    return _definition("Namespaced", names, more, root)


def class_crd() -> Schema:
    """The CustomResourceDefinition of RLHFJobClasses, as plain data."""
    root = _root("What an administrator gives to the pods of some RLHFJobs, and what these may name.", RLHFJobClassSpec)
    places = ("spec", "spec.coordinator", "spec.trainer", "spec.rollout")
    _add(root, places, [each for rule in POD_RULES for each in replace(rule, at=places).cel_rules()])
    names = {"kind": CLASS_KIND, "plural": CLASS_PLURAL}
    columns = [_column(*column) for column in _CLASS_COLUMNS]
    return _definition("Cluster", names, {"additionalPrinterColumns": columns}, root)


def _root(description: str, spec: type[BaseModel]) -> Schema:
    name = {"type": "string", "maxLength": 63, "pattern": NAME_PATTERN}
    return {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": object_schema(spec),
        },
    }


def _add(root: Schema, templates: tuple[str, ...], rules: Iterable[CelRule]) -> None:
    """Add what the API server must know of the podTemplates at these places, and the rules."""
    for place in templates:
        _at(root, place)["properties"]["podTemplate"] |= _pod_template()
    for rule in rules:
        _at(root, rule.path).setdefault("x-kubernetes-validations", []).append(rule.schema())


def _definition(scope: str, names: Schema, more: Schema, root: Schema) -> Schema:
    kind = names["kind"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {**names, "listKind": f"{kind}List", "singular": kind.lower()},
            # All have one schema, so the API server converts an object by its apiVersion alone.
            "versions": [
                {
                    "name": each.removeprefix(f"{GROUP}/"),
                    "served": True,
                    "storage": each == STORED_API_VERSION,
                    **more,
                    "schema": {"openAPIV3Schema": root},
                }
                for each in reversed(API_VERSIONS)
            ],
        },
    }


def _column(name: str, kind: str, path: str, description: str, priority: int) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path, "description": description, "priority": priority}


def object_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of an API object, with nested objects in place."""
    raw = model.model_json_schema(by_alias=True)
    return _convert(_inline(raw, raw.get("$defs", {})), model)


def _inline(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    merged = dict(node)
    if reference := merged.pop("$ref", None):
        merged = {**definitions[reference.rpartition("/")[2]], **merged}
    return {key: _inline(value, definitions) for key, value in merged.items() if key not in ("$defs", "title")} | (
        {"properties": {k: _inline(v, definitions) for k, v in merged["properties"].items()}}
        if "properties" in merged
        else {}
    )


def _convert(node: Schema, model: type[BaseModel] | None) -> Schema:
    """Convert JSON Schema 2020-12 to a structural schema."""
    node = dict(node)
    branches = node.pop("anyOf", None)
    if branches is not None:
        rest = [branch for branch in branches if branch.get("type") != "null"]
        node = {**(rest[0] if len(rest) == 1 else _union(rest)), **node}
        # Without a default, null means absent. The API server prunes it, and CEL's has() relies on that.
        if len(rest) < len(branches) and node.get("default") is not None:
            node["nullable"] = True
    if node.get("default", ...) is None:
        del node["default"]
    if "properties" in node:
        node.pop("additionalProperties", None)
    node.pop("discriminator", None)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    for old, new in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if old in node:
            node[new], node[old] = node[old], True
    return _typed(node, model)


def _typed(node: Schema, model: type[BaseModel] | None) -> Schema:
    kind = node.get("type")
    if kind == "object" and "properties" in node:
        node["properties"] = _properties(node["properties"], model)
    elif kind == "object":
        node.pop("additionalProperties", None)
        node |= {"x-kubernetes-preserve-unknown-fields": True, "maxProperties": MAX_PROPERTIES}
    elif kind == "array":
        node["items"] = _without_defaults(_convert(node["items"], model))
        node.setdefault("maxItems", MAX_ITEMS)
    elif kind == "string" and "enum" not in node and "format" not in node:
        node.setdefault("maxLength", MAX_STRING)
    elif kind == "integer":
        node["format"] = "int64"
    return node


def _without_defaults(node: Schema) -> Schema:
    """The schema of a list's item. A program that compares a manifest with what is stored, such as Argo CD, compares
    lists as a whole. So the API server writes no defaults into them, and they are filled in when a manifest is read."""
    node = {key: value for key, value in node.items() if key != "default"}
    if "properties" in node:
        node["properties"] = {name: _without_defaults(inner) for name, inner in node["properties"].items()}
    return node


def _properties(properties: Schema, model: type[BaseModel] | None) -> Schema:
    """Convert each property. Give it the default that pydantic's schema leaves out because a factory makes it."""
    fields = {f.alias or n: f for n, f in model.model_fields.items()} if model else {}
    result = {}
    for name, value in properties.items():
        field = fields.get(name)
        if field is not None and field.default_factory is not None and "default" not in value:
            value = {**value, "default": _plain(field.get_default(call_default_factory=True, validated_data={}))}
        result[name] = _convert(value, model_in(field.annotation) if field else None)
    return result


def _plain(value: Any) -> Any:
    """The default of an object is {}. The defaults of its own fields fill it."""
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _union(branches: list[Schema]) -> Schema:
    """Convert a union. A structural schema has no unions of types except int-or-string. So the schema takes any value,
    and limits it by its kind. CEL rules can read int-or-string fields, and no other unions. Keywords only limit values
    of their own kind, so `minLength: 1, maxLength: 0` excludes every string."""
    alternatives = []
    whole = all(
        branch.get("type") == "integer" for branch in branches if "enum" not in branch and "const" not in branch
    )
    for branch in branches:
        if "enum" in branch or "const" in branch:
            alternatives.append({"enum": branch.get("enum") or [branch["const"]]})
        else:
            bounds: Schema = {key: branch[key] for key in ("minimum", "maximum") if key in branch}
            if "exclusiveMinimum" in branch:
                bounds |= {"minimum": branch["exclusiveMinimum"], "exclusiveMinimum": True}
            alternatives.append({**bounds, "minLength": 1, "maxLength": 0})
    kind = "x-kubernetes-int-or-string" if whole else "x-kubernetes-preserve-unknown-fields"
    return {kind: True, "anyOf": alternatives}


def _at(root: Schema, path: str) -> Schema:
    node = root
    for step in filter(None, path.split(".")):
        name, is_list = step.removesuffix("[]"), step.endswith("[]")
        node = node["properties"][name]
        if is_list:
            node = node["items"]
    return node


# What the API server must know of a podTemplate: the lists whose items have names, and the fields that the rules read.
# All other fields are open.


def _text(description: str, most: int = 253) -> Schema:
    return {"type": "string", "maxLength": most, "description": description}


def _open(description: str, **properties: Schema) -> Schema:
    opened = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}
    return opened | {"description": description}


def _list(description: str, most: int, key: str, **properties: Schema) -> Schema:
    """A list whose items are identified by `key`. An item may also be a directive."""
    items = _open(f"An item, with its {key}.", **properties)
    items["anyOf"] = [{"required": [key]}, {"required": [DIRECTIVE]}]
    return {"type": "array", "maxItems": most, "description": description, "items": items}


def _pod_template() -> Schema:
    """The `metadata` and `spec` of a strategic merge patch of a pod template, without the description."""
    env = _list("Environment variables.", 256, "name", name=_text("The variable's name."))
    mounts = _list(
        "Where volumes are mounted.",
        64,
        "mountPath",
        mountPath=_text("Path in the container.", 1024),
        name=_text("The volume's name."),
    )
    name = _text("The container's name.")
    spec = _open(
        "The pod's specification.",
        containers=_list("Containers; Dovetail's is `dovetail`.", 16, "name", name=name, env=env, volumeMounts=mounts),
        initContainers=_list("Containers that run before.", 16, "name", name=name, env=env),
        volumes=_list("Volumes.", 64, "name", name=_text("The volume's name.")),
        # null removes the operator's value
        imagePullSecrets=_list("Secrets for registries.", 16, "name", name=_text("The Secret's name."))
        | {"nullable": True},
        restartPolicy=_text("Never, or not given.", 32),
    )
    opened = _open("", spec=spec)
    del opened["description"]
    return opened
