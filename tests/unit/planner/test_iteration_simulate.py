"""An iteration played event by event: as the closed form says on average, one task a GPU at a time, traced as runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cli.simulated_iteration import Simulated
from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.planner.candidate import Candidate, Placement, Schedule, Share
from dovetail.planner.workload import Workload
from helpers.estimates import estimate, simulate

MODEL = ModelShape("llama", 24, 2048, 5504, 16, 16, 128, 32000)
INVENTORY = Inventory((Pool("a", gpu("NVIDIA-H100-80GB-HBM3"), 4, 8, 25e9), Pool("b", gpu("NVIDIA-A10"), 1, 8)))


def workload(batch: int = 256, tokens: int = 1024, fixed: bool = False) -> Workload:
    response = Lengths.fixed(tokens) if fixed else Lengths.long_tailed(tokens)
    return Workload(MODEL, MODEL, MODEL, MODEL, batch, 64, 1, Lengths.fixed(128), response)


def flattened(
    pp: int = 2, dp: int = 4, schedule: Schedule = "Serial", migration: float | None = None, micro: int = 2
) -> Candidate:
    trained = (Share("a", pp=pp, dp=dp, micro_batch=micro, fsdp=2),)
    scored = (Share("a", dp=pp * dp, micro_batch=4),)
    servers = (Share("a", dp=pp * dp, offload=True),)
    return Candidate(
        Placement.FLATTENING, servers, trained, trained, scored, scored, scored, schedule=schedule, migration=migration
    )


def separated(migration: float | None = None) -> Candidate:
    return Candidate(
        Placement.SEPARATION,
        (Share("a", 16, dp=16),),
        (Share("a", dp=8, fsdp=2, micro_batch=2),),
        (Share("a", 8, pp=2, dp=4, fsdp=2, micro_batch=2),),
        (Share("b", dp=4),),
        (Share("b", 4, dp=4),),
        (Share("a", 16, dp=8, micro_batch=4),),
        migration=migration,
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(
    st.sampled_from([(1, 8), (2, 4), (4, 4), (2, 8)]),
    st.sampled_from(["Serial", "TimeSharing"]),
    st.sampled_from([None, 0.2]),
    st.sampled_from([256, 1024]),
)
def test_agrees_with_the_closed_form(
    layout: tuple[int, int], schedule: Schedule, migration: float | None, tokens: int
) -> None:
    candidate, work = flattened(*layout, schedule, migration), workload(tokens=tokens)
    _agree(candidate, work)


@pytest.mark.slow
@pytest.mark.parametrize("migration", [None, 0.2])
def test_agrees_where_tasks_have_their_own_gpus(migration: float | None) -> None:
    _agree(separated(migration), workload())


@pytest.mark.slow
def test_agrees_for_a_searched_schedule() -> None:
    _agree(flattened(4, 4, "Fused"), workload())


def simulate_many(candidate: Candidate, work: Workload, iterations: int, seed: int) -> list[Simulated]:
    """Iterations with lengths drawn from the workload's distributions."""
    rng = Random(seed)
    found = []
    for _ in range(iterations):
        prompts, lengths = work.prompt.draw(work.batch, rng), work.response.draw(work.batch, rng)
        found.append(simulate(candidate, work, INVENTORY, prompts, lengths))
    return found


def _agree(candidate: Candidate, work: Workload) -> None:
    played = simulate_many(candidate, work, iterations=30, seed=1)  # the longest of a batch differs much
    expected = estimate(candidate, work, INVENTORY)
    measured = {name: statistics.mean(each.phases[name] for each in played) for name in played[0].phases}
    total = sum(measured.values())
    assert expected.seconds == pytest.approx(total, rel=0.12)
    for name in ("generation", "training"):
        assert expected.phases[name] == pytest.approx(measured[name], rel=0.15), name
    assert expected.phases["inference"] == pytest.approx(measured["inference"], rel=0.2, abs=0.05 * total)


@pytest.mark.parametrize("schedule", ["Serial", "TimeSharing"])
def test_is_exact_where_all_samples_are_alike(schedule: Schedule) -> None:
    candidate, work = flattened(4, 2, schedule), workload(fixed=True, tokens=64)
    lengths = [64] * work.batch
    played = simulate(candidate, work, INVENTORY, [128] * work.batch, lengths)
    expected = estimate(candidate, work, INVENTORY)
    for name in expected.phases:
        assert played.phases[name] == pytest.approx(expected.phases[name], rel=0.02), name


def test_a_gpu_does_one_thing_at_a_time() -> None:
    rng = Random(0)
    for candidate in (flattened(migration=0.2), flattened(schedule="TimeSharing"), separated(0.2)):
        work = workload(64)
        played = simulate(candidate, work, INVENTORY, work.prompt.draw(64, rng), work.response.draw(64, rng))
        by_gpu = defaultdict(list)
        for bar in played.bars:
            by_gpu[bar.pool, bar.gpu].append((bar.start, bar.end, bar.name))
        used = {(s.pool, i) for _, s in candidate.placed for i in s.range}
        assert set(by_gpu) == used
        for bars in by_gpu.values():
            bars.sort()
            for (_, end, first), (start, _, second) in pairwise(bars):
                assert start >= end - 1e-9, (first, second)
        assert max(bar.end for bar in played.bars) <= played.seconds + 1e-9
        assert 0 < sum(end - start for start, end, _ in by_gpu["a", 0]) <= played.seconds


def test_trains_every_micro_batch_once() -> None:
    work = workload(64)
    candidate = flattened(2, 2, "TimeSharing")
    played = simulate(candidate, work, INVENTORY, [128] * 64, [100] * 64)
    first = [bar.name for bar in played.bars if (bar.pool, bar.gpu, bar.lane) == ("a", 0, "trainer")]
    count = 64 // (2 * 2)
    wanted = {f"{model} {kind}{m}" for model in ("actor", "critic") for kind in "FB" for m in range(count)}
    assert sorted(n for n in first if n != "optimizer") == sorted(wanted)


def test_models_that_train_apart_are_drawn_by_their_names() -> None:
    work, candidate = workload(64), separated()
    played = simulate(candidate, work, INVENTORY, [128] * 64, [100] * 64)
    for model, share in (("actor", candidate.actor_training[0]), ("critic", candidate.critic_training[0])):
        drawn = {b.name for b in played.bars if b.lane == "trainer" and b.pool == share.pool and b.gpu in share.range}
        assert f"{model} step" in drawn
        assert {name.split()[0] for name in drawn} == {model}


def test_a_seed_gives_the_same_iterations() -> None:
    once, again, other = (
        [each.seconds for each in simulate_many(separated(), workload(64), 3, seed)] for seed in (4, 4, 5)
    )
    assert once == again != other


def test_passes_before_training_and_gathered_tails() -> None:
    rng = Random(1)
    work = workload(128)
    prompts, lengths = work.prompt.draw(128, rng), work.response.draw(128, rng)
    candidate = flattened()
    ours = simulate(candidate, work, INVENTORY, prompts, lengths)
    passed = simulate(replace(candidate, folded=False), work, INVENTORY, prompts, lengths)
    assert passed.phases["inference"] > ours.phases["inference"]
    gathered = simulate(flattened(migration=0.2), work, INVENTORY, prompts, lengths)
    assert gathered.migrated > 0 == ours.migrated


def test_inference_on_trainers_follows_the_samples_though_the_actors_pass_waits_for_all() -> None:
    rng = Random(1)
    work = workload(128)
    scored = (Share("a", dp=8, micro_batch=4),)
    candidate = replace(separated(0.2), reference=scored, reward=scored, critic=scored, folded=False)
    played = simulate(candidate, work, INVENTORY, work.prompt.draw(128, rng), work.response.draw(128, rng))
    first = {name: min(b.start for b in played.bars if b.name == name) for name in ("reference", "actor")}
    generated = played.phases["swap"] + played.phases["generation"]
    assert first["reference"] < 0.8 * generated
    assert first["actor"] >= generated - 1e-9
