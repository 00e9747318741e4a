"""The CRD's rules run without an API server, by CEL's own implementation in C++."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.types import RLHFJobSpec

_ENV = cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=[ext_strings.ExtStrings()])
_RESERVED = ("function", "in")
_FREE_FORM = ("config",)


def refused(rules: tuple[CelRule, ...], spec: RLHFJobSpec) -> list[str]:
    """What an API server says of a spec: `path|message` for each object that breaks a rule. An API server sees the
    defaults filled in, and no nulls."""
    data = _escaped(spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    return [
        f"{path}|{_message(rule, found)}"
        for rule in rules
        for path, found in _objects(data, rule.path)
        if not _run(rule.rule, found)
    ]


def _message(rule: CelRule, found: Any) -> str:
    schema = rule.schema()
    return str(_run(schema["messageExpression"], found)) if "messageExpression" in schema else schema["message"]


def _run(expression: str, found: Any) -> Any:
    result = _compiled(expression).eval(data={"self": found})
    assert result.type() != cel.Type.ERROR, (expression, result.value())
    return result.value()


@cache
def _compiled(expression: str) -> Any:
    return _ENV.compile(expression)


def _escaped(data: Any) -> Any:
    """Fields whose names are reserved words in CEL, as Kubernetes writes them there."""
    if isinstance(data, list):
        return [_escaped(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        (f"__{key}__" if key in _RESERVED else key): {} if key in _FREE_FORM else _escaped(value)
        for key, value in data.items()
    }


def _objects(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    found = [("spec", data)]
    for step in path.split(".")[1:]:
        name = step.removesuffix("[]")
        found = [(f"{where}.{name}", value[name]) for where, value in found if name in value]
        if step.endswith("[]"):
            found = [(f"{where}[{i}]", item) for where, items in found for i, item in enumerate(items)]
    yield from found
