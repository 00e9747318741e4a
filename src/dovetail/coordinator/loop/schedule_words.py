"""A chosen schedule as it is stored and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import Action, Kind, Step
from dovetail.protocol.plan import Plan

LETTERS: dict[str, tuple[str, Kind]] = {
    **{kind: ("actor", kind) for kind in ("F", "B", "I", "W")},
    **{kind.lower(): ("critic", kind) for kind in ("F", "B", "I", "W")},
}


def applies(spec: RLHFJobSpec, plan: Plan) -> bool:
    """Whether there is a schedule to choose: two models, at least one of them in a pipeline or to have ranks of its
    own."""
    if Stage.PPO not in spec.stages or not has_critic(spec):
        return False
    layouts = plan.parallelism
    return max(layouts["actor"].pp, layouts["critic"].pp) > 1 or plan.schedule == "Dedicated"


@dataclass(frozen=True)
class StoredSchedule:
    """A schedule as it is stored: one word a trainer rank, a letter an action: F, B, I, W of the actor, f, b, i, w of
    the critic, micro-batches of each in ascending order."""

    family: str
    mini_batches: int
    words: list[str]

    def as_json(self) -> dict[str, object]:
        return {"family": self.family, "mini_batches": self.mini_batches, "words": self.words}

    def actions(self) -> list[list[Action]]:
        """Every rank's list."""
        return [_read(word) for word in self.words]


def _read(word: str) -> list[Action]:
    count = dict.fromkeys(LETTERS, 0)
    actions = []
    for letter in word:
        model, kind = LETTERS[letter]
        actions.append(Action(model=model, micro_batch=count[letter], kind=kind))
        count[letter] += 1
    return actions


def write_words(lists: Sequence[Sequence[Action]]) -> list[str]:
    """The words of lists whose micro-batches ascend."""
    code = {key: letter for letter, key in LETTERS.items()}
    return ["".join(code[action.model, action.kind] for action in mine) for mine in lists]


def scheduled(step: Step, chosen: Mapping[str, Any] | None, world: int) -> Step:
    """The step with a stored schedule instead of the serial one; unchanged without."""
    if chosen is None:
        return step
    schedule = StoredSchedule(str(chosen["family"]), int(chosen["mini_batches"]), list(chosen["words"]))
    if len(schedule.words) != world:
        raise ValueError(f"the stored schedule is for {len(schedule.words)} trainer ranks, there are {world}")
    return step.model_copy(update={"actions": schedule.actions(), "mini_batches": schedule.mini_batches})
