"""The tail of generation gathers on few servers while others are freed: every answer stays what it was."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.samples.fusion.fusion import ASSUMED, Fusion, StageFusion
from dovetail.coordinator.samples.fusion.threshold import Decision
from dovetail.coordinator.samples.in_flight import Generated, GenerationSettings, reason_to_leave
from dovetail.coordinator.samples.migrations import Migration
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Instance, InstanceHealth
from dovetail.fusion.stage import scan
from dovetail.manifest.types import RLHFJobSpec
from helpers.generation_job import FAST, Job, play, until
from helpers.jobs import MANIFEST

Unfinished = Sequence[tuple[Key, str | None]]


def stage(threshold: int | None, names: Sequence[str] = ("r0", "r1", "r2")) -> StageFusion:
    prediction = scan([5, 9], [3, 3], [ASSUMED] * len(names), [threshold and min(threshold, 2)])[0]
    decision = Decision(threshold, 0.2, "a test's", prediction, 1.0, 1.0, {})
    return StageFusion(dict.fromkeys(names, ASSUMED), 200, decision)


def test_gathers_once_at_the_threshold_where_most_samples_are() -> None:
    fusion = stage(4)
    left: list[tuple[Key, str | None]] = [(Key(1, i, 0), name) for i, name in enumerate(["r1", "r1", "r0", "r2", "r2"])]
    assert fusion.gather(left, ["r0", "r1", "r2"]) is None
    assert fusion.gather(left[:4], ["r0", "r1", "r2"]) == ("r1",)
    assert (fusion.destinations, fusion.remaining, fusion.moves) == (("r1",), 4, 2)
    assert fusion.gather(left[:3], ["r0", "r1", "r2"]) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60))
@settings(deadline=None)
def test_a_plan_splits_the_rollouts_and_fits_what_is_left(owners: list[int], threshold: int) -> None:
    """`owners`: each unfinished sample's rollout; 3: it waits for one."""
    names = ["r0", "r1", "r2"]
    fusion = stage(threshold)
    left: list[tuple[Key, str | None]] = [(Key(1, i, 0), None if o == 3 else names[o]) for i, o in enumerate(owners)]
    destinations = fusion.gather(left, names)
    if destinations is None:
        assert fusion.freed == ()
        return
    assert len(left) <= threshold
    assert sorted([*destinations, *fusion.freed]) == names
    assert fusion.freed
    busiest = max(owners.count(k) for k in range(3))
    assert max(owners.count(names.index(name)) for name in destinations) == busiest
    assert len(left) <= sum(max(ASSUMED.bs_max, owners.count(names.index(name))) for name in destinations)
    assert fusion.moves == sum(owner not in destinations for _, owner in left)


def test_the_last_threshold_counts_until_there_is_a_new_one() -> None:
    fusion = stage(4)
    fusion.decision, fusion.provisional = None, 2
    left: list[tuple[Key, str | None]] = [(Key(1, i, 0), f"r{i}") for i in range(3)]
    assert fusion.gather(left, ["r0", "r1", "r2"]) is None
    assert fusion.gather(left[:2], ["r0", "r1", "r2"]) is not None


def test_a_roomy_destination_takes_more_than_costs_its_steps_nothing() -> None:
    fusion = stage(60, ["r0", "r1"])
    fusion.profiles = dict.fromkeys(fusion.profiles, replace(ASSUMED, saturation=2))
    left: list[tuple[Key, str | None]] = [(Key(1, i, 0), f"r{i % 2}") for i in range(9)]
    assert fusion.gather(left, ["r0", "r1"]) is None
    assert fusion.decision is not None
    fusion.decision = replace(fusion.decision, roomy=True)
    assert fusion.gather(left, ["r0", "r1"]) == ("r0",)
    assert fusion.moves == 4


@pytest.mark.parametrize("threshold", [None, 0])
def test_nobody_migrates_when_off_or_at_zero(threshold: int | None) -> None:
    assert stage(threshold).gather([(Key(1, 0, 0), "r0")], ["r0", "r1"]) is None


def test_scorers_work_beside_idle_servers_only_and_beside_all_in_the_end() -> None:
    fusion, idle = stage(4), {"r1"}
    assert [n for n in ("r0-scorer", "r1-scorer") if fusion.may_score(n, lambda r: r in idle)] == ["r1-scorer"]
    serial = stage(None)
    assert not serial.may_score("r1-scorer", lambda r: True)
    for one in (fusion, serial):
        one.generated = True
        assert one.may_score("r0-scorer", lambda r: False)


def test_the_manifest_knows_the_threshold() -> None:
    spec = yaml.safe_load(MANIFEST)["spec"]
    assert RLHFJobSpec.model_validate(spec).plan.inter_stage_fusion == "Auto"


def gather_at(count: int, destination: str = "r0") -> tuple[list[int], object]:
    asked: list[int] = []

    def tail(unfinished: Unfinished, eligible: Collection[str]) -> Collection[str] | None:
        asked.append(len(unfinished))
        return [destination] if len(unfinished) <= count else None

    return asked, tail


@pytest.mark.parametrize("count", [16, 9, 3])
def test_the_tail_moves_and_no_answer_changes(tmp_path: Path, count: int) -> None:
    async def scenario(job: Job) -> None:
        servers = [await job.server(f"r{i}", step=0.005) for i in range(3)]
        _, tail = gather_at(count)
        idle: list[bool] = []
        result = await job.generate(
            tail,  # type: ignore[arg-type]
            lambda *_: idle.append(job.generator.idle("r1") and job.generator.idle("r2")),
        )
        job.check()
        job.reported_once()
        assert 0 < len(result.migrations) <= sum(len(s.aborted) for s in servers[1:])
        assert result.retries == 0, "a planned move is no failure"
        assert {(m.source, m.destination, m.reason) for m in result.migrations} <= {
            ("r1", "r0", "tail"),
            ("r2", "r0", "tail"),
        }
        lengths = {s.key: len(s.prompt_tokens) + len(s.tokens) for s in job.finished}
        assert all(0 < m.tokens < lengths[m.key] and m.seconds > 0 for m in result.migrations)
        times, left = zip(*result.tail, strict=True)
        assert list(left) == sorted(left, reverse=True)
        assert (left[0], left[-1]) == (24, 0)
        assert list(times) == sorted(times)
        assert servers[0].aborted == []
        assert any(idle)

    play(tmp_path, scenario, count=24, settings=FAST)


def test_without_its_destination_the_tail_goes_on_elsewhere(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        first, second = await job.server("r0", step=0.005), await job.server("r1", step=0.005)
        _, tail = gather_at(16)
        first.die_after = 8 * 12
        await job.generate(tail)  # type: ignore[arg-type]
        job.check()
        job.reported_once()
        assert len(second.requests) > 8, "it took the tail back"

    play(tmp_path, scenario, settings=FAST)


def test_a_source_that_dies_as_it_is_left_costs_nothing(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0", step=0.005)
        source = await job.server("r1", step=0.005)
        source.faults["deaf"] = None
        _, tail = gather_at(16)

        def kill(done: int, total: int, tokens: int) -> None:
            if source.aborted:
                source.die_after = 1

        await job.generate(tail, kill)  # type: ignore[arg-type]
        job.check()
        job.reported_once()

    play(tmp_path, scenario, settings=FAST)


def test_a_pod_that_is_about_to_end_gives_its_samples_away(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        leaving = await job.server("r0", step=0.01)
        await job.server("r1", step=0.01)
        task = asyncio.create_task(job.generate())
        await until(lambda: leaving.tokens_sent > 40)
        job.fleet.retire("r0")
        result = await task
        job.check()
        job.reported_once()
        assert {(m.source, m.destination, m.reason) for m in result.migrations} == {("r0", "r1", "drain")}

    play(tmp_path, scenario, settings=FAST)


def test_a_silent_suspect_gives_its_samples_away_if_others_are_there() -> None:
    instance = Instance("r0", "rollout", "g", "", "1", InstanceHealth.SUSPECT, True, 1, {}, 0.0, "")
    patience = GenerationSettings(suspect=10.0)
    assert reason_to_leave(instance, 11.0, True, patience) == "suspect"
    assert reason_to_leave(instance, 9.0, True, patience) is None, "its tokens still come"
    assert reason_to_leave(instance, 11.0, False, patience) is None, "nobody else is there"
    assert reason_to_leave(replace(instance, health=InstanceHealth.HEALTHY), 11.0, True, patience) is None
    assert (
        reason_to_leave(replace(instance, health=InstanceHealth.HEALTHY, draining=True), 0.0, False, patience)
        == "drain"
    )


def test_a_server_that_comes_in_the_tail_gets_nothing(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0", step=0.01)
        await job.server("r1", step=0.01)
        asked, tail = gather_at(16)

        task = asyncio.create_task(job.generate(tail))  # type: ignore[arg-type]
        await until(lambda: bool(asked))
        late = await job.server("r2")
        await task
        job.check()
        assert late.requests == []

    play(tmp_path, scenario, settings=FAST)


def test_what_a_migration_takes_is_learnt_without_the_prefills_of_those_that_came_along() -> None:
    def move(sample: int, to: str, reason: str, seconds: float) -> Migration:
        return Migration(Key(1, sample, 0), "r9", to, "tokens", reason, 100, 400, seconds, 5.0)

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        fusion = Fusion(RLHFJobSpec.model_validate(yaml.safe_load(MANIFEST)["spec"]), store, lambda event, **_: None)
        # The last one's first token comes after all prefills: 0.15 s, and 0.1 s for each of them.
        moves = [move(i, "r0", "tail", 0.25 + i / 10) for i in range(4)]
        moves += [move(9, "r1", "tail", 0.25), move(8, "r1", "drain", 9.0)]
        fusion.learn({"r0": "g", "r1": "g"}, Generated(migrations=moves), [])
        profile = fusion.measured("g").profile()
        assert profile.moving_seconds(1000) == (pytest.approx(1.0), True)
        assert profile.migration_seconds == pytest.approx(0.15)
        store.close()
