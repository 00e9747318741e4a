"""The serial schedule: lists of passes of trainer ranks that train one model after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ScheduleError, one_f_one_b
from dovetail.protocol.messages import Action
from dovetail.protocol.plan import coordinates, holds


def serial_1f1b(
    layouts: Mapping[str, Parallelism], micro_batches: Mapping[str, int], order: Sequence[str], world: int | None = None
) -> list[list[Action]]:
    """Each model's 1F1B, one model after another in `order`: one list for each rank, of the models that it holds.

    `micro_batches[model]`: of one data-parallel rank. `world`: the number of ranks, needed where models have ranks of
    their own. Raises ScheduleError when the layouts have different numbers of ranks and `world` is None, or when a
    model has no micro-batch."""
    sizes = {model: world_size(layout) for model, layout in layouts.items()}
    if world is None and len(set(sizes.values())) != 1:
        raise ScheduleError(f"all models must occupy the same trainer ranks; these layouts occupy {sizes}")
    for model in order:
        if micro_batches[model] < 1:
            raise ScheduleError(f"{model} has {micro_batches[model]} micro-batches; a schedule needs at least 1")
    lists: list[list[Action]] = []
    for rank in range(next(iter(sizes.values())) if world is None else world):
        held = [model for model in order if holds(rank, layouts[model])]
        lists.append([a for model in held for a in _of_one_model(model, rank, layouts[model], micro_batches[model])])
    return lists


def _of_one_model(model: str, rank: int, layout: Parallelism, micro_batches: int) -> Iterator[Action]:
    forwards = backwards = 0
    for code in one_f_one_b(layout.pp, coordinates(rank, layout).pp, micro_batches):
        if code == 0:
            yield Action(model=model, micro_batch=forwards, kind="F")
            forwards += 1
        else:
            yield Action(model=model, micro_batch=backwards, kind="B")
            backwards += 1
