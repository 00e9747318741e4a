"""Makes the reference page, docs/reference.md, from the types and their descriptions."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest.checks.rules import RULES
from dovetail.manifest.checks.unexecuted import UNEXECUTED
from dovetail.manifest.describe.explain import alias, default_of, summary
from dovetail.manifest.type_descriptions import expected, model_in, options, short_type
from dovetail.manifest.types import API_VERSION, KIND, RLHFJob


def reference() -> str:
    """The page as Markdown. It has one section per object, in the order in which a manifest names them. Then come the
    rules and the fields that are not executed."""
    models = _models()
    lines = [
        f"# {KIND} reference",
        "",
        f"`apiVersion: {API_VERSION}`, `kind: {KIND}`. `hack/generate.py` writes this page. "
        "`dovetail explain RLHFJob.spec.ppo` shows the same in a terminal. "
        "The [glossary](glossary.md) explains the terms.",
        "",
    ]
    for path, model in models.items():
        lines += _section(path, model)
    lines += _rules()
    lines += ["## Accepted but not executed", ""]
    lines += ["A warning names each of these fields when it is set. All other fields of `spec` have an effect.", ""]
    lines += ["| field | instead | where |", "|---|---|---|"]
    for entry in UNEXECUTED:
        where = "single machine" if entry.on_cluster else "everywhere"
        lines.append(f"| `{entry.field}` | {_cell(entry.why)} | {where} |")
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


def _models() -> dict[str, type[BaseModel]]:
    """Every object with the first path that reaches it. The spec comes first, breadth first, then the status."""
    found: dict[str, type[BaseModel]] = {KIND: RLHFJob}
    queue = [(KIND, RLHFJob)]
    while queue:
        path, model = queue.pop(0)
        for name, field in model.model_fields.items():
            inner = model_in(field.annotation)
            if inner is not None and inner not in found.values():
                found[f"{path}.{alias(name, field)}"] = inner
                queue.append((f"{path}.{alias(name, field)}", inner))  # type: ignore[arg-type]
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
