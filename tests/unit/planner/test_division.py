"""Actor and critic on trainer ranks of their own: divisions of the ranks, and a job that trains so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.schedules.scheduling import Scheduling
from dovetail.coordinator.schedules.step_commands import StepFacts, ppo_step
from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, applies, scheduled
from dovetail.coordinator.schedules.training_schedule import Times, choose_dedicated, rank_actions, training_problem
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.protocol.files.machine_profile import LinkTimes, ModelTimes, PassTimes, Profile
from dovetail.protocol.messages import CommandResult, StageTimes
from dovetail.protocol.plan import Layout, Plan, coordinates, divisions, holds, rank_at, same_batches
from dovetail.trainer.engine.executor import check_actions


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search finds in more time is not the subject here."""
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.3)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Parallelism], int]:
    """Layouts over the same ranks, and micro-batches that their data-parallel ranks can share."""
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    pps = [pp for pp in range(1, world + 1) if world % pp == 0]
    layouts = {n: Parallelism(pp=(pp := draw(st.sampled_from(pps))), dp=world // pp) for n in ("actor", "critic")}
    return layouts, world * draw(st.integers(1, 3))


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs(), st.integers(1, 2))
def test_every_division_runs(job: tuple[dict[str, Parallelism], int], mini_batches: int) -> None:
    layouts, micro_batches = job
    world = world_size(layouts["actor"])
    found = divisions(layouts, micro_batches)
    if world > 1 and layouts["actor"].dp == layouts["critic"].dp < world:
        assert found, "whole pipelines can always be cut shorter"
        assert all(same_batches(layouts, each) for each in found)
    for division in found:
        for rank in range(world):
            assert sum(holds(rank, layout) for layout in division.values()) == 1, "a rank has one model"
        for name, layout in division.items():
            assert layout.pp <= layouts[name].pp
            assert micro_batches % layout.dp == 0
            own = [rank for rank in range(world) if holds(rank, layout)]
            assert [rank_at(coordinates(rank, layout), layout) for rank in own] == own
        schedule, where = choose_dedicated([division], micro_batches, mini_batches, Times(), 1.0)
        counts = {name: micro_batches // layout.dp for name, layout in where.items()}
        lists = rank_actions(schedule, where)
        assert len(lists) == world
        for rank, mine in enumerate(lists):
            held = {n: c * mini_batches for n, c in counts.items() if holds(rank, where[n])}
            check_actions(mine, held, True, mini_batches)


def test_ranks_keep_their_micro_batches_where_they_can() -> None:
    pipelines = {"actor": Parallelism(pp=4), "critic": Parallelism(pp=2, dp=2)}
    found = divisions(pipelines, 4)
    assert [(d["actor"].pp, d["actor"].dp, d["critic"].pp, d["critic"].dp) for d in found] == [(2, 1, 1, 2)]
    assert [d["critic"].first for d in found] == [2]
    without = {"actor": Parallelism(dp=2), "critic": Parallelism(dp=2)}
    assert [(d["actor"].dp, d["critic"].dp) for d in divisions(without, 4)] == [(1, 1)]
    assert divisions({"actor": Parallelism(), "critic": Parallelism()}, 4) == []


def test_a_rank_outside_a_layout_has_no_place() -> None:
    layout = Layout(pp=2, first=2)
    assert [holds(rank, layout) for rank in range(5)] == [False, False, True, True, False]
    with pytest.raises(ValueError, match="rank 1 is outside a layout of 2 ranks from rank 2 on"):
        coordinates(1, layout)


# ---------------------------------------------------------------- times


def test_times_measured_on_all_ranks_tell_those_on_fewer_and_back() -> None:
    shared = {"actor": Layout(pp=4), "critic": Layout(pp=4, reverse=True)}
    apart = {"actor": Layout(pp=3), "critic": Layout(pp=1, first=3)}
    counts = {"actor": 2, "critic": 2}

    def part(rank: int, model: str, seconds: float, transfer: float | None) -> StageTimes:
        times = {"F": [seconds] * 2, "B": [2 * seconds] * 2}
        return StageTimes(rank=rank, model=model, seconds=times, activation=[12.0] * 2, transfer=transfer)

    times = Times()
    times.add([part(r, m, r + 1.0, 0.5 if r < 3 else None) for r in range(4) for m in ["actor"]], shared)
    times.add([part(r, "critic", 0.5, None) for r in range(4)], shared)
    problem = training_problem(apart, counts, 1, times)
    assert problem.array(0, "forward").tolist() == [[10 / 3] * 2] * 3 + [[0, 0]]
    assert problem.array(1, "forward").tolist() == [[0, 0]] * 3 + [[2.0] * 2]
    assert problem.array(1, "backward")[3].tolist() == [4.0] * 2
    assert problem.array(0, "activation")[0].tolist() == [16.0] * 2
    assert problem.communication == 0.5

    own = Times()
    own.add([part(r, "actor", 1.0, 0.25 if r < 2 else None) for r in range(3)], apart)
    own.add([part(3, "critic", 4.0, None)], apart)
    back = training_problem(shared, counts, 1, own)
    assert back.array(0, "forward").tolist() == [[0.75] * 2] * 4
    assert back.array(1, "forward").tolist() == [[1.0] * 2] * 4
    assert back.communication == 0.25
    assert training_problem(apart, counts, 1, own).latencies[0, 1] == 0.25


def test_times_of_ranks_of_their_own_tell_those_of_data_parallel_ranks() -> None:
    apart = {"actor": Layout(), "critic": Layout(first=1)}
    times = Times()
    for rank, model in enumerate(apart):
        seconds = {"F": [1.0, 3.0], "B": [2.0, 6.0]}
        times.add([StageTimes(rank=rank, model=model, seconds=seconds, activation=[8.0, 8.0])], apart)
    shared = {"actor": Layout(dp=2), "critic": Layout(dp=2)}
    problem = training_problem(shared, {"actor": 1, "critic": 1}, 1, times)
    assert [problem.array(m, "forward").tolist() for m in (0, 1)] == [[[2.0]]] * 2


# ---------------------------------------------------------------- during a job


def job(replicas: int = 2, pin: str = "Dedicated", **parallelism: int) -> tuple[RLHFJobSpec, Plan]:
    document: dict[str, Any] = {
        "stages": ["ppo"],
        "groups": [
            {"name": "t", "roles": ["trainer"], "replicas": replicas},
            {"name": "r", "roles": ["rollout"], "replicas": 1},
        ],
        "ppo": {"globalBatchSize": 32, "miniBatchSize": 16, "microBatchSize": 4, "epochs": 1},
        "plan": {"parallelism": {"actor": parallelism}, "intraStageFusion": pin},
    }
    spec = RLHFJobSpec.model_validate(document)
    return spec, make_plan(spec)


class Records(dict[str, Any]):
    """A store in memory."""

    def put(self, key: str, value: object) -> None:
        self[key] = json.loads(json.dumps(value))


def begun(spec: RLHFJobSpec, plan: Plan, records: Records, folder: Path, result: CommandResult | None = None) -> Any:
    async def go() -> tuple[Scheduling, StoredSchedule | None]:
        scheduling = Scheduling(spec, plan, records, folder, lambda *_, **__: None)
        await scheduling.begin()
        if result is not None:
            scheduling.learn(result, 10)
            await scheduling.close()
        return scheduling, await scheduling.current()

    return asyncio.run(go())


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}])
def test_a_pinned_job_has_the_actor_on_one_rank_and_the_critic_on_the_other(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    spec, plan = job(**layout)
    assert plan.schedule == "Dedicated"
    assert applies(spec, plan)
    records = Records()
    count = 16 // 4
    seconds = {"F": [0.01] * count, "B": [0.02] * count}
    parts = [
        StageTimes(rank=rank, model=model, seconds=seconds, activation=[1e6] * count)
        for rank, model in enumerate(("actor", "critic"))
    ]
    result = CommandResult(id="step", ok=True, times=parts)
    scheduling, chosen = begun(spec, plan, records, tmp_path, result)
    assert chosen.family == "dedicated"
    assert [{a.model for a in mine} for mine in chosen.actions()] == [{"actor"}, {"critic"}]
    step = scheduled(ppo_step(spec, plan, 1, StepFacts(0.1, True), scheduling.layouts), chosen.as_json(), 2)
    check_actions(step.actions[1], {"critic": 8}, True, 2)
    warm_up = ppo_step(spec, plan, 1, StepFacts(0.1, False), scheduling.layouts)
    assert [len(mine) for mine in warm_up.actions] == [0, 2 * 4]
    found = RunFolder(tmp_path).schedule()
    assert found
    assert found["measured"]
    assert found["families"]["dedicated"]["runs_here"]
    assert found["families"]["dedicated"]["makespan"] == pytest.approx(2 * count * 0.03)
    # Without pipelines serial training has no bubbles; with two stages one a model and mini-batch.
    bubbles = 2 if "pp" in layout else 0
    assert found["families"]["serial"]["makespan"] == pytest.approx(2 * (2 * count + bubbles) * 0.015)
    assert found["families"]["dedicated"]["description"] == "each model on ranks of its own"
    again, _ = begun(spec, plan, records, tmp_path)
    assert again.layouts == scheduling.layouts, "a coordinator that comes back must find the models where they were"


def times(slow: float) -> CommandResult:
    """Of two ranks that share both models; the critic's passes take `slow` times as long."""
    parts = [
        StageTimes(
            rank=rank,
            model=model,
            seconds={"F": [0.01 * factor] * 4, "B": [0.02 * factor] * 4},
            activation=[1e6] * 4,
        )
        for rank in (0, 1)
        for model, factor in (("actor", 1.0), ("critic", slow))
    ]
    return CommandResult(id="step", ok=True, times=parts)


@pytest.mark.slow
def test_auto_shares_the_ranks_where_dividing_them_gains_little_and_says_what_it_would_lose(tmp_path: Path) -> None:
    spec, plan = job(pin="Auto", pp=2)
    scheduling, chosen = begun(spec, plan, Records(), tmp_path, times(slow=5.0))
    assert chosen.family != "dedicated"
    assert not any(layout.first for layout in scheduling.layouts.values())
    found = RunFolder(tmp_path).schedule()
    assert found
    own = found["families"]["dedicated"]
    assert not own["runs_here"]
    # The critic alone on one rank: 8 micro-batches of two stages' passes.
    assert own["makespan"] == pytest.approx(8 * 2 * 5 * 0.03)
    assert own["makespan"] > 1.5 * found["after"]["makespan"]


@pytest.mark.slow
def test_auto_divides_the_ranks_where_messages_take_long(tmp_path: Path) -> None:
    parts = {"forward": 1e-3, "backward": 2e-3, "input_gradient": 1e-3, "weight_gradient": 1e-3, "activation_bytes": 64}
    row = [PassTimes(micro_batch=4, **parts)]
    model = ModelTimes(
        head="lm",
        layers=4,
        hidden_size=8,
        bytes_per_value=4,
        embedding_times=row,
        layer_times=row,
        head_times=row,
    )
    link = LinkTimes(latency=0.05, bytes_per_second=1e9)
    profile = Profile(device="cpu", threads=1, tokens=16, models={"actor": model, "critic": model}, link=link)
    (tmp_path / "profile.json").write_text(profile.model_dump_json(by_alias=True))
    spec, plan = job(pin="Auto", pp=2)
    scheduling, chosen = begun(spec, plan, Records(), tmp_path)
    assert chosen.family == "dedicated"
    assert scheduling.layouts["critic"].first == 1
    found = RunFolder(tmp_path).schedule()
    assert found
    assert found["families"]["dedicated"]["makespan"] == pytest.approx(2 * 4 * 6 * 3e-3)
    assert found["speedup"] > 1.5


def test_ranks_that_cannot_be_divided_are_refused_when_planning() -> None:
    with pytest.raises(PlanError, match="intraStageFusion is Dedicated, but the 1 trainer ranks cannot be divided"):
        job(replicas=1, dp=1)
