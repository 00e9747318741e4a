"""The stored form of a training schedule, which is one string of letters for each trainer rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.manifest.checks.batching import micro_batch_tokens
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.protocol.messages import Action, Kind, Step
from dovetail.protocol.plan import Plan

LETTERS: dict[str, tuple[str, Kind]] = {
    **{kind: ("actor", kind) for kind in ("F", "B", "I", "W")},
    **{kind.lower(): ("critic", kind) for kind in ("F", "B", "I", "W")},
    **{chr(ord(kind) + 1): ("reward", kind) for kind in ("F", "B", "I", "W")},
}


def trained_layouts(plan: Plan, stage: Stage = Stage.PPO) -> dict[str, Parallelism]:
    """The plan's layouts of the models that the stage trains. These are actor and critic in PPO, and one model in other
    stages."""
    names = ("actor", "critic") if stage is Stage.PPO else (stage.model,)
    return {name: plan.parallelism[name] for name in names if name in plan.parallelism}


def applies(spec: RLHFJobSpec, plan: Plan, stage: Stage = Stage.PPO) -> bool:
    """Whether the stage has a schedule to choose. That needs a model with pipeline stages, or two models with ranks of
    their own, and a fixed number of micro-batches."""
    if stage not in spec.stages or micro_batch_tokens(spec, stage) is not None:
        return False
    pipelined = max(layout.pp for layout in trained_layouts(plan, stage).values()) > 1
    if stage is not Stage.PPO:
        return pipelined and spec.plan.intra_stage_fusion != "Serial"
    return pipelined or plan.schedule == "Dedicated"


@dataclass(frozen=True)
class StoredSchedule:
    """A schedule that the store keeps. `encoded` has one string for each trainer rank, with one letter for each action.
    F, B, I and W are the actor's kinds of action (`Kind`), f, b, i and w are the critic's, and G, C, J and X the reward
    model's. A number after the letter is the chunk. Without a number it is the first chunk. The micro-batches of each
    letter and chunk ascend."""

    family: str
    mini_batches: int
    encoded: list[str]

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> StoredSchedule:
        """The schedule from the output of `as_json`."""
        return StoredSchedule(str(stored["family"]), int(stored["mini_batches"]), list(stored["words"]))

    def as_json(self) -> dict[str, object]:
        return {"family": self.family, "mini_batches": self.mini_batches, "words": self.encoded}

    def actions(self) -> list[list[Action]]:
        """The actions of each rank."""
        return [_decode(letters) for letters in self.encoded]


def _decode(letters: str) -> list[Action]:
    count: Counter[str] = Counter()
    actions = []
    for code in re.findall(r"[A-Za-z]\d*", letters):
        model, kind = LETTERS[code[0]]
        actions.append(Action(model=model, micro_batch=count[code], kind=kind, chunk=int(code[1:] or 0)))
        count[code] += 1
    return actions


def encode(lists: Sequence[Sequence[Action]]) -> list[str]:
    """One string for each rank's list. The micro-batches of each kind of action must ascend."""
    code = {key: letter for letter, key in LETTERS.items()}
    return ["".join(code[a.model, a.kind] + (str(a.chunk) if a.chunk else "") for a in mine) for mine in lists]


def scheduled(step: Step, chosen: Mapping[str, Any] | None, world: int) -> Step:
    """The step with the stored schedule `chosen`. If that is None, the step keeps the serial schedule. Raises
    ValueError if the schedule is for another number of trainer ranks than `world`."""
    if chosen is None:
        return step
    schedule = StoredSchedule.from_json(chosen)
    if len(schedule.encoded) != world:
        raise ValueError(f"the stored schedule is for {len(schedule.encoded)} trainer ranks, there are {world}")
    return step.model_copy(update={"actions": schedule.actions(), "mini_batches": schedule.mini_batches})
