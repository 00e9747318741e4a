"""Who an object belongs to. Names and labels prove nothing: anybody may write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.manifest.describe.crd import GROUP
from dovetail.manifest.types import KIND


def controller(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    """The owner reference with `controller: true`, of which an object has one at most. Empty if there is none."""
    found = thing["metadata"].get("ownerReferences") or ()
    return next((owner for owner in found if owner.get("controller")), {})


def controlled_by(thing: Mapping[str, Any], uid: str) -> bool:
    """Whether the RLHFJob with this uid controls the object."""
    owner = controller(thing)
    return owner.get("uid") == uid and _is_job(owner)


def left_by(thing: Mapping[str, Any], job: str, uid: str) -> bool:
    """Whether an earlier RLHFJob of this name controls the object. The garbage collector will delete it."""
    owner = controller(thing)
    return owner.get("uid") != uid and owner.get("name") == job and _is_job(owner)


def _is_job(owner: Mapping[str, Any]) -> bool:
    return owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
