"""Finds what changed in a manifest since its run began, and says whether a resumed run may have the change: by the
policies of `dovetail.manifest.types`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from dovetail.manifest.field_policy import at_path, resumable
from dovetail.manifest.resolve import reward_clip
from dovetail.manifest.types import RLHFJobSpec

# Releases before `ppo.kl.in` wrote this value into job.json if the manifest had none.
EARLIER_REWARD_CLIP = 5.0


@dataclass(frozen=True)
class Change:
    """One changed field, such as spec.ppo.kl.coef, and its values as JSON. `inherited` says that the old value
    describes the behaviour of an earlier release, which this release no longer has."""

    field: str
    old: Any
    new: Any
    inherited: bool = False

    @property
    def _name(self) -> str:
        return self.field.removeprefix("spec.")

    @property
    def allowed(self) -> bool:
        """Whether a run may go on with the new value."""
        return self.inherited or at_path(RLHFJobSpec, self._name).allows(self.old) or self._same_data()

    def _same_data(self) -> bool:
        """Whether the data set may be the same although it is in another folder, or has another name for its commit.
        Its fingerprint shows whether it is the same."""
        if not self._name.startswith("data."):
            return False
        return self._name.endswith(".revision") or (
            self._name.endswith((".path", ".pvc"))
            and bool(self.old and self.new)
            and PurePath(self.old).name == PurePath(self.new).name
        )

    @property
    def sentence(self) -> str:
        """A sentence that says why the change is not allowed, and what is allowed."""
        return (
            f"{self.field} may not change from {_short(self.old)} to {_short(self.new)} in a run: "
            f"{at_path(RLHFJobSpec, self._name).why}; undo the change, or start a new run in another --run-dir "
            f"(may change: {', '.join(resumable(RLHFJobSpec))})"
        )


def changes(old: dict[str, Any], new: RLHFJobSpec) -> list[Change]:
    """The fields in which `new` differs from the spec `old` (a JSON document), sorted by name. Fields that were added
    in later releases count with their defaults."""
    old, inherited = _of_earlier_release(old, new)
    with contextlib.suppress(ValidationError):  # of another release: compare what it says
        old = RLHFJobSpec.model_validate(old).model_dump(mode="json", by_alias=True)
    found = _differences(old, new.model_dump(mode="json", by_alias=True), "spec")
    return [replace(change, inherited=change.field in inherited) for change in found]


def _of_earlier_release(old: dict[str, Any], new: RLHFJobSpec) -> tuple[dict[str, Any], set[str]]:
    """`old` with the fields of this release, and the names of the fields that `new` may change for that reason.

    A run that had `ppo.streaming` goes on without it. Releases before `ppo.kl.in` had the KL penalty in the reward with
    any estimator, and they wrote their defaults (k1 and 5.0) where this release writes Auto. Settings with the same
    meaning are no difference. Others are changes, and the run goes on with them, because this release no longer does
    what the earlier one did."""
    kl = old.get("ppo", {}).get("kl")
    if kl is None or "in" in kl:
        return old, {"spec.ppo.streaming"}
    old = copy.deepcopy(old)
    ppo, now = old["ppo"], new.ppo
    ppo["kl"]["in"] = now.kl.place if not now.kl_in_loss else "Reward"
    inherited = {"spec.ppo.streaming", "spec.ppo.kl.in", "spec.ppo.kl.estimator"}
    if ppo["kl"].get("estimator", "k1") == now.kl_estimator:
        ppo["kl"]["estimator"] = now.kl.estimator
    if now.reward_clip == "Auto" and ppo.get("rewardClip") == EARLIER_REWARD_CLIP:
        inherited.add("spec.ppo.rewardClip")
        if reward_clip(new) == EARLIER_REWARD_CLIP:
            ppo["rewardClip"] = "Auto"
    return old, inherited


def _differences(old: Any, new: Any, path: str) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}[{i}]")
    elif old != new:
        yield Change(path, old, new)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
