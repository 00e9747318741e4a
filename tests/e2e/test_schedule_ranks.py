"""Every family on 2, 3 and 4 real ranks over Gloo: weights and moments of the serial schedule, bit by bit. With ranks
of its own for each model too, the weights of both on all ranks.

`make test` has each family in some setting, `make test-nightly` in every one (of layouts, architecture, LoRA,
sharding)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.schedules.training_schedule import (
    Times,
    choose_dedicated,
    choose_schedule,
    placeable,
    rank_actions,
    shared_layouts,
    training_problem,
)
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import (
    DEDICATED,
    FAMILIES,
    ModelPipelines,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    evaluate,
    family_instance,
    family_of,
    find,
)
from dovetail.pipelines.families import ALONE, CHUNKED, interleaved_family
from dovetail.pipelines.instance import Shape
from dovetail.protocol.messages import StageTimes
from dovetail.protocol.plan import Layout, divisions, same_batches
from helpers import nightly
from helpers.rank_workers import run_ranks

WORKER = Path(__file__).with_name("schedule_worker.py")
pytestmark = pytest.mark.slow

TIED = ("llama", "opt")  # as schedule_worker.py configures them
EVENLY = {2: Parallelism(pp=2), 3: Parallelism(pp=3), 4: Parallelism(pp=4)}
# World, actor, critic, architecture, LoRA, and plan.sharding.
SETTINGS = [
    *((2, EVENLY[2], EVENLY[2], name, lora, "Always") for name in ("llama", "qwen2", "opt") for lora in (False, True)),
    (2, Parallelism(pp=2), Parallelism(dp=2), "llama", False, "Always"),
    (3, EVENLY[3], EVENLY[3], "llama", False, "Always"),
    (3, EVENLY[3], EVENLY[3], "opt", True, "Always"),
    (4, EVENLY[4], EVENLY[4], "qwen2", False, "Always"),
    (4, EVENLY[4], Parallelism(pp=2, dp=2), "opt", False, "Always"),
    (4, EVENLY[4], Parallelism(pp=2, dp=2), "llama", True, "Always"),
    (4, Parallelism(pp=2, dp=2), Parallelism(pp=2, dp=2), "llama", False, "Always"),
    (4, Parallelism(pp=2, dp=2), Parallelism(pp=2, dp=2), "opt", False, "Auto"),
    (4, Parallelism(pp=2, dp=2), Parallelism(dp=4), "qwen2", False, "Always"),
    (4, Parallelism(pp=2, dp=2), Parallelism(dp=4), "qwen2", False, "Auto"),
]
IDS = [f"{w}-{a.pp}x{a.dp}-{c.pp}x{c.dp}-{name}{'-lora' if lora else ''}-{s}" for w, a, c, name, lora, s in SETTINGS]

# Those of `make test`: two of the same layouts have all families between them.
FEW = (2, 3, 8, 13)
# Settings of the same layouts, by their number.
PLACES = list(dict.fromkeys(tuple(map(str, setting[:3])) for setting in SETTINGS))
ALIKE = [[n for n, other in enumerate(SETTINGS) if tuple(map(str, other[:3])) == places] for places in PLACES]
# The subject is what the ranks do with a schedule. A short search finds irregular ones.
EFFORT = SearchEffort(scale=0.001, memory=False, exact=False)

# The same with so many stages of each model on a rank: world, model, chunks, architecture, options, and plan.sharding.
# Options are LoRA, activation checkpointing and ZeRO-3, with which no backward pass is split, and one model with both
# heads.
CHUNKED_SETTINGS: list[tuple[int, Parallelism, int, str, tuple[str, ...], str]] = [
    (2, EVENLY[2], 2, "llama", (), "Always"),
    (2, EVENLY[2], 4, "qwen2", (), "Auto"),
    (3, EVENLY[3], 2, "opt", ("lora",), "Auto"),
    (4, Parallelism(pp=2, dp=2), 2, "llama", (), "Always"),
    (4, EVENLY[4], 2, "llama", (), "Auto"),
    (2, EVENLY[2], 2, "qwen2", ("recompute",), "Always"),
    (2, EVENLY[2], 2, "llama", ("both heads",), "Always"),
    (3, EVENLY[3], 2, "llama", ("recompute", "lora"), "Auto"),
    (3, EVENLY[3], 2, "qwen2", ("both heads",), "Auto"),
    (4, Parallelism(pp=2, tp=2), 2, "llama", (), "Always"),
    (4, Parallelism(pp=2, tp=2), 2, "qwen2", ("recompute",), "Auto"),
    (4, Parallelism(pp=2, dp=2), 2, "opt", ("recompute", "zero3"), "Auto"),
]
CHUNKED_IDS = [
    "-".join((f"{w}", f"{b.pp}x{b.dp}x{b.tp}", f"{c} chunks", name, *options))
    for w, b, c, name, options, _ in CHUNKED_SETTINGS
]
FEW_CHUNKED = (0, 1, 5, 6)
UNSPLIT = {"recompute", "zero3"}
# A schedule runs alike whichever way the ranks of a stage divide its work, data or tensors: each schedule meets one.
HALVES = (3, 9)
# Settings that run interleaved 1F1B too.
LOOPS = (1, 4, 6, 9)


def some_problem(layouts: dict[str, Any], counts: dict[str, int], mini_batches: int, seed: int) -> ScheduleProblem:
    """Times drawn at random, so that the searched schedules are irregular."""
    draw = np.random.default_rng(seed)

    def model(name: str) -> ModelPipelines:
        layout = layouts[name]
        shape = (layout.pipelines, layout.pp, counts[name] * mini_batches)
        forward = draw.uniform(1, 3, shape) * layout.pipelines
        return ModelPipelines(name, layout.pp, counts[name], forward, 2 * forward, 1.0, layout.pipelines)

    return ScheduleProblem(tuple(model(name) for name in layouts), 0.1, mini_batches)


def chosen(number: int, every: bool) -> list[str]:
    """The families of a setting, beside the serial one: all, or a half where another setting has the same layouts."""
    group, alike = next((group, each) for group, each in enumerate(ALIKE) if number in each)
    turn = alike.index(number)
    searched = [name for name in FAMILIES if name != "serial"]
    if every or len(alike) == 1:
        return searched
    return [name for index, name in enumerate(searched) if (index + turn // 2 + group) % 2 == turn % 2]


def make_case(number: int, every: bool) -> list[dict[str, Any]]:
    """The setting with the critic's stages either way round, each with the schedules that can run there; then with
    ranks of its own for each model (`reverse` None), for every division of the ranks."""
    world, actor, critic, architecture, lora, sharding = SETTINGS[number]
    cases = []
    for reverse in (True, False):
        layouts = shared_layouts({"actor": actor, "critic": critic}, reverse)
        copies = actor.dp // layouts["actor"].pipelines
        counts = {name: 4 * copies // layout.dp for name, layout in layouts.items()}
        schedules = {}
        # It runs either way round.
        left_out = [] if every or reverse == bool(number % 2) else ["zero-bubble"]
        for together in (1, 2):
            problem = some_problem(layouts, counts, together, 10 * number + together)
            names = [n for n in ("serial", *chosen(number, every)) if n.endswith("-rolled") == (together == 2)]
            names = [n for n in names if n not in left_out and placeable(family_of(n), reverse)]
            if names:
                choice = choose_schedule(problem, names, replace(EFFORT, seed=number), reverse)
                for name, found in choice.schedules.items():
                    schedules[name] = (together, letters(found, layouts))
        where = {name: layout.model_dump() for name, layout in layouts.items()}
        case = {"world": world, "architecture": architecture, "lora": lora, "layouts": where, "copies": copies}
        case |= {"layers": 3 if world == 2 else 4, "sharding": sharding}
        cases.append(case | {"schedules": schedules, "setting": number, "reverse": reverse})
    plain = {"actor": actor, "critic": critic}
    for division in divisions(plain, 4 * copies) if every or not lora or number == 1 or world > 2 else ():
        if same_batches(plain, division):
            where = {name: layout.model_dump() for name, layout in division.items()}
            schedules = {}
            for together in (1, 2):
                found, _ = choose_dedicated([division], 4 * copies, together, Times(), 1.0)
                schedules[f"{DEDICATED.name} {together}"] = (together, letters(found, division))
            cases.append(cases[0] | {"layouts": where, "schedules": schedules, "reverse": None})
    return cases


def chunked_cases(number: int, every: bool) -> list[dict[str, Any]]:
    """One stage a rank, one model after the other; then several stages a rank, the critic's either way round, each with
    the schedules that can run there. All are of one mini-batch, every fourth one (or `every` one) also of two. Of the
    settings in HALVES each has one half of the schedules, unless it has `every` one. Those in LOOPS (or with `every`
    one) have the stages in a loop too. A model that trains alone has the families of one model, with one stage a rank
    too."""
    world, both, chunks, architecture, options, sharding = CHUNKED_SETTINGS[number]
    plain = {"actor": both, "critic": both}
    case = {"world": world, "architecture": architecture, "lora": "lora" in options, "copies": both.dp}
    case |= {"sharding": sharding, "options": options, "tp": both.tp}
    # Where it can be, one stage has a layer more than the others.
    case |= {"layers": min(8, both.pp * chunks + 1), "setting": f"chunks {number}"}
    trained = ("actor",) if "both heads" in options else ("actor", "critic")
    whole = not UNSPLIT.isdisjoint(options)
    cases = []
    for reverse in (None, False, True, "loop"):
        if (reverse is True and len(trained) == 1) or (reverse is False and whole and len(trained) == 2):
            continue  # there would be nothing to run the other way, or nothing but one model after the other
        if reverse == "loop" and not (every or number in LOOPS):
            continue
        loop = reverse == "loop"
        layouts = shared_layouts({name: plain[name] for name in trained}, reverse is True)
        counts = dict.fromkeys(layouts, 4)
        if reverse is not None:
            layouts = {
                name: layout.model_copy(update={"chunks": chunks, "loop": loop}) for name, layout in layouts.items()
            }
        schedules: dict[str, Any] = {}
        orders: dict[str, Any] = {}
        for together in (1, 2):
            problem = some_problem(layouts, counts, together, 100 * number + together)
            families = [FAMILIES["serial"]]
            if loop:
                families = [interleaved_family(chunks, len(trained))]
            elif len(trained) == 1:
                v = 1 if reverse is None else chunks
                families = [f for f in ALONE.values() if f.chunks == v and f.shape is Shape.ZIGZAG]
            elif reverse is not None:
                placed = [f for f in CHUNKED.values() if f.chunks == chunks and f.shape is Shape.ZIGZAG]
                serial = replace(CHUNKED["zb-v"], chunks=chunks, reverse=reverse, name="one by one", split=False)
                here = [f for f in placed if f.reverse == reverse and not (whole and f.split)]
                if number in HALVES and not every:
                    here = here[HALVES.index(number) :: len(HALVES)]
                families = [serial, *here]
            for index, family in enumerate(families):
                rolled = family.name.endswith("-rolled")
                if rolled == (together == 2) or (not rolled and (every or loop or (index + number) % 4 == 0)):
                    name, found = f"{family.name} {together}", find(problem, family, replace(EFFORT, seed=number))
                    schedules[name] = (together, letters(found, layouts))
                    orders[name] = found.orders.tolist()
        where = {name: layouts[name].model_dump() for name in trained}
        more = {} if reverse is None or loop or len(trained) == 1 else {"orders": orders}
        cases.append(case | {"layouts": where, "schedules": schedules, "reverse": reverse} | more)
    return cases


def letters(found: Schedule, layouts: dict[str, Layout]) -> list[list[tuple[str, str, int, int]]]:
    return [[(a.model[0], a.kind, a.micro_batch, a.chunk) for a in mine] for mine in rank_actions(found, layouts)]


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest) -> bool:
    return nightly.asked(request)


@pytest.fixture(scope="module")
def cases(every: bool) -> list[dict[str, Any]]:
    found = [case for number in (range(len(SETTINGS)) if every else FEW) for case in make_case(number, every)]
    chunked = range(len(CHUNKED_SETTINGS)) if every else FEW_CHUNKED
    found += [case for number in chunked for case in chunked_cases(number, every)]
    seen = set()
    for case in found:
        # A checkpoint has been tried once with each kind of places, with and without LoRA and sharding.
        kind = tuple(
            sorted(
                {(at["pipelines"] > 1, at["first"] > 0, at["chunks"], "loop" in at) for at in case["layouts"].values()}
            )
        )
        restart = (case["world"], kind, case["lora"], case["sharding"])
        case["restarts"] = kind != ((False, False, 1, False),) and (every or restart not in seen)
        seen.add(restart)
    return found


@pytest.fixture(scope="module")
def results(cases: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of every case, what each rank found."""
    import torch

    folder = tmp_path_factory.mktemp("schedules")
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(WORKER, folder)
    worlds = {case["world"] for case in cases}
    ranks = {w: [torch.load(folder / f"schedules-{w}-{r}.pt") for r in range(w)] for w in worlds}
    return [[found[str(n)] for found in ranks[case["world"]]] for n, case in enumerate(cases)]


NUMBERED: list[tuple[object, str, bool]] = [(number, name, number in FEW) for number, name in enumerate(IDS)]
NUMBERED += [(f"chunks {number}", name, number in FEW_CHUNKED) for number, name in enumerate(CHUNKED_IDS)]


@pytest.mark.parametrize(
    "setting", [pytest.param(n, id=name, marks=() if few else pytest.mark.nightly) for n, name, few in NUMBERED]
)
def test_same_bits_as_serial(cases: list[dict[str, Any]], results: list[list[dict[str, Any]]], setting: object) -> None:
    for case, found in zip(cases, results, strict=True):
        if case["setting"] != setting:
            continue
        for rank, mine in enumerate(found):
            assert mine["moved"] > mine["parameters"] / 2, "training must have an effect"
            assert not mine.get("lost"), "a checkpoint must hold pipelines side by side"
            assert mine["differs"].keys() == case["schedules"].keys()
            for family, differs in mine["differs"].items():
                assert not any(differs.values()), (rank, family, case["reverse"], differs)


def test_every_family_meets_every_option(cases: list[dict[str, Any]], every: bool) -> None:
    """Nightly; else at least one setting."""
    met: dict[str, set[tuple[str, object]]] = {name: set() for name in FAMILIES}
    settings: dict[int, set[str]] = {number: set() for number in range(len(SETTINGS))}
    for case in cases:
        if case["setting"] in settings and case["reverse"] is not None:
            settings[case["setting"]] |= set(case["schedules"])
            alike = next(index for index, each in enumerate(ALIKE) if case["setting"] in each)
            sharded = [("sharding", case["sharding"])] if case["copies"] > 1 else []
            for name in case["schedules"]:
                met[name] |= {("layouts", alike), *((key, case[key]) for key in ("architecture", "lora")), *sharded}
    options: set[tuple[str, object]] = {("layouts", index) for index in range(len(ALIKE))}
    options |= {("lora", True), ("lora", False), ("sharding", "Always"), ("sharding", "Auto")}
    options |= {("architecture", name) for name in ("llama", "qwen2", "opt")}
    assert all(met.values())
    if every:
        assert met == dict.fromkeys(FAMILIES, options)
        assert settings == {number: set(FAMILIES) for number in settings}


def test_a_rank_keeps_no_groups_of_layouts_that_it_had(
    cases: list[dict[str, Any]], results: list[list[dict[str, Any]]], every: bool
) -> None:
    """Each has threads and sockets."""
    counts: dict[str, list[set[int]]] = {}
    for case, found in zip(cases, results, strict=True):
        for rank, mine in enumerate(found):
            counts.setdefault(json.dumps([case["world"], rank, case["layouts"]]), []).append(mine["groups"])
    assert sum(len(each) > 1 for each in counts.values()) > (10 if every else 3)
    assert [key for key, each in counts.items() if len(set(each)) > 1] == []


def weights(ranks: list[dict[str, Any]]) -> dict[tuple[str, str, int], Any]:
    """Whole parameters by model, name and tensor-parallel rank: pipelines side by side hold copies, FSDP2 parts of the
    first dimension."""
    import torch

    pieces: dict[tuple[str, str, int], list[Any]] = {}
    # Both halves of a tied pair have one name.
    found = {place: part for rank in reversed(ranks) for place, part in rank["final"].items()}
    for (model, name, tp, _), (piece, is_part) in sorted(found.items(), key=lambda item: item[0]):
        held = pieces.setdefault((model, name, tp), [])
        if is_part or not held:
            held.append(piece)
    return {key: torch.cat(held) if len(held) > 1 else held[0] for key, held in pieces.items()}


def test_dedicated_ranks_give_the_weights_of_shared_ones(
    cases: list[dict[str, Any]], results: list[list[dict[str, Any]]], every: bool
) -> None:
    """Bit by bit: each data-parallel rank has the same micro-batches, in pipelines of fewer stages. But for a tied
    embedding, whose gradient is the sum of two stages' where they are not one."""
    import torch

    shared = {c["setting"]: found for c, found in zip(cases, results, strict=True) if c["reverse"] is False}
    compared = set()
    for case, found in zip(cases, results, strict=True):
        # LoRA's dropout is seeded by stage.
        if case["reverse"] is not None or case["lora"] or case["setting"] not in range(len(SETTINGS)):
            continue
        mine, theirs = weights(found), weights(shared[case["setting"]])
        assert mine.keys() == theirs.keys()
        models = {"critic"} if case["architecture"] in TIED else {"actor", "critic"}
        assert [key for key in mine if key[0] in models and not torch.equal(mine[key], theirs[key])] == []
        assert all({key[0] for key in rank["final"]} in ({"actor"}, {"critic"}) for rank in found)
        compared |= {(case["world"], model) for model in models}
    few = {(2, "actor"), (2, "critic"), (4, "critic")}
    assert compared == (few | {(4, "actor"), (3, "critic")} if every else few)


def test_stages_in_a_v_give_the_weights_of_one_stage_a_rank(
    cases: list[dict[str, Any]], results: list[list[dict[str, Any]]], every: bool
) -> None:
    """Bit by bit, tied embeddings too."""
    import torch

    compared = 0
    for number in range(len(CHUNKED_SETTINGS)):
        line, *others = [
            (c, r) for c, r in zip(cases, results, strict=True) if c["setting"] == f"chunks {number}" and not c["lora"]
        ] or [None]
        for _, found in others:
            mine, theirs = weights(found), weights(line[1])
            assert mine.keys() == theirs.keys()
            assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
            compared += 1
    assert compared == (25 if every else 8)


def test_peak_memory_of_stages_in_a_v_is_predicted_within_two_percent(
    cases: list[dict[str, Any]], results: list[list[dict[str, Any]]]
) -> None:
    """From what one micro-batch after the other held: bytes that autograd saves, as the trainers count them."""
    compared = Counter[str]()
    for case, found in zip(cases, results, strict=True):
        if not case.get("orders"):
            continue
        layouts = {name: Layout(**layout) for name, layout in case["layouts"].items()}
        # The first of the data-parallel ranks; the others have micro-batches of other sizes. Of a tensor-parallel group
        # also the first: its ranks hold the same.
        ranks = range(0, case["world"], case["copies"] * case["tp"])
        alone = {name: layout.model_copy(update={"dp": 1, "tp": 1}) for name, layout in layouts.items()}
        times = Times()
        for place, rank in enumerate(ranks):
            _, held = found[rank]["memory"]["one by one 1"]
            parts = [
                StageTimes(rank=place, model=model, chunk=chunk, seconds={}, activation=sizes)
                for model, chunk, sizes in held
            ]
            times.add(parts, alone)
        problem = training_problem(alone, dict.fromkeys(layouts, 4), 1, times)
        for name, orders in case["orders"].items():
            family = CHUNKED.get(name[:-2])
            if family is None or not name.endswith(" 1"):
                continue
            predicted = evaluate(family_instance(problem, family), np.array(orders)).peaks
            measured = [found[rank]["memory"][name][0] for rank in ranks]
            assert measured == pytest.approx(predicted.tolist(), rel=0.02), (case["setting"], name)
            compared[name[:-2]] += 1
    assert all(compared[name] for name in ("zb-v", "v-half", "v-min", "fused-v", "fused-w")), compared
