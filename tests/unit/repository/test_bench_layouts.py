"""Layouts of training and generation chosen together: never worse than any pair, nor than PUZZLE's descent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.planner.candidate import Share
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.seconds import GPUCosts
from dovetail.planner.workload import Workload
from helpers.llama import llama
from helpers.papers import layouts as pairs
from helpers.papers import routing

RankGrid, Tensor, route = routing.RankGrid, routing.Tensor, routing.route
LayoutsError, exhaustive, layouts, similar = pairs.LayoutsError, pairs.exhaustive, pairs.layouts, pairs.similar


def test_layouts_are_all_those_of_the_ranks() -> None:
    found = list(layouts(8, max_tp=4, max_pp=8, first=3))
    assert len(found) == len(set(found)) == 9
    for layout in found:
        assert layout.ranks == range(3, 11)
        assert layout.tp in (1, 2, 4)
    assert {(p.pp, p.tp, p.dp) for p in layouts(6, 8, 2)} == {(1, 1, 6), (2, 1, 3), (1, 2, 3)}


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 6, 8, 16]), st.randoms(use_true_random=False))
def test_exhaustive_finds_the_least_of_all_pairs_and_descent_nothing_better(world: int, random: object) -> None:
    candidates = list(layouts(world, 8, 16))
    values: dict[object, float] = {}

    def number(key: object, scale: float) -> float:
        return values.setdefault(key, scale * random.random())  # type: ignore[attr-defined,no-any-return]

    fits = {k: {c for c in candidates if number((k, c), 1) < 0.8} or set(candidates) for k in "tg"}

    def train(layout: RankGrid) -> float | None:
        return number(("train", layout), 10) if layout in fits["t"] else None

    def generate(layout: RankGrid) -> float | None:
        return number(("generate", layout), 10) if layout in fits["g"] else None

    def switch(a: RankGrid, b: RankGrid) -> float:
        return 0.0 if a == b else number((a, b), 5)

    best = exhaustive(candidates, candidates, train, generate, switch)
    every = [(train(a) or 0) + (generate(b) or 0) + switch(a, b) for a in fits["t"] for b in fits["g"]]
    assert best.seconds == pytest.approx(min(every))
    assert best.switches <= len(every)
    descent = similar(candidates, candidates, train, generate, switch)
    assert descent.seconds >= best.seconds - 1e-9
    assert descent.training in fits["t"]
    assert descent.generation in fits["g"]


def test_a_task_that_fits_nowhere_is_named() -> None:
    some = list(layouts(4, 4, 4))
    with pytest.raises(LayoutsError, match="no layout will do for generation; 6 were looked at"):
        exhaustive(some, some, lambda _: 1.0, lambda _: None, lambda _a, _b: 0.0)


@pytest.mark.slow
def test_a_13b_actor_on_a_node_trains_and_generates_in_unlike_layouts() -> None:
    """With the real models of memory, time and switching: 8 A100-40GB, which cannot train with a copy each."""
    shape = llama("13")
    card = gpu("NVIDIA-A100-SXM4-40GB")
    lengths = Lengths.fixed(512)
    work = Workload(shape, shape, None, None, 64, 64, 1, lengths, lengths)
    costs = GPUCosts(work, Inventory((Pool("a100", card, 1, 8, 25e9),)))
    tensors = [
        Tensor(f"{layer}.{linear.name}", (linear.outputs, linear.inputs), layer, 0 if linear.split == "out" else 1)
        for layer in range(40)
        for linear in shape.linears
    ]

    def train(layout: RankGrid) -> float | None:
        share = Share("a100", 0, layout.pp, layout.tp, layout.dp, fsdp=2, recompute=True, offload=True)
        option = costs.option("actor_training", share)
        return None if option.problem else option.seconds

    def generate(layout: RankGrid) -> float | None:
        option = costs.option("generation", Share("a100", 0, layout.pp, layout.tp, layout.dp))
        return None if layout.pp > 1 or option.problem else option.seconds

    def switch(a: RankGrid, b: RankGrid) -> float:
        return route(tensors, 40, a, b, 8).seconds(8, card.nvlink, 25e9)

    every = list(layouts(8, 8, 8))
    assert train(RankGrid(dp=8)) is None
    best = exhaustive(every, every, train, generate, switch)
    assert best.training.pp * best.training.tp > 1
    assert best.generation.pp == 1
    assert best.switch_seconds < 0.02 * best.seconds
    assert best.switches < len(every) ** 2 / 4, "bounds spare most of the routing tables"
    assert similar(every, every, train, generate, switch).seconds >= best.seconds
