"""A chart of another version, to upgrade from and to roll back to."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from helpers.chart_tools import CHART
from helpers.rlhfjobs import NAME


def earlier_chart(folder: Path) -> Path:
    """The chart of an earlier version: its definition of RLHFJobs lacks the field `retry`."""
    chart = folder / "dovetail"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "0.0.9", "appVersion": "0.0.9"}))
    path = chart / "files/crds/rlhfjobs.dovetail.dev.yaml"
    crd = yaml.safe_load(path.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["retry"]
    spec["x-kubernetes-validations"] = [r for r in spec["x-kubernetes-validations"] if "retry" not in r["rule"]]
    # The template puts its labels below the name.
    path.write_text(
        yaml.safe_dump(crd).replace(f"  name: {NAME}\n", "").replace("metadata:\n", f"metadata:\n  name: {NAME}\n", 1)
    )
    return chart
