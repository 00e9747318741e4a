"""Reports figures, each beside its anchor of the same run. They are written as soon as they are found, so that a group
that fails keeps its first figures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure. `anchor` names the thing for which `beside` was measured, in the same unit. `note` says what else a
    reader must know."""

    name: str
    value: float
    unit: str
    anchor: str = ""
    beside: float | None = None
    note: str = ""


class Report:
    """The figures of one group, appended to a file of JSON lines. `device` has the figures of the group `device`, by
    name."""

    def __init__(self, path: Path, device: dict[str, float]) -> None:
        self._path, self.device = path, device

    def add(
        self, name: str, value: float, unit: str, anchor: str = "", beside: float | None = None, note: str = ""
    ) -> None:
        """Report a figure, with that of its anchor."""
        self._write({"figure": asdict(Figure(name, value, unit, anchor, beside, note))})

    def skip(self, name: str, why: str) -> None:
        """Report a figure that this machine cannot give, and `why`."""
        self._write({"skipped": {"name": name, "why": why}})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The figures and the skipped ones."""
    if not path.exists():
        return [], []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [x["figure"] for x in lines if "figure" in x], [x["skipped"] for x in lines if "skipped" in x]


def table(groups: dict[str, dict[str, Any]]) -> str:
    """The figures of all groups as text."""
    lines = [("figure", "value", "unit", "anchor", "its value", "ratio", "note")]
    for name, group in groups.items():
        lines.append((f"[{name}] {group['state']}, {group['seconds']:.0f} s", *("",) * 5, group.get("reason", "")))
        for each in group["figures"]:
            figure = Figure(**each)
            beside, ratio = "", ""
            if figure.beside is not None:
                beside, ratio = short(figure.beside), short(figure.value / figure.beside) if figure.beside else "-"
            lines.append((figure.name, short(figure.value), figure.unit, figure.anchor, beside, ratio, figure.note))
        lines += [(each["name"], "skipped", *("",) * 4, each["why"]) for each in group["skipped"]]
    return "\n".join(_aligned(lines))


def short(value: float) -> str:
    """The number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _aligned(lines: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(lines)
    # The heading of a group may be longer than its column.
    widths = [max(len(row[k]) for row in rows if not row[0].startswith("[")) for k in range(len(rows[0]) - 1)]
    made = []
    for row in rows:
        if row[0].startswith("["):
            made.append("  ".join(x for x in (row[0], row[-1]) if x))
        else:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            made.append("  ".join([*cells, row[-1]]).rstrip())
    return made
