"""Training and generation layouts of one model, chosen together: T_train + T_gen + T_switch (PUZZLE equation 2).

`exhaustive` looks at every pair that could still win; `similar` is PUZZLE's similarity-oriented descent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.planner.candidate import Share
from papers.routing import RankGrid

# Seconds of a task in a layout; None: it does not fit or cannot run there.
Cost = Callable[[RankGrid], float | None]
Switch = Callable[[RankGrid, RankGrid], float]


class LayoutsError(ValueError):
    """No layout will do; the message says of which task."""


@dataclass(frozen=True)
class Choice:
    """Seconds of one iteration's tasks. `switches`: pairs whose switch was worked out."""

    training: RankGrid
    generation: RankGrid
    training_seconds: float
    generation_seconds: float
    switch_seconds: float
    switches: int

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.generation_seconds + self.switch_seconds


def ranks_of(share: Share) -> RankGrid:
    """A share's layout, over its pool's GPUs as ranks."""
    return RankGrid(pp=share.pp, tp=share.tp, dp=share.dp, first=share.first, sharded=share.fsdp == 3)


def layouts(world: int, max_tp: int, max_pp: int, first: int = 0, sharded: bool = False) -> Iterator[RankGrid]:
    """Every (pp, tp, dp) of `world` ranks from rank `first` on: tp a power of two that a node holds, pp any divisor."""
    tp = 1
    while tp <= max_tp:
        if world % tp == 0:
            rest = world // tp
            for pp in range(1, min(max_pp, rest) + 1):
                if rest % pp == 0:
                    yield RankGrid(pp=pp, tp=tp, dp=rest // pp, first=first, sharded=sharded)
        tp *= 2


def exhaustive(
    training: list[RankGrid], generation: list[RankGrid], train: Cost, generate: Cost, switch: Switch
) -> Choice:
    """The best pair. A pair is left out only if its training and generation alone take as long as the best found.

    Ties go to the earlier layouts. Raises LayoutsError if no layout of one of the lists will do."""
    trains, generates = _costs(training, train, "training"), _costs(generation, generate, "generation")
    pairs = sorted(
        ((a[0] + b[0], i, j) for i, a in enumerate(trains) for j, b in enumerate(generates)), key=lambda p: p
    )
    best: Choice | None = None
    for count, (floor, i, j) in enumerate(pairs):
        if best is not None and floor >= best.seconds:
            break
        (spent, source), (needed, target) = trains[i], generates[j]
        found = Choice(source, target, spent, needed, switch(source, target), count + 1)
        if best is None or found.seconds < best.seconds:
            best = found
    assert best is not None
    return Choice(
        best.training, best.generation, best.training_seconds, best.generation_seconds, best.switch_seconds, count + 1
    )


def similar(
    training: list[RankGrid], generation: list[RankGrid], train: Cost, generate: Cost, switch: Switch
) -> Choice:
    """PUZZLE section 5.3: from the best training layout, generation begins with the most similar layout (the distance
    of the tuples (P, D, T)); then P is lowered and T raised step by step while equation 2 falls.

    Raises LayoutsError as `exhaustive` does."""
    spent, source = min(_costs(training, train, "training"), key=lambda c: c[0])
    able = {(g.pp, g.tp): (s, g) for s, g in _costs(generation, generate, "generation")}

    def distance(layout: RankGrid) -> int:
        return abs(layout.pp - source.pp) + abs(layout.dp - source.dp) + abs(layout.tp - source.tp)

    needed, target = min(able.values(), key=lambda c: (distance(c[1]), c[1].pp, c[1].tp))
    best, count = Choice(source, target, spent, needed, switch(source, target), 1), 1
    while True:
        at = best.generation
        # The next smaller P of those with the next larger T, as P x T stays, else of either.
        steps = [k for k in able if k[0] <= at.pp and k[1] >= at.tp and k != (at.pp, at.tp)]
        if not steps:
            break
        needed, target = able[min(steps, key=lambda k: (at.pp - k[0] + k[1] - at.tp, k))]
        count += 1
        found = Choice(source, target, spent, needed, switch(source, target), count)
        if found.seconds >= best.seconds:
            break
        best = found
    return best


def _costs(candidates: list[RankGrid], cost: Cost, task: str) -> list[tuple[float, RankGrid]]:
    found = [(seconds, layout) for layout in candidates if (seconds := cost(layout)) is not None]
    if not found:
        raise LayoutsError(f"no layout will do for {task}; {len(candidates)} were looked at")
    return found
