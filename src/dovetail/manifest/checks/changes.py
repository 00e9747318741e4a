"""Says which fields of a manifest may change when its run is resumed. The functions are pure."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from dovetail.manifest.reward import reward_clip
from dovetail.manifest.types import RLHFJobSpec

# None of these alters what the run has done so far. Learning rates and numbers of iterations are kept for each step, so
# that a step that is run again (from a checkpoint) is run as it was. Other groups and another plan only add up
# gradients in another order: from the last checkpoint on, weights differ by rounding.
CHANGEABLE = (
    "managedBy",
    "suspend",
    "retry",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "failurePolicy",
    "checkpoint.everySteps",
    "checkpoint.keep",
    "storage",
    "output",
    "samples",
    "evaluation",
    "trackers",
    "coordinator",
    "hub",
    "groups",
    "plan",
    "models.reward.importPath",
    "models.reward.code",
    "models.reward.workers",
    "models.reward.timeoutSeconds",
    "sft.optimizer.learningRate",
    "reward.optimizer.learningRate",
    "dpo.optimizer.learningRate",
    "ppo.importPath",
    "ppo.timeoutSeconds",
    "ppo.iterations",
    "ppo.actorOptimizer.learningRate",
    "ppo.criticOptimizer.learningRate",
    "ppo.kl.coef",
    "ppo.kl.target",
    "ppo.kl.horizon",
)
NOT_CHANGEABLE = "plan.zero3"
# Releases before `ppo.kl.in` wrote this value into job.json if the manifest had none.
EARLIER_REWARD_CLIP = 5.0
# The reasons why other fields may not change. The longest prefix of a field counts.
_NOT_EXTENDED = (
    "SFT, reward-model training and DPO cannot be extended (of the stages only ppo can, by spec.ppo.iterations)"
)
REASONS = {
    "": "steps since the last checkpoint are run again on resume and must give the same weights",
    "seed": "everything random in the run so far came from it",
    "stages": "each stage began from the result of the one before",
    "models": "the weights so far belong to these models",
    "data": "the records of each step were drawn from this data",
    "plan.zero3": "it says in which order gradients are added up",
    "sft": "the stage's steps and batches are counted in it",
    "reward": "the stage's steps and batches are counted in it",
    "dpo": "the stage's steps and batches are counted in it",
    **{f"{stage}.{length}": _NOT_EXTENDED for stage in ("sft", "reward", "dpo") for length in ("steps", "epochs")},
    "ppo.globalBatchSize": "stored batches have this size",
    "ppo.kl.coef": "with 0 no reference has scored the run's samples",
    "ppo.lag": "samples under way were drawn with the weights that it names",
    "generation": "samples under way were begun with it",
    "checkpoint.volume": "the run's files are there",
}


@dataclass(frozen=True)
class Change:
    """One changed field, such as spec.ppo.kl.coef, and its values as JSON. `inherited` says that the old value
    describes the behaviour of an earlier release, which this release no longer has."""

    field: str
    old: Any
    new: Any
    inherited: bool = False

    @property
    def allowed(self) -> bool:
        """Whether a run may go on with the new value."""
        if self.inherited:
            return True
        if self.field == "spec.ppo.kl.coef" and not self.old:
            return False
        name = self.field.removeprefix("spec.")
        if name == NOT_CHANGEABLE:
            return False
        if any(name == field or name.startswith((field + ".", field + "[")) for field in CHANGEABLE):
            return True
        return name.startswith("data.") and self._same_data(name)

    def _same_data(self, name: str) -> bool:
        """Whether the data set may be the same although it is in another folder, or has another name for its commit.
        Its fingerprint shows whether it is the same."""
        if name.endswith(".revision"):
            return True
        return (
            name.endswith((".path", ".pvc"))
            and bool(self.old and self.new)
            and PurePath(self.old).name == PurePath(self.new).name
        )

    @property
    def sentence(self) -> str:
        """A sentence that says why the change is not allowed, and what is allowed."""
        name = self.field.removeprefix("spec.")
        prefix = max((p for p in REASONS if not p or name == p or name.startswith((p + ".", p + "["))), key=len)
        return (
            f"{self.field} may not change from {_short(self.old)} to {_short(self.new)} in a run: {REASONS[prefix]}; "
            f"undo the change, or start a new run in another --run-dir (may change: {', '.join(CHANGEABLE)})"
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
