"""Makes the chart's README. It is README.md.in with a table that is made from values.yaml and its `# --` comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def chart_readme(chart: Path) -> str:
    """The text of README.md for the chart in folder `chart`."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    source = (chart / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(source)
    lines = source.splitlines()
    root = yaml.compose(source, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    rows = [f"| `{name}` | `{_default(value)}` | {said} |" for name, value, said in _rows(root, defaults, lines)]
    text = (chart / "README.md.in").read_text(encoding="utf-8")
    return text.replace("{description}", about["description"]).replace("{values}", "\n".join(rows))


def _rows(node: yaml.MappingNode, values: dict[str, Any], lines: list[str], prefix: str = "") -> Iterator[Any]:
    for key, inner in node.value:
        name, value = f"{prefix}{key.value}", values[key.value]
        said = _comment(lines, key.start_mark.line)
        if said is None and isinstance(inner, yaml.MappingNode) and inner.value and not inner.flow_style:
            yield from _rows(inner, value, lines, f"{name}.")
        else:
            yield name, value, said or ""


def _comment(lines: list[str], line: int) -> str | None:
    """The comment right above a line, if it begins with `# --`."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().removeprefix("#").strip())
    text = " ".join(found)
    return text.removeprefix("--").strip().replace("|", "\\|") if text.startswith("--") else None


def _default(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")
