"""Iterations on shared cores: what a machine's costs say of them, and the costs from iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.planner.cpus import IterationWork, batch_seconds, best_stage, phases, stage_times, training_seconds
from dovetail.protocol.files.machine_profile import Cost, Machine
from dovetail.tools.calibrate.fit import FitError, MeasuredIteration, fit, nonnegative
from helpers.two_cores import MACHINE

ALL = ("reference", "reward", "critic")


def work(batch: int = 32, rollouts: int = 1, seed: int = 0, longest: int = 64, **changes: object) -> IterationWork:
    lengths = np.minimum(np.random.default_rng(seed).geometric(0.05, batch), longest)
    made = IterationWork(
        prompts=(16,) * batch,
        responses=tuple(int(n) for n in lengths),
        scores=(ALL,) * rollouts,
        models=("actor", "critic"),
        mini_batch=batch // 2,
        micro_batch=4,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def observed(each: IterationWork, machine: Machine = MACHINE) -> MeasuredIteration:
    """As it would be measured if the machine were exactly so."""
    stage = stage_times(each, machine, None)
    lengths = np.sort(each.responses)
    generation = machine.generation
    slower = max(1.0, each.ranks * machine.training.cores / machine.cores)
    scoring = max(1.0, each.rollouts * machine.scoring.cores / machine.cores)
    passes = {
        model: slower * (cost.fixed * each.steps * each.micro_batches + cost.each * each.tokens) / each.pp
        for model, cost in machine.training.models.items()
    }
    ends = [
        generation.begin
        + len(lengths) * generation.sample
        + n * generation.step
        + np.minimum(lengths, n).sum() * generation.token
        for n in lengths
    ]
    return MeasuredIteration(
        work=each,
        phases=phases(best_stage(each, machine), machine) | {"generation": stage.generated},
        finished=[(float(end), len(lengths) - i - 1) for i, end in enumerate(ends)],
        batches=[
            (held, tokens, scoring * batch_seconds(machine, held, tokens))
            for held in each.scores
            for tokens in (150, 300, 450)
        ],
        passes=passes,
        waited=machine.training.straggling * sum(passes.values()) * (each.dp > 1),
    )


def test_costs_are_found_again_from_iterations() -> None:
    """The shapes that `dovetail profile --iterations` runs, then others that were not among them."""
    interleaved = (("reference",), ("reward", "critic"))
    shapes = [
        [work(seed=s) for s in range(3)],
        [work(seed=s, longest=32, micro_batch=1, epochs=2) for s in range(3)],
        [work(seed=s, rollouts=2, dp=2) for s in range(3)],
        [work(seed=s, rollouts=2, pp=2, scores=interleaved, schedule="Fused") for s in range(3)],
    ]
    found = fit([observed(each) for group in shapes for each in group], 2, 0.05)
    for other in (
        work(64, 2, 7, dp=2, micro_batch=8),
        work(48, 1, 8, micro_batch=2, epochs=3),
        work(16, 2, 9, dp=2, micro_batch=2, scores=interleaved, fusion=(None, 0.0, 0.2)),
        work(64, 2, 10, pp=2, schedule="Serial"),
    ):
        expected, got = (phases(best_stage(other, each), each) for each in (MACHINE, found))
        assert sum(got.values()) == pytest.approx(sum(expected.values()), rel=0.05)
        assert got["generation"] == pytest.approx(expected["generation"], rel=0.05)
        assert got["training"] == pytest.approx(expected["training"], rel=0.05)


def test_iterations_that_cannot_tell_are_refused() -> None:
    with pytest.raises(FitError, match="none of several"):
        fit([observed(work())], 2)


def test_coefficients_below_zero_are_left_out() -> None:
    assert nonnegative([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], [3.0, 2.9, 2.7])[1] == 0.0
    assert nonnegative([[1.0, 1.0], [1.0, 2.0]], [3.0, 5.0]) == pytest.approx([1.0, 2.0])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=24),
    rollouts=st.integers(1, 3),
    cores=st.integers(1, 4),
    fusion=st.sampled_from([None, 0.0, 0.3]),
    slots=st.integers(1, 8),
)
def test_no_stage_beats_its_cores(
    lengths: list[int], rollouts: int, cores: int, fusion: float | None, slots: int
) -> None:
    """Whatever is shared, the work of all processes takes as long as all cores need for it; what runs alone takes at
    least as long on fewer cores; and every sample is scored."""
    each = replace(work(len(lengths), rollouts), responses=tuple(lengths), fusion=(fusion,), max_concurrent=slots)
    machine = MACHINE.model_copy(update={"cores": cores})
    stage = stage_times(each, machine, fusion)
    generation, scoring = machine.generation, machine.scoring
    tokens = sum(lengths) + sum(each.prompts)
    least = generation.cores * sum(lengths) * generation.token + scoring.cores * (
        batch_seconds(machine, ALL, tokens) - scoring.batch
    )
    assert stage.end >= least / cores
    assert stage.end >= stage.generated >= max(lengths) * generation.step
    more = stage_times(each, MACHINE.model_copy(update={"cores": cores + 1}), None)
    assert more.end <= stage_times(each, machine, None).end * (1 + 1e-9)


def test_idle_scorers_work_while_others_generate() -> None:
    """One long response: the other rollout's scorer has the time."""
    each = replace(work(16, 2), responses=(60,) + (2,) * 15)
    apart, fused = stage_times(each, MACHINE, None), stage_times(each, MACHINE, 0.0)
    assert fused.end < apart.end
    assert fused.end - fused.generated < apart.end - apart.generated


def test_sharing_costs_as_much_as_is_missing() -> None:
    """Two trainers that want 1.3 cores each, on two cores and on three."""
    two = training_seconds(work(dp=2), MACHINE)
    three = training_seconds(work(dp=2), MACHINE.model_copy(update={"cores": 3}))
    costs = MACHINE.training
    fixed = costs.begin + 2 * (costs.step + costs.exchange)
    assert (two - fixed) / (three - fixed) == pytest.approx(1.3)


def test_schedules_of_a_pipeline_rank_as_they_must() -> None:
    times = [training_seconds(work(pp=2, schedule=family), MACHINE) for family in ("Fused", "TimeSharing", "Serial")]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_values_of_a_shared_body_take_a_forward_pass_first() -> None:
    """A third of a pass forward and backward, once, however many epochs follow."""
    plain, shared = (work(models=("actor",), epochs=2, values_first=first) for first in (False, True))
    once = replace(plain, epochs=1)
    steps = MACHINE.training.step * plain.steps / 2
    forward = (training_seconds(once, MACHINE) - MACHINE.training.begin - steps) / 3
    more = training_seconds(shared, MACHINE) - training_seconds(plain, MACHINE)
    assert more == pytest.approx(forward)


def test_ranks_of_their_own_save_the_pipeline_and_lose_by_uneven_models() -> None:
    two = {s: training_seconds(work(pp=2, schedule=s), MACHINE) for s in ("Dedicated", "Fused", "Serial")}
    assert two["Dedicated"] < two["Serial"]
    heavy = MACHINE.training.models | {"actor": Cost(fixed=0.1, each=2e-3)}
    uneven = MACHINE.model_copy(update={"training": MACHINE.training.model_copy(update={"models": heavy})})
    assert training_seconds(work(pp=2, schedule="Dedicated"), uneven) > training_seconds(work(pp=2), uneven)
