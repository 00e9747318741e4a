"""Training schedules as action lists, and the checker that every schedule must pass.

An action list says, for each trainer rank, in which order it runs forward (F) and backward (B) passes of the models'
micro-batches. Micro-batch indices are local to a data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.protocol.messages import Action
from dovetail.protocol.plan import Coordinates, coordinates, holds, rank_at


class ScheduleError(ValueError):
    """A schedule that would not run; the message says which rank and action."""


def one_f_one_b(model: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B of one pipeline stage (PipeDream-Flush, Narayanan et al. 2021, section 2.2).

    `stages - stage - 1` forwards to fill the pipeline, then one forward and one backward in turn, then the remaining
    backwards. At most `stages - stage` micro-batches' activations are alive."""
    warm_up = min(stages - stage - 1, micro_batches)
    forwards = [Action(model=model, micro_batch=i, kind="F") for i in range(micro_batches)]
    backwards = [Action(model=model, micro_batch=i, kind="B") for i in range(micro_batches)]
    steady = [a for pair in zip(forwards[warm_up:], backwards, strict=False) for a in pair]
    return forwards[:warm_up] + steady + backwards[micro_batches - warm_up :]


def serial_1f1b(
    layouts: Mapping[str, Parallelism], micro_batches: Mapping[str, int], order: Sequence[str], world: int | None = None
) -> list[list[Action]]:
    """Each model's 1F1B, one model after another in `order`; one action list per rank, of what that rank holds.

    `micro_batches[model]` is the number of one data-parallel rank. `world`: the number of ranks, which models with
    ranks of their own need. Raises ScheduleError when the models' layouts occupy different numbers of ranks without it,
    or a model has no micro-batch."""
    world = _world(layouts) if world is None else world
    for model in order:
        if micro_batches[model] < 1:
            raise ScheduleError(f"{model} has {micro_batches[model]} micro-batches; a schedule needs at least 1")
    result = []
    for rank in range(world):
        actions: list[Action] = []
        for model in order:
            layout = layouts[model]
            if holds(rank, layout):
                stage = coordinates(rank, layout).pp
                actions += one_f_one_b(model, stage, layout.pp, micro_batches[model])
        result.append(actions)
    return result


def validate_schedule(
    actions: Sequence[Sequence[Action]],
    layouts: Mapping[str, Parallelism],
    micro_batches: Mapping[str, int],
    receives_ahead: int | None = None,
) -> None:
    """Raise ScheduleError unless every rank runs every F and B of its stages once and the whole runs to its end.

    The run is simulated with the true dependencies: F after the previous stage's F, B after the own F and the next
    stage's B; ranks of a tensor-parallel group run each action together; ranks of a data-parallel group run a model's
    first F (gathering its weights) and last B (reducing its gradients) together.

    `receives_ahead` None: sends are buffered (dataflow semantics, Gloo). A number n: sends block until the receiver
    has posted the receive, which it does n actions ahead (rendezvous semantics, NCCL)."""
    world = _world(layouts)
    if len(actions) != world:
        raise ScheduleError(f"the schedule has {len(actions)} ranks, the layouts {world}")
    for rank, mine in enumerate(actions):
        _check_counts(rank, mine, micro_batches)
    _Simulation(actions, layouts, receives_ahead).run()


def _world(layouts: Mapping[str, Parallelism]) -> int:
    sizes = {model: world_size(layout) for model, layout in layouts.items()}
    if len(set(sizes.values())) != 1:
        raise ScheduleError(f"all models must occupy the same trainer ranks; these layouts occupy {sizes}")
    return next(iter(sizes.values()))


def _check_counts(rank: int, actions: Sequence[Action], micro_batches: Mapping[str, int]) -> None:
    wanted = {(m, i, k) for m, count in micro_batches.items() for i in range(count) for k in "FB"}
    seen: set[tuple[str, int, str]] = set()
    for action in actions:
        key = (action.model, action.micro_batch, action.kind)
        if key not in wanted:
            raise ScheduleError(f"rank {rank} runs {_name(action)}, which is not part of the step")
        if key in seen:
            raise ScheduleError(f"rank {rank} runs {_name(action)} twice")
        seen.add(key)
    if missing := sorted(wanted - seen):
        model, index, kind = missing[0]
        raise ScheduleError(f"rank {rank} never runs {kind} of {model}'s micro-batch {index}")


def _name(action: Action) -> str:
    return f"{action.kind} of {action.model}'s micro-batch {action.micro_batch}"


class _Simulation:
    """Advances ranks until all are at their end or none can move."""

    def __init__(
        self, actions: Sequence[Sequence[Action]], layouts: Mapping[str, Parallelism], receives_ahead: int | None
    ) -> None:
        self.actions, self.layouts, self.ahead = actions, layouts, receives_ahead
        self.position = [0] * len(actions)
        # True while a rank has computed its current action but its send is not yet taken.
        self.sending = [False] * len(actions)
        self.index: list[dict[tuple[str, int, str], int]] = [
            {(a.model, a.micro_batch, a.kind): i for i, a in enumerate(mine)} for mine in actions
        ]
        self.ends: list[dict[str, tuple[int, int]]] = []
        for mine in actions:
            places: dict[str, list[int]] = {}
            for i, a in enumerate(mine):
                places.setdefault(a.model, []).append(i)
            self.ends.append({model: (at[0], at[-1]) for model, at in places.items()})

    def run(self) -> None:
        todo = set(range(len(self.actions)))
        while todo:
            moved = [rank for rank in todo if self._advance(rank)]
            if not moved:
                rank = min(todo)
                raise ScheduleError(
                    f"the schedule deadlocks: rank {rank} waits at {_name(self.actions[rank][self.position[rank]])}, "
                    f"and {len(todo)} of {len(self.actions)} ranks never finish"
                )
            todo = {rank for rank in todo if self.position[rank] < len(self.actions[rank])}

    def _advance(self, rank: int) -> bool:
        """Move every rank that must act together with `rank`; False if one of them can't."""
        if self.position[rank] == len(self.actions[rank]):
            return False
        action = self.actions[rank][self.position[rank]]
        computes = not self.sending[rank]
        if computes:
            together = self._together(rank, action)
            if not all(self._ready(other, rank, action) for other in together):
                return False
            for other in together:
                self.sending[other] = True
        if self._taken(rank, action):
            self.sending[rank] = False
            self.position[rank] += 1
            return True
        return computes

    def _together(self, rank: int, action: Action) -> list[int]:
        """Ranks whose collectives this action takes part in, `rank` among them."""
        layout = self.layouts[action.model]
        place = coordinates(rank, layout)
        collective = self.position[rank] in self.ends[rank][action.model]
        dps = range(layout.dp) if collective else (place.dp,)
        return [rank_at(Coordinates(place.pp, dp, tp), layout) for dp in dps for tp in range(layout.tp)]

    def _ready(self, rank: int, leader: int, action: Action) -> bool:
        """Whether `rank` stands at its own counterpart of `leader`'s `action`, with its inputs there."""
        if self.sending[rank] or self.position[rank] == len(self.actions[rank]):
            return False
        mine = self.actions[rank][self.position[rank]]
        if (mine.model, mine.kind) != (action.model, action.kind):
            return False
        place = coordinates(rank, self.layouts[mine.model])
        same_data = place.dp == coordinates(leader, self.layouts[mine.model]).dp
        if same_data and mine.micro_batch != action.micro_batch:
            return False
        if mine.kind == "B" and not self._computed(rank, (mine.model, mine.micro_batch, "F")):
            return False
        source = self._neighbour(place, mine, -1 if mine.kind == "F" else 1)
        return source is None or self._computed(source, (mine.model, mine.micro_batch, mine.kind))

    def _neighbour(self, place: Coordinates, action: Action, step: int) -> int | None:
        layout = self.layouts[action.model]
        stage = place.pp + step
        return rank_at(place._replace(pp=stage), layout) if 0 <= stage < layout.pp else None

    def _computed(self, rank: int, key: tuple[str, int, str]) -> bool:
        at = self.index[rank][key]
        return at < self.position[rank] or (at == self.position[rank] and self.sending[rank])

    def _taken(self, rank: int, action: Action) -> bool:
        """Whether the send of `action`'s output, if any, no longer blocks."""
        if self.ahead is None:
            return True
        target = self._neighbour(coordinates(rank, self.layouts[action.model]), action, 1 if action.kind == "F" else -1)
        if target is None:
            return True
        at = self.index[target][action.model, action.micro_batch, action.kind]
        return at <= self.position[target] + self.ahead
