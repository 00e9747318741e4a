"""The schedule of a job's training: places of stages, problems from measured times, choice, replacement, report."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.reporting.page.iteration_timeline import schedule_document
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.schedules.scheduling import Scheduling, StageSchedules
from dovetail.coordinator.schedules.step_commands import StepFacts, ppo_step, supervised_step
from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, applies, encode, scheduled
from dovetail.coordinator.schedules.training_schedule import (
    PINS,
    Times,
    choose_schedule,
    mini_batches_together,
    pinned_families,
    rank_actions,
    shared_layouts,
    training_problem,
)
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.pipelines import SearchEffort
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.files.machine_profile import LinkTimes, ModelTimes, PassTimes, Profile
from dovetail.protocol.messages import Action, CommandResult, Span, StageTimes, Step
from dovetail.protocol.plan import Layout, Plan, coordinates, rank_at, stages_at
from dovetail.trainer.engine.executor import check_actions
from helpers.patience import PATIENCE


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search finds in more time is not the subject here."""
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.3)


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Parallelism]:
    """Layouts of actor and critic over the same ranks."""
    world = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    pps = [pp for pp in range(1, world + 1) if world % pp == 0]
    return {name: Parallelism(pp=(pp := draw(st.sampled_from(pps))), dp=world // pp) for name in ("actor", "critic")}


@settings(deadline=None)
@given(pairs(), st.booleans())
def test_shared_places_are_one_to_one_and_neighbours_hold_neighbouring_stages(
    layouts: dict[str, Parallelism], reverse: bool
) -> None:
    placed = shared_layouts(layouts, reverse)
    assert len({layout.pp * layout.pipelines for layout in placed.values()}) == 1, "both models share positions"
    for name, layout in placed.items():
        places = [coordinates(rank, layout) for rank in range(world_size(layout))]
        assert len(set(places)) == world_size(layout)
        assert [rank_at(place, layout) for place in places] == list(range(world_size(layout)))
        width = layout.dp // layout.pipelines
        for d in range(layout.dp):
            ranks = [rank_at(places[0]._replace(pp=stage, dp=d), layout) for stage in range(layout.pp)]
            way = -width if reverse and name == "critic" else width
            assert all(b - a == way for a, b in pairwise(ranks)), "stages of a pipeline are on adjacent positions"


def test_a_layout_without_pipelines_side_by_side_is_the_plain_one() -> None:
    plain = Parallelism(pp=2, dp=3, tp=2)
    layout = Layout(pp=2, dp=3, tp=2)
    assert [coordinates(r, layout) for r in range(12)] == [coordinates(r, plain) for r in range(12)]
    with pytest.raises(ValueError, match="dp 3 is not a multiple of the 2 pipelines"):
        Layout(pp=1, dp=3, pipelines=2)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(pairs(), st.integers(1, 3), st.sampled_from([1, 2]), st.booleans())
def test_rank_lists_are_what_the_executor_accepts(
    layouts: dict[str, Parallelism], per_position: int, mini_batches: int, reverse: bool
) -> None:
    placed = shared_layouts(layouts, reverse)
    positions = placed["actor"].pp * placed["actor"].pipelines
    sequences = per_position * positions * world_size(placed["actor"])
    counts = {name: sequences // layout.dp for name, layout in placed.items()}
    problem = training_problem(placed, counts, mini_batches)
    families = ["serial", "stitched", "stitched-rolled"]
    choice = choose_schedule(problem, families, SearchEffort(scale=0.01), reverse)
    for found in choice.schedules.values():
        lists = rank_actions(found, placed)
        assert len(lists) == world_size(placed["actor"])
        for mine in lists:
            check_actions(mine, {n: count * mini_batches for n, count in counts.items()}, True, mini_batches)
        chosen = StoredSchedule(found.family, mini_batches, encode(lists))
        again = StoredSchedule.from_json(json.loads(json.dumps(chosen.as_json())))
        assert again.actions() == lists


def test_measured_times_reach_the_stage_they_belong_to() -> None:
    layouts = shared_layouts({"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)}, reverse=True)
    times = Times()

    def part(rank: int, model: str, seconds: float) -> StageTimes:
        return StageTimes(
            rank=rank, model=model, seconds={"F": [seconds, seconds], "B": [3 * seconds] * 2}, activation=[8.0, 8.0]
        )

    times.add([part(0, "actor", 1.0), part(1, "actor", 2.0)], layouts)
    counts = {"actor": 2, "critic": 2}
    half_known = training_problem(layouts, counts, 2, times)
    assert half_known.array(0, "forward").tolist() == [[1.0] * 4] * 2, "units of both models must be the same"
    times.add([part(0, "critic", 4.0), part(1, "critic", 8.0)], layouts)
    problem = training_problem(layouts, counts, 2, times)
    assert problem.array(0, "forward").tolist() == [[1.0] * 4, [2.0] * 4]
    # The critic's first stage is on rank 1.
    assert problem.array(1, "forward").tolist() == [[8.0] * 4, [4.0] * 4]
    assert problem.array(1, "backward").tolist() == [[24.0] * 4, [12.0] * 4]
    assert problem.array(0, "activation").tolist() == [[8.0] * 4] * 2
    times.add([part(0, "actor", 3.0)], layouts)
    again = training_problem(layouts, counts, 2, times)
    assert again.array(0, "forward").tolist() == [[2.0] * 4, [2.0] * 4], "an odd moment counts half"


def test_each_of_a_ranks_stages_has_its_own_times() -> None:
    layouts = shared_layouts({"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)}, reverse=True, chunks=2)
    times = Times()

    def part(rank: int, model: str, chunk: int, seconds: float) -> StageTimes:
        kinds = {"F": [seconds] * 2, "B": [3 * seconds] * 2}
        return StageTimes(rank=rank, model=model, chunk=chunk, seconds=kinds, activation=[8 * seconds] * 2)

    # Rank 0 has the actor's stages 0 and 3; the critic's 1 and 2, since that runs the other way.
    parts = {"actor": ((0, 0, 1.0), (1, 0, 2.0), (1, 1, 3.0), (0, 1, 4.0)), "critic": ((1, 0, 5.0), (0, 0, 6.0))}
    times.add([part(rank, model, chunk, s) for model, each in parts.items() for rank, chunk, s in each], layouts)
    times.add([part(0, "critic", 1, 7.0), part(1, "critic", 1, 8.0)], layouts)
    problem = training_problem(layouts, {"actor": 2, "critic": 2}, 2, times)
    assert problem.along(0, "forward", 2)[0].tolist() == [[s] * 4 for s in (1.0, 2.0, 3.0, 4.0)]
    assert problem.along(1, "backward", 2)[0].tolist() == [[3 * s] * 4 for s in (5.0, 6.0, 7.0, 8.0)]
    assert problem.along(0, "activation", 2)[0].tolist() == [[8 * s] * 4 for s in (1.0, 2.0, 3.0, 4.0)]
    # With one stage a rank each has the layers of two neighbouring ones; with four, half of each.
    plain = shared_layouts({"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)}, reverse=False)
    assert training_problem(plain, {"actor": 2, "critic": 2}, 1, times).along(0, "forward").tolist() == [
        [[3.0, 3.0], [7.0, 7.0]]
    ]
    finer = {name: layout.model_copy(update={"chunks": 4}) for name, layout in layouts.items()}
    halves = training_problem(finer, {"actor": 2, "critic": 2}, 1, times).along(1, "forward", 4)[0, :, 0]
    assert halves.tolist() == [2.5, 2.5, 3.0, 3.0, 3.5, 3.5, 4.0, 4.0]


@pytest.mark.parametrize("chunks", [1, 2])
def test_halves_of_a_backward_stay_what_they_are_with_other_stages(chunks: int) -> None:
    """The first stage computes all of its backward in the second half. Half of it, as a later stage, does not; and a
    later stage that is joined to it does."""
    pair = {"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)}
    layouts = shared_layouts(pair, reverse=True, chunks=chunks)
    times = Times()
    for model, layout in layouts.items():
        for rank in range(2):
            for chunk, stage in enumerate(stages_at(coordinates(rank, layout).pp, 2, chunks)):
                halves = (0.0, 6.0) if stage == 0 else (2.0, 4.0)
                seconds = {"F": [3.0], "B": [6.0], "I": [halves[0]], "W": [halves[1]]}
                part = StageTimes(rank=rank, model=model, chunk=chunk, seconds=seconds, activation=[8.0])
                times.add([part], layouts)
    other = 3 - chunks
    count = 2 * other
    finer = shared_layouts(pair, reverse=True, chunks=other)["actor"]
    whole = 6.0 * chunks / other
    first, second = (times.array("actor", kind, finer, 1, 1) for kind in "IW")
    assert first is not None
    assert second is not None
    assert (first + second)[0, :, 0] == pytest.approx([whole] * count)
    assert first[0, :, 0] == pytest.approx([0.0] + [whole / 3] * (count - 1), abs=0.02)
    # Of another pipeline, too.
    apart = Layout(pp=1, dp=2, pipelines=2)
    first, second = (times.array("actor", kind, apart, 2, 1) for kind in "IW")
    assert first is not None
    assert second is not None
    assert first == pytest.approx(0.0, abs=0.05)
    assert (first + second) == pytest.approx(12.0 * chunks)


@settings(deadline=None)
@given(st.integers(1, 500))
def test_mini_batches_of_one_schedule_divide_the_iteration(steps: int) -> None:
    assert steps % mini_batches_together(steps) == 0


# ---------------------------------------------------------------- during a job


def job(**plan: Any) -> tuple[RLHFJobSpec, Plan]:
    document: dict[str, Any] = {
        "stages": ["ppo"],
        "groups": [
            {"name": "t", "roles": ["trainer"], "replicas": 2},
            {"name": "r", "roles": ["rollout"], "replicas": 1},
        ],
        "ppo": {"globalBatchSize": 32, "miniBatchSize": 16, "microBatchSize": 4, "epochs": 1},
        "plan": {"parallelism": {"actor": {"pp": 2}}, **plan},
    }
    spec = RLHFJobSpec.model_validate(document)
    return spec, make_plan(spec)


class Records(dict[str, Any]):
    """A store in memory."""

    def put(self, key: str, value: object) -> None:
        self[key] = json.loads(json.dumps(value))


def measured(forward: float, slow: str | None = None) -> CommandResult:
    """Every stage alike, except that `slow`'s take five times as long."""
    times = [
        StageTimes(
            rank=rank,
            model=model,
            seconds={
                "F": [forward * (5 if model == slow else 1)] * 4,
                "B": [2 * forward * (5 if model == slow else 1)] * 4,
            },
            activation=[1e6] * 4,
        )
        for rank in (0, 1)
        for model in ("actor", "critic")
    ]
    return CommandResult(id="step", ok=True, times=times, metrics={"activation_peak_bytes": 2e6})


@pytest.mark.slow
def test_auto_beats_serial_on_two_ranks_and_the_page_shows_it(tmp_path: Path) -> None:
    spec, plan = job()
    assert plan.schedule == "Auto"

    async def go() -> tuple[Scheduling, StoredSchedule]:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        scheduling.learn(measured(0.01), 10)
        await scheduling.close()
        chosen = await scheduling.current()
        assert chosen is not None
        return scheduling, chosen

    scheduling, chosen = asyncio.run(go())
    assert chosen.family != "serial"
    assert scheduling.layouts["critic"].reverse == chosen.family.startswith("fused")
    found = RunFolder(tmp_path).schedule()
    assert found
    assert found["measured"]
    assert found["speedup"] > 1.15
    assert found["families"]["serial"]["makespan"] == pytest.approx(found["after"]["makespan"] * found["speedup"])
    page = schedule_document(found, [], 0)
    assert page["in_seconds"]
    assert page["speedup"] == found["speedup"]
    assert ("Times that are drawn", "measured in this run") in page["facts"]
    assert ("Peak activation memory of a rank, measured", "1.9 MiB") in page["facts"]
    assert {action["kind"] for rank in page["drawn"]["ranks"] for action in rank} >= {"F", "B"}
    # Its rivals by the names that others know, also those that these ranks cannot hold.
    names = " ".join(family["published"] or "" for family in page["families"])
    for name in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ZB-H1", "RLHFuse"):
        assert name in names
    assert all("MiB" in family["peak"] for family in page["families"])
    step = scheduled(ppo_step(spec, plan, 1, StepFacts(0.1, True, chosen.as_json())), chosen.as_json(), 2)
    assert step.mini_batches == chosen.mini_batches == 2
    assert {a.model for a in step.actions[0]} == {"actor", "critic"}
    for mine in step.actions:
        check_actions(mine, {"actor": 8, "critic": 8}, True, 2)


def test_a_schedule_is_replaced_when_times_move_enough_and_only_then(tmp_path: Path) -> None:
    spec, plan = job()
    records = Records()

    async def go() -> list[StoredSchedule | None]:
        scheduling = Scheduling(spec, plan, records, tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        seen = [await scheduling.current()]
        for result in (measured(0.01), measured(0.0101)):
            scheduling.learn(result, 10)
            await scheduling.close()
            seen.append(await scheduling.current())
        again = Scheduling(spec, plan, records, tmp_path, lambda *_, **__: None)
        await again.begin()
        assert again.layouts == scheduling.layouts, "a coordinator that comes back must find the stages where they were"
        return seen

    seen = asyncio.run(go())
    assert seen[1] is not None
    assert seen[2] is not None
    assert seen[1].family == seen[2].family


@pytest.mark.slow
@pytest.mark.budget
def test_later_searches_are_made_where_they_may_gain_more_than_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times decide, and how much is still to come; not how long a search took."""
    spec, plan = job()
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 5.0)
    logged: list[tuple[str, Any]] = []

    async def go() -> None:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda event, **more: logged.append((event, more)))
        await scheduling.begin()
        for number, (result, left) in enumerate(
            [
                (measured(0.01), 20),
                (measured(0.0101), 20_000),  # the same proportions
                (measured(0.01), 20_000),
                (measured(0.01, slow="critic"), 1),
                (measured(0.01), 20_000),
                (measured(0.01), 20_000),
                (measured(0.01), 20_000),
                (measured(0.01, slow="critic"), 10),
            ],
            1,
        ):
            before = (tmp_path / "schedule.json").read_bytes()
            scheduling.learn(result, left)
            await scheduling.close()
            searched.append((number, (tmp_path / "schedule.json").read_bytes() != before))

    searched: list[tuple[int, bool]] = []
    asyncio.run(go())
    assert [number for number, again in searched if again] == [1, 8]
    kept = [more["reason"] for event, more in logged if event == "schedule.kept"]
    assert len(kept) == 2
    assert all("may save" in reason for reason in kept)


@pytest.mark.slow
def test_a_schedule_that_has_outgrown_the_memory_is_searched_anew(tmp_path: Path) -> None:
    """Even where no search can save time. Where the schedule is kept, the report has the last measurements."""
    spec, plan = job(activationMemory=1)

    async def go() -> list[dict[str, Any]]:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        seen = []
        for held in (1e6, 1.1e6, 1.1e6, 0.5e9):
            plain = measured(0.01, slow="actor")
            changes = {
                "times": [each.model_copy(update={"activation": [held] * 4}) for each in plain.times],
                "metrics": {"activation_peak_bytes": held},
                "spans": [Span(name="mini-batch 0", process="trainer-0", lane="phases", start=0, end=held / 1e6)],
            }
            scheduling.learn(plain.model_copy(update=changes), 0)
            await scheduling.close()
            seen.append(RunFolder(tmp_path).schedule())
        return seen

    first, second, _, last = asyncio.run(go())
    assert first["measured_peak_bytes"] == 1e6
    assert second["measured_peak_bytes"] == 1.1e6
    assert second["measured_seconds"] == pytest.approx(1.1)
    assert second["after"] == first["after"], "it was kept"
    assert first["memory"] / 1e6 * 0.5e9 > 2**30, "it has outgrown the limit"
    assert last["memory"] <= last["memory_limit"] == 2**30


@pytest.mark.slow
def test_a_job_on_two_ranks_compiles_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = job()
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 5.0)
    for name in ("search_rules", "justify", "anneal", "ExactSearch"):
        monkeypatch.setattr(f"dovetail.pipelines.search.rounds.{name}", lambda *_: pytest.fail("a compiled search"))

    async def go() -> StoredSchedule | None:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        for _ in range(4):
            scheduling.learn(measured(0.01, slow="critic"), 3)
            await scheduling.close()
        return await scheduling.current()

    first, second = asyncio.run(go()), asyncio.run(go())
    assert first == second, "what a restarted job finds must not depend on time or on the number of cores"
    assert first is not None
    assert first.family != "serial"


def four_ranks(layers: int = 8, lora: dict[str, Any] | None = None, **plan: Any) -> RLHFJobSpec:
    """Four micro-batches in a pipeline of four ranks, within the memory of serial 1F1B."""
    config = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": layers, "num_attention_heads": 4}
    model = {"source": {"scratch": {"architecture": "llama", "config": config}}, "lora": lora}
    document: dict[str, Any] = {
        "stages": ["ppo"],
        "models": {"actor": model},
        "groups": [
            {"name": "t", "roles": ["trainer"], "replicas": 4},
            {"name": "r", "roles": ["rollout"], "replicas": 1},
        ],
        "ppo": {"globalBatchSize": 16, "miniBatchSize": 16, "microBatchSize": 4, "epochs": 1},
        "plan": {"parallelism": {"actor": {"pp": 4}}, **plan},
    }
    return RLHFJobSpec.model_validate(document)


@pytest.mark.nightly
@pytest.mark.slow
def test_auto_lays_stages_in_a_v_where_that_is_faster(tmp_path: Path) -> None:
    spec = four_ranks(activationMemory=1)
    plan = make_plan(spec)
    assert (plan.schedule, plan.chunks) == ("Auto", 2)
    records = Records()

    async def go() -> tuple[list[str], Scheduling]:
        scheduling = Scheduling(spec, plan, records, tmp_path, lambda *_, **__: None)
        # On CPUs memory is limited only where it is known in bytes; on GPUs to what serial 1F1B takes.
        scheduling._limited = lambda: True  # type: ignore[method-assign]
        scheduling._times.expect({})
        seen = []
        await scheduling.begin()
        for split in (False, True):
            chosen = await scheduling.current()
            assert chosen is not None
            seen.append(chosen.family)
            scheduling.learn(in_a_v(split), 1000)
            await scheduling.close()
        chosen = await scheduling.current()
        assert chosen is not None
        return [*seen, chosen.family], scheduling

    families, scheduling = asyncio.run(go())
    # Both kinds of backward run once; then what they take decides.
    assert families[0] == "fused-v-whole"
    assert families[2] in ("fused-v", "fused-v-rolled")
    assert {layout.chunks for layout in scheduling.layouts.values()} == {2}
    found = RunFolder(tmp_path).schedule()
    assert found
    rivals = ("serial", "interleaved", "zero-bubble", "zb-v", "v-half", "v-min", "fused-split")
    taken = {name: each["makespan"] for name, each in found["families"].items() if name in rivals}
    assert taken.keys() | found["refused"].keys() >= set(rivals)
    assert found["after"]["makespan"] <= min(taken.values()) * 1.001
    names = " ".join(family["published"] or "" for family in schedule_document(found, [], 0)["families"])
    for words in ("torch's ScheduleZBVZeroBubble", "V-Half", "ZB-H1", "RLHFuse"):
        assert words in names
    again = Scheduling(spec, plan, records, tmp_path, lambda *_, **__: None)
    asyncio.run(again.begin())
    assert again.layouts == scheduling.layouts, "a job keeps to where its stages are"


def in_a_v(split: bool, held: dict[tuple[str, int, int], float] | None = None) -> CommandResult:
    """All stages of four ranks alike, two a rank. `held`: bytes of a micro-batch by model, rank and chunk, if it is not
    a megabyte."""
    seconds = {"F": [0.01] * 4, "I": [0.01] * 4, "W": [0.01] * 4} if split else {"F": [0.01] * 4, "B": [0.02] * 4}
    sizes = held or {}
    times = [
        StageTimes(
            rank=rank,
            model=model,
            chunk=chunk,
            seconds=seconds,
            activation=[sizes.get((model, rank, chunk), 1e6)] * 4,
        )
        for rank in range(4)
        for model in ("actor", "critic")
        for chunk in range(2)
    ]
    return CommandResult(id="step", ok=True, times=times)


@pytest.mark.slow
def test_a_job_goes_on_with_its_schedule_where_measured_sizes_fit_no_other(tmp_path: Path) -> None:
    """The actor's first and last stage are on rank 0, where one micro-batch is more than the limit. With one stage a
    rank it would be less, but the job keeps to the places of its stages."""
    spec = four_ranks(activationMemory=1)
    records = Records()
    records.put("ppo/placement", {"reverse": True, "chunks": 2, "apart": {}})
    logged: list[str] = []

    async def go() -> tuple[StoredSchedule | None, StoredSchedule | None]:
        scheduling = Scheduling(spec, make_plan(spec), records, tmp_path, lambda event, **_: logged.append(event))
        await scheduling.begin()
        before = await scheduling.current()
        scheduling.learn(in_a_v(False, {("actor", 0, 0): 0.2e9, ("actor", 0, 1): 0.95e9}), 10)
        await scheduling.close()
        return before, await scheduling.current()

    before, after = asyncio.run(go())
    assert before is not None
    assert before == after
    assert logged[-1] == "schedule.kept"


def test_of_equally_fast_schedules_the_one_of_less_memory_decides_where_stages_are(tmp_path: Path) -> None:
    """Sums of the same times in another order differ in their last digit."""
    spec = four_ranks()
    scheduling = Scheduling(spec, make_plan(spec), Records(), tmp_path, lambda *_, **__: None)
    found: Any = {
        "stitched": SimpleNamespace(family="stitched", makespan=9.999999999999998, peak=9.0),
        "fused": SimpleNamespace(family="fused", makespan=10.0, peak=8.0),
        "fused-v": SimpleNamespace(family="fused-v", makespan=9.95, peak=7.0),
    }
    assert scheduling._placement(found).name == "fused"


def test_auto_has_one_stage_a_rank_where_a_v_cannot_run_or_would_change_bits() -> None:
    assert make_plan(four_ranks(layers=16)).chunks == 4
    assert make_plan(four_ranks(layers=6)).chunks == 1
    assert make_plan(four_ranks(layers=9)).chunks == 1
    assert make_plan(four_ranks(recompute="Always")).chunks == 2, "more have no schedule with whole backward passes"
    assert make_plan(four_ranks(zero3="Always")).chunks == 2, "without data-parallel ranks it has no effect"
    assert make_plan(four_ranks(zero3="Always", parallelism={"actor": {"pp": 2, "dp": 2}})).chunks == 2
    assert make_plan(four_ranks(intraStageFusion="Fused")).chunks == 1
    assert make_plan(four_ranks(intraStageFusion="VShaped")).chunks == 2
    assert make_plan(four_ranks(lora={"rank": 4})).chunks == 2
    assert make_plan(four_ranks(lora={"rank": 4, "dropout": 0.1})).chunks == 1
    assert make_plan(four_ranks(parallelism={"actor": {"pp": 2, "dp": 2}})).chunks == 4
    assert make_plan(four_ranks(parallelism={"actor": {"pp": 2, "tp": 2}})).chunks == 4
    assert make_plan(four_ranks(parallelism={"actor": {"dp": 4}})).chunks == 1
    assert "chunks" not in make_plan(four_ranks(layers=6)).model_dump(mode="json")


@pytest.mark.parametrize(
    ("pin", "allowed"),
    [
        ("Fused", "fused"),
        ("TimeSharing", ("stitched", "shared")),
        pytest.param("VShaped", ("zb-v", "v-half", "v-min", "fused-v"), marks=pytest.mark.slow),
        ("Serial", "serial"),
    ],
)
def test_a_pin_is_obeyed(tmp_path: Path, pin: str, allowed: str | tuple[str, ...]) -> None:
    spec, plan = job(intraStageFusion=pin)

    async def go() -> StoredSchedule | None:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        scheduling.learn(measured(0.01, slow="critic"), 10)
        await scheduling.close()
        return await scheduling.current()

    chosen = asyncio.run(go())
    assert chosen is not None
    assert chosen.family.startswith(allowed)
    assert chosen.family in PINS[pin]


def test_without_a_pipeline_there_is_nothing_to_choose(tmp_path: Path) -> None:
    spec, plan = job(parallelism={"actor": {"dp": 2}}, intraStageFusion="Fused")
    assert plan.schedule == "Serial"
    assert any("intraStageFusion is Fused, which has no effect" in warning for warning in plan.warnings)

    assert not applies(spec, plan)
    assert applies(*job())
    only_actor, plan_of_it = job(parallelism={"actor": {"pp": 2}})
    assert not applies(only_actor.model_copy(update={"stages": []}), plan_of_it)
    assert schedule_document(RunFolder(tmp_path).schedule(), [], 0) == {}


def test_warm_up_of_the_critic_runs_where_its_stages_are() -> None:
    spec, plan = job()
    layouts = shared_layouts(plan.parallelism, reverse=True)
    step = ppo_step(spec, plan, 1, StepFacts(0.1, False), layouts)
    assert {a.model for a in step.actions[0]} == {"critic"}
    # The critic's last stage, on rank 0, goes back at once.
    assert [a.kind for a in step.actions[0][:2]] == ["F", "B"]
    assert [a.kind for a in step.actions[1][:2]] == ["F", "F"]


def test_an_iteration_waits_for_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = job()
    searching = threading.Event()

    async def go() -> tuple[StoredSchedule | None, StoredSchedule | None]:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        before = await scheduling.current()
        monkeypatch.setattr(scheduling, "_choose", lambda *_: searching.wait(600))
        scheduling.learn(measured(0.01), 10)
        meanwhile = await asyncio.wait_for(scheduling.current(), PATIENCE)
        searching.set()
        await scheduling.close()
        return before, meanwhile

    before, meanwhile = asyncio.run(go())
    assert before is not None
    assert meanwhile == before


def test_a_search_that_has_ended_does_not_stand_in_the_next_ones_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, plan = job()
    searches: list[Times] = []

    async def go() -> None:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        monkeypatch.setattr(scheduling, "_refine", lambda times, left: searches.append(times))
        for _ in range(2):
            scheduling.learn(measured(0.01), 10)
            assert scheduling._choosing is not None
            await asyncio.wait_for(asyncio.wait([scheduling._choosing]), PATIENCE)  # nobody has collected it
        await scheduling.close()

    asyncio.run(go())
    assert len(searches) == 2


def test_a_profile_gives_the_first_schedule_its_times(tmp_path: Path) -> None:
    spec, plan = job()
    parts = {"forward": 1e-3, "backward": 2e-3, "input_gradient": 1e-3, "weight_gradient": 1e-3, "activation_bytes": 64}
    row = PassTimes(micro_batch=4, **parts)
    model = ModelTimes(
        head="lm",
        layers=4,
        hidden_size=8,
        bytes_per_value=4,
        embedding_times=[row],
        layer_times=[row],
        head_times=[row],
    )
    link = LinkTimes(latency=1e-4, bytes_per_second=1e9)
    profile = Profile(device="cpu", threads=1, tokens=16, models={"actor": model, "critic": model}, link=link)
    (tmp_path / "profile.json").write_text(profile.model_dump_json(by_alias=True))
    scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
    asyncio.run(scheduling.begin())
    found = RunFolder(tmp_path).schedule()
    assert found
    assert (found["measured"], found["profiled"]) == (False, True)
    assert found["communication"] == pytest.approx(1e-4 + 4 * 16 * 8 * 4 / 1e9)
    assert found["before"]["models"][0]["forward"] == pytest.approx(3e-3), "two layers and the embedding or head"
    assert ("Times that are drawn", "of profile.json") in schedule_document(found, [], 0)["facts"]


ALONE_OF_TWO = {"serial", "zero-bubble", "zb-v", "v-half", "v-min", "v-whole", "interleaved"}


def group_job(**plan: Any) -> tuple[RLHFJobSpec, Plan]:
    """A job with a group baseline, which trains the actor alone in two stages."""
    spec = four_ranks(**({"parallelism": {"actor": {"pp": 2, "dp": 2}}} | plan))
    ppo = {**spec.ppo.model_dump(by_alias=True, exclude_unset=True), "advantage": "grpo", "samplesPerPrompt": 4}
    document = spec.model_dump(by_alias=True, exclude_unset=True, mode="json") | {"ppo": ppo}
    found = RLHFJobSpec.model_validate(document)
    return found, make_plan(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pin", "schedule", "runs"),
    [
        ("Auto", "Auto", ALONE_OF_TWO),
        ("VShaped", "VShaped", {"zb-v", "v-half", "v-min", "v-whole"}),
        ("Serial", "Serial", {"serial"}),
        ("Fused", "Auto", ALONE_OF_TWO),
    ],
)
def test_a_model_that_trains_alone_has_a_choice_of_pipelines(
    tmp_path: Path, pin: str, schedule: str, runs: set[str]
) -> None:
    spec, plan = group_job(intraStageFusion=pin)
    assert plan.schedule == schedule
    assert applies(spec, plan)
    assert any("no critic is trained" in warning for warning in plan.warnings) == (pin == "Fused")

    async def go() -> tuple[StoredSchedule, dict[str, Layout]]:
        scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        chosen = await scheduling.current()
        assert chosen is not None
        return chosen, scheduling.layouts

    chosen, layouts = asyncio.run(go())
    assert chosen.family in runs
    assert layouts.keys() == {"actor"}
    assert (layouts["actor"].chunks == 2) == (chosen.family not in ("serial", "zero-bubble"))
    step = scheduled(ppo_step(spec, plan, 1, StepFacts(0.1, True), layouts), chosen.as_json(), plan.world_size)
    count = spec.ppo.mini_batch_size // (2 * spec.ppo.micro_batch_size)
    for mine in step.actions:
        check_actions(mine, {"actor": count}, True, chunks={"actor": layouts["actor"].chunks})
    found = RunFolder(tmp_path).schedule()
    assert {name for name, family in found["families"].items() if family["runs_here"]} <= runs
    published = {name: family["published"] for name, family in found["families"].items()}
    if pin != "Serial":
        assert published["zero-bubble"].startswith("ZB-H1")
        assert published["zb-v"] == "ZB-V (torch's ScheduleZBVZeroBubble)"
    assert "twice" not in json.dumps(published)
    drawn = schedule_document(found, [], 0)["drawn"]["ranks"]
    assert {action["model"] for rank in drawn for action in rank} == {"actor"}


def test_a_model_that_trains_alone_keeps_backwards_whole_where_they_cannot_be_split(tmp_path: Path) -> None:
    spec, plan = group_job(intraStageFusion="VShaped", recompute="Always")
    scheduling = Scheduling(spec, plan, Records(), tmp_path, lambda *_, **__: None)
    asyncio.run(scheduling.begin())
    chosen = asyncio.run(scheduling.current())
    assert chosen is not None
    assert chosen.family == "v-whole"
    warm_up = ppo_step(spec, plan, 1, StepFacts(0.1, True), scheduling.layouts)
    for lists in (chosen.actions(), warm_up.actions):
        assert {action.kind for mine in lists for action in mine} == {"F", "B"}


def test_a_stage_before_ppo_has_schedules_of_its_model(tmp_path: Path) -> None:
    """The store keeps which step ran which, so that a restarted coordinator gives a step the same one."""
    spec, _ = group_job()
    document = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    sizes = {"batchSize": 16, "microBatchSize": 2, "steps": 4}
    spec = RLHFJobSpec.model_validate({**document, "stages": ["sft", "ppo"], "sft": sizes})
    plan, records = make_plan(spec), Records()
    assert applies(spec, plan, Stage.SFT)
    assert [row.chunks for row in plan.batching if row.stage is Stage.SFT] == [2]

    def make() -> StageSchedules:
        return StageSchedules(spec, plan, records, tmp_path, lambda *_, **__: None, Stage.SFT)

    async def go() -> tuple[Step, Step, dict[str, Layout]]:
        first = make()
        await first.begin()
        await first.decide(1)
        steps, layouts = [], first.layouts
        for schedules in (first, make()):
            await schedules.begin()
            step = supervised_step(spec, plan, Stage.SFT, 1, schedules.layouts)
            steps.append(scheduled(step, schedules.of(1), plan.world_size))
            assert schedules.layouts == layouts
            assert schedules.of(0) is None
        return steps[0], steps[1], layouts

    before, after, layouts = asyncio.run(go())
    assert before == after
    for mine in before.actions:
        check_actions(mine, {"actor": 4}, True, chunks={"actor": layouts["actor"].chunks})
    assert (tmp_path / "schedule-sft.json").is_file()
    assert RunFolder(tmp_path).schedule()["chosen"] in pinned_families("Auto", 1)


def test_the_reward_models_schedule_is_kept_as_letters() -> None:
    actions = [Action(model="reward", micro_batch=0, kind=kind, chunk=1) for kind in ("F", "I", "W")]
    stored = StoredSchedule("zb-v", 1, encode([actions]))
    assert stored.encoded == ["G1J1X1"]
    assert stored.actions() == [actions]


def test_interleaved_stages_run_where_nothing_else_is_as_fast(tmp_path: Path) -> None:
    """In a loop of four stages a rank, with whole backwards; the job keeps to that when it is resumed."""
    spec, _ = group_job(recompute="Always")
    plan, records = make_plan(spec).model_copy(update={"chunks": 4}), Records()

    async def go() -> tuple[StoredSchedule, dict[str, Layout]]:
        scheduling = Scheduling(spec, plan, records, tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        chosen = await scheduling.current()
        assert chosen is not None
        return chosen, scheduling.layouts

    chosen, layouts = asyncio.run(go())
    assert chosen.family == "interleaved-4"
    assert (layouts["actor"].chunks, layouts["actor"].loop) == (4, True)
    assert asyncio.run(go())[1] == layouts
    warm_up = ppo_step(spec, plan, 1, StepFacts(0.1, True), layouts)
    for lists in (chosen.actions(), warm_up.actions):
        for mine in lists:
            check_actions(mine, {"actor": 2}, True, chunks={"actor": 4})
    assert Layout.model_validate(layouts["actor"].model_dump()) == layouts["actor"]
    assert "loop" not in Layout(pp=2).model_dump()


def test_a_stage_whose_model_has_too_few_layers_for_the_pinned_v_trains_without_one(tmp_path: Path) -> None:
    spec, _ = group_job(intraStageFusion="VShaped")
    document = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    sizes = {"batchSize": 16, "microBatchSize": 2, "steps": 4}
    spec = RLHFJobSpec.model_validate({**document, "stages": ["sft", "ppo"], "sft": sizes})
    plan = make_plan(spec)
    assert {row.stage: row.chunks for row in plan.batching} == {Stage.SFT: 2, Stage.PPO: 1}
    few = plan.model_copy(update={"batching": [row.model_copy(update={"chunks": 1}) for row in plan.batching]})
    for each, chunks in ((plan, 2), (few, 1)):
        schedules = StageSchedules(spec, each, Records(), tmp_path, lambda *_, **__: None, Stage.SFT)
        asyncio.run(schedules.begin())
        assert schedules.layouts["actor"].chunks == chunks
