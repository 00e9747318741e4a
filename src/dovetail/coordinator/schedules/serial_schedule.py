"""The serial schedule. Each trainer rank trains one model after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ALONE, ModelPipelines, ScheduleError, ScheduleProblem, interleaved_family, one_f_one_b
from dovetail.pipelines.families import fixed_schedule
from dovetail.protocol.messages import Action, Kind
from dovetail.protocol.plan import chunks_of, coordinates, holds, loops


def serial_1f1b(
    layouts: Mapping[str, Parallelism],
    micro_batches: Mapping[str, int],
    order: Sequence[str],
    world: int | None = None,
    split: bool = True,
) -> list[list[Action]]:
    """The actions of each rank, which run 1F1B of one model after another, in `order`. A rank has the actions of the
    models that it holds. A model with several stages per rank uses ZB-V or interleaved 1F1B instead of 1F1B.

    `micro_batches[model]` is the number of micro-batches of one data-parallel rank. `world` is the number of ranks. It
    is needed if models have ranks of their own. `split` says whether backward passes may be split. Raises ScheduleError
    if the layouts have different numbers of ranks and `world` is None, or if a model has no micro-batch."""
    sizes = {model: world_size(layout) for model, layout in layouts.items()}
    if world is None and len(set(sizes.values())) != 1:
        raise ScheduleError(f"all models must occupy the same trainer ranks; these layouts occupy {sizes}")
    for model in order:
        if micro_batches[model] < 1:
            raise ScheduleError(f"{model} has {micro_batches[model]} micro-batches; a schedule needs at least 1")
    lists: list[list[Action]] = []
    for rank in range(next(iter(sizes.values())) if world is None else world):
        mine: list[Action] = []
        for model in (each for each in order if holds(rank, layouts[each])):
            layout, count = layouts[model], micro_batches[model]
            if chunks_of(layout) > 1:
                places = _several_stages(model, layout.pp, chunks_of(layout), loops(layout), count, split)
                mine += places[coordinates(rank, layout).pp]
            else:
                mine += _of_one_model(model, rank, layout, count)
        lists.append(mine)
    return lists


@lru_cache(maxsize=16)
def _several_stages(
    model: str, pp: int, chunks: int, loop: bool, micro_batches: int, split: bool
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each pipeline rank, for ranks that hold several stages. Two stages per rank run ZB-V, and stages
    in a loop interleaved 1F1B. Other stages run one micro-batch after another. The result is cached, because each step
    asks for it, even a step with another schedule."""
    family = replace(ALONE["zb-v"], name="zb-v" if chunks == 2 else "one by one", chunks=chunks, split=split)
    if loop:
        family = interleaved_family(chunks, 1)
    found = fixed_schedule(ScheduleProblem((ModelPipelines(model, pp, micro_batches, 1.0, 2.0),)), family)
    lists: list[list[Action]] = [[] for _ in range(pp)]
    for p in found.passes():
        kind: Kind = p.kind  # type: ignore[assignment]
        lists[p.rank].append(Action(model=model, micro_batch=p.micro_batch, kind=kind, chunk=p.stage // pp))
    return tuple(map(tuple, lists))


def _of_one_model(model: str, rank: int, layout: Parallelism, micro_batches: int) -> Iterator[Action]:
    forwards = backwards = 0
    for code in one_f_one_b(layout.pp, coordinates(rank, layout).pp, micro_batches):
        if code == 0:
            yield Action(model=model, micro_batch=forwards, kind="F")
            forwards += 1
        else:
            yield Action(model=model, micro_batch=backwards, kind="B")
            backwards += 1
