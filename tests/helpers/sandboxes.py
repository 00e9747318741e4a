"""What agent-sandbox brings to a cluster."""

from __future__ import annotations

from typing import Any

import yaml
from devcluster import binaries

from dovetail.kube.resources import SANDBOX


def definition() -> dict[str, Any]:
    """As it is released, without the webhook that converts an older version."""
    folder = binaries.module_folder("agent-sandbox", "sigs.k8s.io/agent-sandbox")
    found: dict[str, Any] = yaml.safe_load((folder / f"k8s/crds/{SANDBOX.group}_{SANDBOX.plural}.yaml").read_text())
    found["spec"].pop("conversion", None)
    found["spec"]["versions"] = [each for each in found["spec"]["versions"] if each["storage"]]
    return found
