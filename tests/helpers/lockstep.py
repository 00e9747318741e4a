"""A slow run of trainer ranks' lists, written apart from what makes them: which ranks never finish?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.manifest.types import Parallelism
from dovetail.protocol.messages import Action
from dovetail.protocol.plan import Coordinates, coordinates, rank_at


def hung(
    lists: Sequence[Sequence[Action]], layouts: Mapping[str, Parallelism], receives_ahead: int | None = None
) -> set[int]:
    """Ranks that wait for ever.

    Ranks of a tensor-parallel group run each action together. Ranks of a data-parallel group run a model's first F and
    its last B together. `receives_ahead` None: sends are buffered (Gloo). A number n: a send waits until the receiver
    is n actions before the one that needs it (NCCL)."""
    at, sending = [0] * len(lists), [False] * len(lists)
    where = [{(a.model, a.micro_batch, a.kind): i for i, a in enumerate(mine)} for mine in lists]

    def neighbour(rank: int, action: Action, step: int) -> int | None:
        place, layout = coordinates(rank, layouts[action.model]), layouts[action.model]
        stage = place.pp + (step if action.kind == "F" else -step)
        return rank_at(place._replace(pp=stage), layout) if 0 <= stage < layout.pp else None

    def computed(rank: int | None, key: tuple[str, int, str]) -> bool:
        return rank is None or where[rank][key] < at[rank] + sending[rank]

    def ready(rank: int, leader: int, action: Action) -> bool:
        if sending[rank] or at[rank] == len(lists[rank]):
            return False
        mine, layout = lists[rank][at[rank]], layouts[action.model]
        same_data = coordinates(rank, layout).dp == coordinates(leader, layout).dp
        if (mine.model, mine.kind) != (action.model, action.kind):
            return False
        if same_data and mine.micro_batch != action.micro_batch:
            return False
        key = (mine.model, mine.micro_batch, mine.kind)
        own = mine.kind == "F" or computed(rank, (*key[:2], "F"))
        return own and computed(neighbour(rank, mine, -1), key)

    def advance(rank: int) -> bool:
        action, layout = lists[rank][at[rank]], layouts[lists[rank][at[rank]].model]
        started = not sending[rank]
        if started:
            ends = [i for i, a in enumerate(lists[rank]) if a.model == action.model]
            place = coordinates(rank, layout)
            dps = range(layout.dp) if at[rank] in (ends[0], ends[-1]) else (place.dp,)
            group = [rank_at(Coordinates(place.pp, dp, tp), layout) for dp in dps for tp in range(layout.tp)]
            if not all(ready(other, rank, action) for other in group):
                return False
            for other in group:
                sending[other] = True
        to = neighbour(rank, action, 1)
        key = (action.model, action.micro_batch, action.kind)
        if receives_ahead is None or to is None or where[to][key] <= at[to] + receives_ahead:
            sending[rank] = False
            at[rank] += 1
            return True
        return started

    todo = set(range(len(lists)))
    while moved := {rank for rank in todo if at[rank] < len(lists[rank]) and advance(rank)}:
        todo -= {rank for rank in moved if at[rank] == len(lists[rank])}
    return {rank for rank in todo if at[rank] < len(lists[rank])}
