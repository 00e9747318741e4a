"""Makes the reference page, docs/reference.md, from the types and their descriptions."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest.checks.rules import RULES
from dovetail.manifest.describe.explain import alias, default_of, summary
from dovetail.manifest.field_policy import OnCluster, parts
from dovetail.manifest.job_class import CLASS_KIND, RLHFJobClass
from dovetail.manifest.type_descriptions import expected, fields_below, model_in, options, short_type
from dovetail.manifest.types import API_VERSION, KIND, RLHFJob, RLHFJobSpec


def reference() -> str:
    """The page as Markdown. It has one section per object, in the order in which a manifest names them. Then come the
    rules and the fields that are not executed."""
    lines = [
        f"# {KIND} reference",
        "",
        f"`apiVersion: {API_VERSION}`, `kind: {KIND}`. `hack/generate.py` writes this page. "
        "`dovetail explain RLHFJob.spec.ppo` shows the same in a terminal. "
        "The [glossary](glossary.md) explains the terms.",
        "",
    ]
    models = _models(KIND, RLHFJob)
    models |= {p: model for p, model in _models(CLASS_KIND, RLHFJobClass).items() if model not in models.values()}
    for path, model in models.items():
        lines += _section(path, model)
    lines += _rules()
    lines += _changes()
    lines += _without_effect()
    return "\n".join(lines) + "\n"


def _rules() -> list[str]:
    """The table of rules, with the message for a manifest that breaks each."""
    lines = ["## Rules between fields", ""]
    lines += ["These rules bind several fields, so no single field's type says them. A manifest that breaks one is"]
    lines += ["answered with the sentence; `…` stands for a value of the manifest. Who answers:", ""]
    lines += ["- *API server*: it refuses the manifest, as `dovetail validate` does."]
    lines += ["- *API server, by type*: the same, but in words of its own."]
    lines += ["- *operator*: the API server cannot see the fields. It takes the manifest, and the operator sets the"]
    lines += ["  condition Planned to False with the sentence as its message.", ""]
    lines += ["| sentence | from |", "|---|---|"]
    for rule in RULES:
        source = "API server, by type" if rule.by_type else "API server" if isinstance(rule.holds, str) else "operator"
        lines.append(f"| {_cell(rule.shown())} | {source} |")
    return [*lines, ""]


def _changes() -> list[str]:
    """The table of fields that may change after the job has begun."""
    lines = ["## What may change", ""]
    lines += ["Other fields are fixed: of a run from its beginning, of a job on a cluster when it has a plan. Then"]
    lines += [
        "`replicas` of a trainer group may change while `suspend` is true, and `storage.retain` to Keep alone. Of"
    ]
    lines += ["`data` a resumed run may have the same files elsewhere. [Resume](resume.md#what-may-change) says when a"]
    lines += ["change counts.", ""]
    lines += ["| field | when a run is resumed | while a job on a cluster has a plan |", "|---|---|---|"]
    found: dict[tuple[bool, str], list[str]] = {}
    for path, when in parts(RLHFJobSpec, lambda policy: (policy.resumed, policy.planned)):
        found.setdefault(when, []).append(f"`{path}`")
    for planned, text in {"always": "yes", "suspended": "while `suspend` is true", "never": "no"}.items():
        lines.append(f"| {', '.join(found[True, planned])} | yes | {text} |")
    return [*lines, ""]


def _without_effect() -> list[str]:
    lines = ["## Accepted but not executed", ""]
    lines += ["A warning names each of these fields when it is set. All other fields of `spec` have an effect.", ""]
    lines += ["| field | instead | where |", "|---|---|---|"]
    found: dict[OnCluster, list[str]] = {}
    for path, field in fields_below(RLHFJobSpec, "spec."):
        for mark in field.metadata:
            if isinstance(mark, OnCluster):
                found.setdefault(mark, []).append(f"`{path}`")
    for mark, paths in found.items():
        lines.append(f"| {', '.join(paths)} | {_cell(mark.why)} | {mark.where} |")
    return lines


def _models(kind: str, root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every object of a kind, with the first path that reaches it. The spec comes first, breadth first, then the
    status."""
    found = {kind: root}
    queue = [(kind, root)]
    while queue:
        path, model = queue.pop(0)
        for name, field in model.model_fields.items():
            inner = model_in(field.annotation)
            if inner is not None and inner not in found.values():
                found[f"{path}.{alias(name, field)}"] = inner
                queue.append((f"{path}.{alias(name, field)}", inner))
    return found


def _section(path: str, model: type[BaseModel]) -> list[str]:
    lines = [f"## {model.__name__}", "", " ".join((model.__doc__ or "").split()), "", f"At `{path}`.", ""]
    lines += ["| field | type | default | description |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "**required**" if field.is_required() else ""
        if (value := default_of(field)) is not None:
            default = f"`{value}`"
        text = summary(field)
        if len(options(field.annotation)) > 1 and model_in(field.annotation) is None:
            text = f"{text} {expected(field)[0].upper()}{expected(field)[1:]}."
        lines.append(f"| `{alias(name, field)}` | {_type(field)} | {default} | {_cell(text)} |")
    return [*lines, ""]


def _type(field: FieldInfo) -> str:
    kind, inner = short_type(field), model_in(field.annotation)
    if inner is None:
        return _cell(kind)
    return _cell(kind.replace(inner.__name__, f"[{inner.__name__}](#{inner.__name__.lower()})"))


def _cell(text: str) -> str:
    """The text of a cell. `<name>` would be a tag and would not be shown."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
