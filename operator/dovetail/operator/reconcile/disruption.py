"""Pods that the cluster ended: by a drain, a taint, the end of their node, pressure on it, or a preemption. A kubelet
may also refuse a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import POD
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Object, condition, is_disrupted, label
from dovetail.operator.reconcile.queueing import LONGEST_MESSAGE

Slot = tuple[str, str]  # a pod's Job, and its index there
CORDON = ("f:spec", "f:unschedulable")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


@dataclass(frozen=True)
class Taking:
    """One thing that takes the pods of a node. `told` has words that follow the node's name. `taint` is a taint that
    spares the pods that tolerate it. None if it takes all pods."""

    told: str
    taint: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Disruption:
    """A pod that the cluster ended. `reason` is that of the pod's condition DisruptionTarget, such as
    EvictionByEvictionAPI, or that of the kubelet that refused it. `source` says who takes the node, as words that
    follow its name. It is empty if nobody is known to. `at` is a Kubernetes timestamp. `tolerations` are the pod's."""

    pod: str
    slot: Slot
    group: str
    node: str
    reason: str
    message: str
    at: str
    tolerations: Sequence[Mapping[str, Any]] = ()
    source: str = ""

    def sentence(self) -> str:
        who = f"pod {self.pod}" + (f" of group {self.group}" if self.group else "")
        where = f"node {self.node}" + (f", which {self.source}" if self.source else "")
        return f"{who} left {where}: {self.message or self.reason}"


def disruption(thing: Object) -> Disruption | None:
    """What ended this object. None if it is no pod, if nothing did, or if it is a surplus rollout, which comes and
    goes."""
    if thing["kind"] != POD.kind or not is_disrupted(thing) or label(thing, names.SURPLUS_LABEL):
        return None
    told = condition(thing, "DisruptionTarget") or thing["status"]
    reason = str(told.get("reason"))
    return Disruption(
        pod=str(thing["metadata"]["name"]),
        slot=slot(thing),
        group=label(thing, names.GROUP_LABEL),
        node=str(thing.get("spec", {}).get("nodeName")),
        reason=reason if _WORD.fullmatch(reason) else reasons.EVICTED,
        # A kubelet says here which resource its node lacks.
        message=str(told.get("message") or "").strip()[: LONGEST_MESSAGE // 4],
        at=str(told.get("lastTransitionTime") or thing["metadata"].get("creationTimestamp") or ""),
        tolerations=lasting(thing),
    )


def slot(pod: Object) -> Slot:
    """The pod's place. The pod that replaces it has the same one."""
    return label(pod, names.JOB_NAME_LABEL), label(pod, names.INDEX_ANNOTATION)


def lasting(pod: Object) -> list[dict[str, Any]]:
    """The pod's tolerations of taints with the effect NoExecute, apart from those that end."""
    found = (pod.get("spec") or {}).get("tolerations") or ()
    return [
        each
        for each in found
        if each.get("effect") in (None, "", "NoExecute") and each.get("tolerationSeconds") is None
    ]


def takings(node: Object, notices: frozenset[str]) -> tuple[Taking, ...]:
    """What takes the pods of a node. `notices` has the keys of taints that announce the end of a node."""
    spec = node.get("spec") or {}
    found = [Taking(f"was cordoned{_by(node)}")] if spec.get("unschedulable") else []
    for taint in spec.get("taints") or ():
        ends = taint.get("key") in notices
        if ends or taint.get("effect") == "NoExecute":
            told = f"has the taint {taint.get('key')}:{taint.get('effect')}"
            kept = {key: taint[key] for key in ("key", "value") if key in taint}
            found.append(Taking(told, None if ends else kept))
    return tuple(found)


def source(found: Sequence[Taking], tolerations: Sequence[Mapping[str, Any]] = ()) -> str:
    """Who takes a pod with these tolerations from its node, as words that follow the node's name. Empty if the pod may
    stay."""
    told = [each.told for each in found if each.taint is None or not _tolerated(each.taint, tolerations)]
    return " and ".join(told)[: LONGEST_MESSAGE // 4]


def _tolerated(taint: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """As Kubernetes matches them. A toleration without a key is for all taints."""
    for each in tolerations:
        exists = each.get("operator") == "Exists"
        same = (each.get("key") or taint.get("key")) == taint.get("key") and (bool(each.get("key")) or exists)
        if same and (exists or (each.get("value") or "") == (taint.get("value") or "")):
            return True
    return False


def _by(node: Object) -> str:
    """The program that cordoned the node, as the API server has recorded it."""
    for entry in node["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if CORDON[1] in (fields.get(CORDON[0]) or {}):
            return f" by {entry.get('manager')}"
    return ""
