"""Finds out who owns an object. Names and labels prove nothing, because anybody may write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.kube.names import (
    CONTROLLER_UID_LABEL,
    GROUP_LABEL,
    JOB_LABEL,
    ROLE_LABEL,
    UID_LABEL,
)
from dovetail.kube.resources import JOB, POD
from dovetail.manifest.describe.crd import GROUP
from dovetail.manifest.types import KIND


def controller(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    """The owner reference with `controller: true`. An object has at most one. Empty if there is none."""
    found = thing["metadata"].get("ownerReferences") or ()
    return next((owner for owner in found if owner.get("controller")), {})


def controlled_by(thing: Mapping[str, Any], uid: str) -> bool:
    """Whether the RLHFJob with this uid controls the object."""
    owner = controller(thing)
    return owner.get("uid") == uid and _is_job(owner)


def labelled_for(thing: Mapping[str, Any], uid: str) -> bool:
    """Whether no object controls this one and its labels name the RLHFJob with this uid. A claim that outlives its job
    has no other link to it. Anybody who may create claims in the namespace can write these labels, too."""
    return not controller(thing) and (thing["metadata"].get("labels") or {}).get(UID_LABEL) == uid


def kept_for(thing: Mapping[str, Any], job: str) -> bool:
    """Whether no object controls this one and its labels say that it was kept for a job with this name."""
    labels = thing["metadata"].get("labels") or {}
    return labels.get(JOB_LABEL) == job and UID_LABEL in labels and not controller(thing)


def left_by(thing: Mapping[str, Any], job: str, uid: str) -> bool:
    """Whether an earlier RLHFJob of this name controls the object, or pods of that job alone own it. The garbage
    collector will delete it."""
    owner, labels = controller(thing), thing["metadata"].get("labels") or {}
    if owner:
        return owner.get("uid") != uid and owner.get("name") == job and _is_job(owner)
    owners = thing["metadata"].get("ownerReferences") or ()
    of_pods = bool(owners) and all(each.get("kind") == POD.kind for each in owners)
    return of_pods and labels.get(JOB_LABEL) == job and labels.get(UID_LABEL) != uid


def pod_of(pod: Mapping[str, Any], job: str, uid: str) -> bool:
    """Whether the pod seems to belong to this RLHFJob. It must have the labels of such a pod, and the Job that owns it
    must have the name of one of the RLHFJob's Jobs. Kubernetes soon deletes a pod that forges all of this. If the uid
    of its owner is wrong, its owner does not exist. If the uid is right, the Job has one pod too many."""
    labels, owner = pod["metadata"].get("labels") or {}, controller(pod)
    group = labels.get(GROUP_LABEL) or labels.get(ROLE_LABEL) or ""
    return (
        labels.get(JOB_LABEL) == job
        and labels.get(UID_LABEL) == uid
        and (owner.get("apiVersion"), owner.get("kind")) == (JOB.api_version, JOB.kind)
        and re.fullmatch(rf"{re.escape(f'{job}-{group}')}-s?[0-9]+", str(owner.get("name"))) is not None
        and labels.get(CONTROLLER_UID_LABEL) == owner.get("uid")
    )


def _is_job(owner: Mapping[str, Any]) -> bool:
    return owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
