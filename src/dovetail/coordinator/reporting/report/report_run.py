"""The report's section about what was run: manifest, versions and learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import yaml

from dovetail.coordinator.reporting.page.manifest_facts import manifest_facts
from dovetail.coordinator.reporting.summary_rows import get
from dovetail.manifest.types import RLHFJob


def run_section(job: RLHFJob | None, summary: Mapping[str, Any]) -> str:
    """The section as HTML, or '' if nothing is known. Pure."""
    rows = [] if job is None else manifest_facts(job)
    versions = get(summary, "versions")
    if isinstance(versions, Mapping) and versions:
        rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    if not rows:
        return ""
    body = "".join(f'<tr><td>{escape(a)}</td><td class="text">{escape(b)}</td></tr>' for a, b in rows)
    whole = "" if job is None else f"<details><summary>The manifest</summary><pre>{escape(_yaml(job))}</pre></details>"
    return f"<h2>The run</h2><table><tbody>{body}</tbody></table>{whole}"


def _yaml(job: RLHFJob) -> str:
    """The manifest without the fields that have their defaults."""
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"status"})
    head = {"apiVersion": job.api_version, "kind": job.kind}
    return yaml.safe_dump(head | document, sort_keys=False, width=100)
