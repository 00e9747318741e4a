"""Rules in CEL (Common Expression Language), as the API server runs them, and the same rules run here.

The API server also tries a rule on the default of its object, before the fields inside have their own defaults. A rule
that reads fields with defaults, in an object that has a default itself, must therefore belong to `spec`, which has no
default. In the items of lists the API server fills in no defaults. `function` and `in` are reserved words in CEL, so
Kubernetes writes them `__function__` and `__in__`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings
from pydantic import BaseModel

_HOLE = re.compile(r"\{([^{}]*\bself\b[^{}]*)\}")
_RESERVED = ("function", "in")
# A scratch model's configuration, of which no rule in CEL may read anything.
_FREE_FORM = "config"


class CelRule(NamedTuple):
    """One rule of the CRD. `path` is the object that `self` stands for, with dots, below the root ("" is the root).
    `[]` enters the items of a list. `rule` is the expression, and `message` the sentence for the user. `{...self...}`
    in it is an expression, and the message shows its value. `field` is the path below `path` that the API server
    reports. If it is None, it reports `path` itself."""

    path: str
    rule: str
    message: str
    field: str | None = None

    def schema(self) -> dict[str, str]:
        """The entry of x-kubernetes-validations."""
        said = {"message": self.message}
        if _HOLE.search(self.message):  # format() is the one way to build a string whose cost the API server can bound
            said = {"messageExpression": formatted(self.message)}
        return {"rule": self.rule, **said} | ({"fieldPath": self.field} if self.field else {})


def formatted(text: str) -> str:
    """The expression for a text in which each `{...self...}` is replaced by its value."""
    plain = _HOLE.sub("%s", text.replace("%", "%%")).replace("'", "\\'")
    return f"'{plain}'.format([{', '.join(_HOLE.findall(text))}])"


class CelError(ValueError):
    """An expression has no value, for example because an object has another form than it expects."""


def evaluate(expression: str, value: Any) -> Any:
    """The value of an expression in which `self` is `value`, a part of `as_seen`. Raises CelError."""
    result = _compiled(expression).eval(data={"self": value})
    if result.type() == cel.Type.ERROR:
        raise CelError(f"{expression}: {result.value()}")
    return result.value()


def as_seen(value: BaseModel) -> Any:
    """An API object as the API server's rules see it: with all defaults (also in lists, where rules count as if the
    API server had filled them in), without nulls, and with the API server's names
    of fields whose names are reserved words."""
    return _escaped(value.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False))


def _escaped(data: Any) -> Any:
    if isinstance(data, list):
        return [_escaped(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        (f"__{key}__" if key in _RESERVED else key): {} if key == _FREE_FORM else _escaped(value)
        for key, value in data.items()
    }


@cache
def _environment() -> Any:
    return cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=[ext_strings.ExtStrings()])


@cache
def _compiled(expression: str) -> Any:
    return _environment().compile(expression)
