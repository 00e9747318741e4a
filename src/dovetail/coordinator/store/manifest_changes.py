"""Handles runs that are resumed with a changed manifest. It records what changed, and after which step. It also gives
each step its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.store.store import KeyValues
from dovetail.manifest.checks.changes import changes
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import Step
from dovetail.protocol.plan import Plan

SPEC, CHANGES = "run/spec", "run/changes"
# The trainers' part of the plan, and the field of its changes.
TRAINERS, RANKS = "run/trainers", "trainer ranks"


class ChangeError(Exception):
    """The run does not allow this change. The message is one sentence that names the field."""


@dataclass(frozen=True)
class RunPosition:
    """The run's current stage, and its last settled step. A step is settled when its batch and facts are stored."""

    stage: Stage
    step: int


def position(stages: list[Stage], records: KeyValues) -> RunPosition:
    """The run's position."""
    for stage in stages:
        if stage is not Stage.PPO and not records.get(f"{stage.value}/done"):
            return RunPosition(stage, int(records.get(f"{stage.value}/step") or 0))
    if Stage.PPO not in stages:
        return RunPosition(stages[-1], int(records.get(f"{stages[-1].value}/step") or 0))
    step = int((records.get("ppo/progress") or {"step": 0})["step"])
    return RunPosition(Stage.PPO, step + 1 if records.get(f"ppo/{step + 1}/facts") is not None else step)


def check(spec: RLHFJobSpec, records: KeyValues) -> None:
    """Check that the run with these `records` can continue with `spec`. Raises ChangeError if it cannot."""
    found = _found(spec, records)
    for change in found:
        if not change.allowed:
            raise ChangeError(change.sentence)
    done = int((records.get("ppo/progress") or {"step": 0})["step"])
    # A user's own loop (the Python API) may run more iterations than the manifest says.
    if spec.ppo.iterations < done and any(change.field == "spec.ppo.iterations" for change in found):
        raise ChangeError(
            f"spec.ppo.iterations is {spec.ppo.iterations}, but the run has done {done}; set it to {done} or more"
        )


def remember(spec: dict[str, Any], records: KeyValues) -> None:
    """Store the run's spec so far (a JSON document), if an earlier release began the run and did not store it."""
    if records.get(SPEC) is None:
        records.put_all({SPEC: spec})


def adopt(spec: RLHFJobSpec, records: KeyValues, log: Callable[..., None], *, guarded: bool = False) -> None:
    """Use `spec` from now on, and record what changed since the run's last manifest. Raises ChangeError for a change
    that is not allowed, unless `guarded` is true. It is true on a cluster, where the API server checks changes, and the
    defaults of a new release may differ, which is no reason to end a job."""
    if not guarded:
        check(spec, records)
    found = _found(spec, records)
    values: dict[str, object] = {SPEC: spec.model_dump(mode="json", by_alias=True)}
    if found:
        here = position(spec.stages, records)
        now = [
            {"stage": here.stage.value, "step": here.step, "field": c.field, "old": c.old, "new": c.new} for c in found
        ]
        for entry in now:
            log("run.changed", **entry)
        values[CHANGES] = [*(records.get(CHANGES) or []), *({**entry, "time": time.time()} for entry in now)]
        progress = records.get("ppo/progress")
        if progress is not None and any(c.field == "spec.ppo.kl.coef" for c in found):
            values["ppo/progress"] = {**progress, "kl_coef": spec.ppo.kl.coef}
    records.put_all(values)


def reshard(spec: RLHFJobSpec, plan: Plan, records: KeyValues, log: Callable[..., None]) -> None:
    """Take the trainers of `plan` from now on. If the run had others, whose steps since the last checkpoint are run
    again by these: forget the schedules that were cut for the others, and record from which step on bits differ."""
    now = plan.model_dump(mode="json", include={"parallelism", "schedule", "chunks"})
    now["text"] = ranks_text(plan)
    before = records.get(TRAINERS)
    values: dict[str, object] = {TRAINERS: now}
    if before is not None and before != now:
        here = position(spec.stages, records)
        step = int((records.get(f"checkpoint/{here.stage.value}") or {"step": 0})["step"])
        # The results of the steps up to `settled` are those of the earlier ranks.
        entry = {"stage": here.stage.value, "step": step, "settled": here.step, "field": RANKS}
        entry |= {"old": before["text"], "new": ranks_text(plan)}
        log("trainers.changed", **{name: entry[name] for name in ("stage", "step", "old", "new")})
        values[CHANGES] = [*(records.get(CHANGES) or []), {**entry, "time": time.time()}]
        values |= {f"{each.value}/{what}": None for each in Stage for what in ("placement", "schedules")}
        for key, facts in records.items("ppo").items():
            if key.endswith("/facts"):
                values[key] = {**facts, "schedule": None}
    records.put_all(values)


def ranks_text(plan: Plan) -> str:
    """The trainer ranks for people, such as "2 (actor: pp 1, dp 2, tp 1)"."""
    layouts = (
        f"{name}: pp {at.pp}, dp {at.dp}, tp {at.tp}"
        + "".join(f", {degree} {count}" for degree, count in (("cp", at.cp), ("ep", at.ep)) if count > 1)
        for name, at in plan.parallelism.items()
    )
    return f"{plan.world_size} ({'; '.join(layouts)})"


def _found(spec: RLHFJobSpec, records: KeyValues) -> list[Any]:
    old = records.get(SPEC)
    return [] if old is None else changes(old, spec)


class Settled:
    """The settings of each step. A step that is run again has the settings of its first run."""

    def __init__(self, spec: RLHFJobSpec, records: KeyValues) -> None:
        self._spec = spec
        self._changes = list(records.get(CHANGES) or [])

    def at(self, field: str, stage: Stage, step: int, current: Any) -> Any:
        """The value that a field had when this step of the stage was first run. `current` is its value now."""
        mine = [c for c in self._changes if c["field"] == field]
        order = [s.value for s in self._spec.stages]
        value = mine[0]["old"] if mine else current
        for change in mine:
            if (order.index(change["stage"]), change["step"]) < (order.index(stage.value), step):
                value = change["new"]
        return value

    def settle(self, command: Step) -> Step:
        """The command, with its own learning rates and number of steps if the run has changed these."""
        spec, changed = self._spec, {c["field"] for c in self._changes}
        optimizers: dict[Stage, dict[str, tuple[str, Optimizer]]] = {
            Stage.SFT: {"actor": ("spec.sft.optimizer", spec.sft.optimizer)},
            Stage.REWARD: {"reward": ("spec.reward.optimizer", spec.reward.optimizer)},
            Stage.DPO: {"actor": ("spec.dpo.optimizer", spec.dpo.optimizer)},
            Stage.PPO: {
                "actor": ("spec.ppo.actorOptimizer", spec.ppo.actor_optimizer),
                "critic": ("spec.ppo.criticOptimizer", spec.ppo.critic_optimizer),
            },
        }
        rates = {
            model: float(self.at(name, command.stage, command.step, optimizer.learning_rate))
            for model, (field, optimizer) in optimizers[command.stage].items()
            if (name := f"{field}.learningRate") in changed
        }
        update: dict[str, Any] = {"learning_rates": rates} if rates else {}
        iterations = "spec.ppo.iterations"
        if command.stage is Stage.PPO and iterations in changed:
            ppo = spec.ppo
            each = ppo.steps_per_iteration
            update["total_steps"] = each * int(self.at(iterations, Stage.PPO, command.step, ppo.iterations))
            update["warmup_total"] = each * int(self.at(iterations, Stage.PPO, 1, ppo.iterations))
        return command.model_copy(update=update) if update else command
