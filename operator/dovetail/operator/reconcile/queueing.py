"""Says why Kueue does not admit a job. It reads the job's Workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import JOBSET
from dovetail.operator.reconcile.children import Children, deleting, label

LONGEST_MESSAGE = 1500


def waiting(children: Children) -> str | None:
    """The uid of the JobSet that waits in a queue. None if none waits."""
    for jobset in children.of(JOBSET.kind):
        if jobset["spec"].get("suspend") and label(jobset, names.QUEUE_LABEL) and not deleting(jobset):
            return str(jobset["metadata"].get("uid"))
    return None


def why(workload: Mapping[str, Any]) -> str:
    """The reason why the Workload waits. It was evicted, its quota is used, its topology has no room, or a check is not
    over. Empty if the Workload does not say it."""
    status = workload.get("status") or {}
    held = {c.get("type"): c for c in status.get("conditions") or []}
    told = []
    if held.get("Evicted", {}).get("status") == "True":
        told.append(held["Evicted"].get("message"))
    if held.get("QuotaReserved", {}).get("status") == "False":
        told.append(held["QuotaReserved"].get("message"))
    for check in status.get("admissionChecks") or []:
        if check.get("state") != "Ready":
            told.append(f"admission check {check.get('name')}: {check.get('message') or check.get('state')}")
    return "; ".join(dict.fromkeys(str(each).strip() for each in told if each))[:LONGEST_MESSAGE]
