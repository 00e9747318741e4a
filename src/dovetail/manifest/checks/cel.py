"""Rules in CEL (Common Expression Language), as the API server runs them.

The API server also tries a rule on the default of its object, before the fields inside have their own defaults. A rule
that reads fields with defaults, in an object that has a default itself, must therefore belong to `spec`, which has no
default. `function` and `in` are reserved words in CEL, so Kubernetes writes them `__function__` and `__in__`."""

from __future__ import annotations

import re
from typing import NamedTuple

_HOLE = re.compile(r"\{([^{}]*\bself\b[^{}]*)\}")


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
        values = _HOLE.findall(self.message)
        said = {"message": self.message}
        if values:  # format() is the one way to build a string whose cost the API server can bound
            text = _HOLE.sub("%s", self.message.replace("%", "%%")).replace("'", "\\'")
            said = {"messageExpression": f"'{text}'.format([{', '.join(values)}])"}
        return {"rule": self.rule, **said} | ({"fieldPath": self.field} if self.field else {})
