"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `says`: what was found. `mend`: how to repair it. Both have no full stop. `figures`:
    numbers and names for programs, as JSON types. A problem keeps jobs from running on this machine. A warning makes
    them slower, or concerns only some jobs."""

    check: str
    state: State
    says: str
    mend: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def report(findings: Iterable[Finding]) -> dict[str, Any]:
    """The findings as JSON. `ok` is false if there is a problem."""
    listed = list(findings)
    return {"ok": all(f.state != "problem" for f in listed), "findings": [asdict(f) for f in listed]}
