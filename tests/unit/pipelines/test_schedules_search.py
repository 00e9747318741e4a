"""Fused schedules: bounds, families, search, choice."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    CHUNKED,
    FAMILIES,
    DeadlockError,
    ModelPipelines,
    ProblemError,
    ScheduleProblem,
    SearchEffort,
    Shape,
    check_steps,
    choose,
    document,
    evaluate,
    family_instance,
    family_names,
    family_of,
    find,
    fixed_orders,
    fused_problem,
    lower_bound,
    serial_memory,
    steps,
)
from dovetail.pipelines.search import rounds
from dovetail.pipelines.search.steady_state import drop, restore

QUICK = SearchEffort(scale=0.003, workers=1, memory=False)


@st.composite
def problems(draw):
    """Times and sizes that differ by model, pipeline, stage and micro-batch."""
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    k1, k2 = draw(st.sampled_from([(a, b) for a in (1, 2) for b in (1, 2, 4) if ranks % a == 0 == ranks % b]))
    total = k1 * k2 * draw(st.integers(1, 2))
    count = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    parts = draw(st.sampled_from([1, 2, 3]))

    def model(name, k):
        shape = (k, ranks // k * parts, total // k * count)
        f, b, a = (rng.integers(1, 6, shape).astype(float) for _ in range(3))
        return ModelPipelines(
            name, ranks // k, total // k, f, b, a, k, optimizer_step=float(rng.integers(0, 3)), parts=parts
        )

    latency = rng.integers(0, 3, (ranks, ranks)).astype(float) if draw(st.booleans()) else float(rng.integers(0, 3))
    return ScheduleProblem((model("actor", k1), model("critic", k2)), latency, count)


def slow_makespan(schedule):
    """Times computed anew from the schedule's order alone, by repeated relaxation; no code shared with the search."""
    problem = schedule.instance.problem
    coupling = schedule.instance.coupling.value
    groups = {m.name: m.micro_batches for m in problem.models}
    stages = {m.name: m.stages * schedule.instance.placement.chunks for m in problem.models}
    rows = [[] for _ in range(problem.ranks)]
    for p in schedule.passes():
        rows[p.rank].append(p)
    homes = {(p.model, p.pipeline, p.stage): p.rank for row in rows for p in row}
    length = {(p.model, p.pipeline, p.stage, p.micro_batch, p.kind): p.end - p.start for row in rows for p in row}
    end = dict.fromkeys(length, 0.0)
    back = "I" if schedule.instance.split else "B"
    last = "W" if schedule.instance.split else "B"
    names = [m.name for m in problem.models]
    step = {m.name: m.optimizer_step for m in problem.models}
    for _ in range(len(length) + 1):
        changed = False
        for row in rows:
            free = 0.0
            for p in row:
                key = (p.model, p.pipeline, p.stage, p.micro_batch, p.kind)
                start = free
                if p.kind == "F":
                    if p.stage:
                        home = homes[p.model, p.pipeline, p.stage - 1]
                        latency = 0.0 if home == p.rank else problem.latencies[home, p.rank]
                        start = max(start, end[p.model, p.pipeline, p.stage - 1, p.micro_batch, "F"] + latency)
                    block = p.micro_batch // groups[p.model]
                    for name in names:
                        need = block
                        if coupling == "rolled" and name != p.model:
                            need = 0
                        if coupling == "serial" and p.model == names[1] and name == names[0]:
                            need = block + 1
                        waited = [
                            e + step[name]
                            for (m, _, _, q, k), e in end.items()
                            if m == name and k == last and q < need * groups[name]
                        ]
                        start = max([start, *waited])
                elif p.kind == back:
                    start = max(start, end[p.model, p.pipeline, p.stage, p.micro_batch, "F"])
                    if p.stage + 1 < stages[p.model]:
                        home = homes[p.model, p.pipeline, p.stage + 1]
                        latency = 0.0 if home == p.rank else problem.latencies[home, p.rank]
                        start = max(start, end[p.model, p.pipeline, p.stage + 1, p.micro_batch, back] + latency)
                else:
                    start = max(start, end[p.model, p.pipeline, p.stage, p.micro_batch, "I"])
                free = start + length[key]
                changed |= free != end[key]
                end[key] = free
        if not changed:
            return max(end.values())
    raise AssertionError("the schedule has a cycle")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from(sorted([*FAMILIES, *CHUNKED])))
def test_every_family_trains_everything_within_its_bounds(problem, name):
    family = family_of(name)
    found = find(problem, family, QUICK)
    check_steps(problem, steps(found))
    assert found.makespan >= found.bound * (1 - 1e-9)
    assert found.peak >= problem.least_memory_of(family.chunks, family.shape is Shape.LOOP) - 1e-9
    assert slow_makespan(found) == pytest.approx(found.makespan)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problems(), st.floats(1.0, 1.5), st.sampled_from(["fused", "fused-rolled", "shared", "fused-v", "v-half"]))
def test_a_memory_limit_is_never_exceeded(problem, slack, name):
    limit = problem.least_memory * slack
    limited = ScheduleProblem(problem.models, problem.communication, problem.mini_batches, limit)
    try:
        found = find(limited, family_of(name), QUICK)
    except ProblemError:
        return  # the tightest limits may need a longer search
    assert found.peak <= limit * (1 + 1e-9)
    check_steps(limited, steps(found))


def exhaustive(instance, fits=lambda found: True):
    """The best makespan over all orders that fit; for tiny problems."""
    codes = [3 * m + k for m in (0, 1) for k in range(instance.kinds) for _ in range(int(instance.total[m]))]
    orders = sorted(set(itertools.permutations(codes)))
    best = np.inf
    for chosen in itertools.product(orders, repeat=instance.ranks):
        try:
            found = evaluate(instance, np.array(chosen))
        except DeadlockError:
            continue
        if found.makespan < best and fits(found):
            best = found.makespan
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "shared"])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_optimum_of_tiny_problems(name, seed):
    rng = np.random.default_rng(seed)

    def model(label, m):
        f, b = (rng.integers(1, 6, (1, 2, m)).astype(float) for _ in range(2))
        return ModelPipelines(label, 2, m, f, b)

    problem = ScheduleProblem((model("actor", 2), model("critic", 1)), communication=1.0)
    best = exhaustive(family_instance(problem, FAMILIES[name]))
    assert find(problem, FAMILIES[name], SearchEffort(scale=0.01, workers=1)).makespan == best


@pytest.mark.parametrize(
    ("actor", "critic", "count", "forward", "bound"),
    [(8, 4, 8, (5, 2), 225), (8, 8, 8, (5, 2), 225), (8, 8, 16, (5, 2), 366), (16, 8, 16, (2, 1), 186)],
)
def test_bounds_of_the_papers_table(actor, critic, count, forward, bound):
    problem = fused_problem(actor, critic, count, *forward)
    assert lower_bound(family_instance(problem, FAMILIES["fused"])) == bound


def test_the_fused_search_reaches_the_papers_bound_at_serial_memory():
    problem = fused_problem(8, 8, 8, 5, 2, critic_activation=0.5)
    found = find(problem, FAMILIES["fused"], SearchEffort(scale=0.1))
    assert found.at_bound
    assert found.peak <= serial_memory(problem)


@pytest.mark.parametrize(("stages", "count", "ratio"), [(4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 16, 3), (3, 5, 1)])
def test_stitched_is_puzzles_equation_1_at_serial_memory(stages, count, ratio):
    problem = fused_problem(stages, stages, count, ratio, 1)
    serial, stitched = (find(problem, FAMILIES[n], QUICK) for n in ("serial", "stitched"))
    each = [3 * ratio, 3]
    speedup = (count + stages - 1) * sum(each) / (count * sum(each) + (stages - 1) * max(each))
    assert serial.makespan / stitched.makespan == pytest.approx(speedup)
    assert stitched.peak == serial.peak == serial_memory(problem)


def test_many_passes_in_mini_batches_are_as_fast_as_one_mini_batch_again_and_again(monkeypatch):
    """Rules take too long for them. One micro-batch at a time was all that was left: a sixth of serial 1F1B's speed."""
    one, six = (fused_problem(4, 4, 4, 1, 1, mini_batches=count) for count in (1, 6))
    for module in ("find", "rounds"):
        # What stands between the passes of one mini-batch and of six.
        monkeypatch.setattr(f"dovetail.pipelines.search.{module}.LARGE", 1000)
    effort = SearchEffort(seconds=0.0, scale=0.003, workers=1, memory=False)
    found = find(six, family_of("fused-w"), effort)
    check_steps(six, steps(found))
    assert found.makespan <= 6 * find(one, family_of("fused-w"), effort).makespan * (1 + 1e-9)


@pytest.mark.parametrize("large", [True, False])
def test_a_long_round_does_not_begin_when_the_time_is_up(monkeypatch, large):
    """But a short one does: otherwise a search with little time would try nothing."""
    monkeypatch.setattr(rounds, "LARGE", 100 if large else 40_000)
    done = []

    def progress(what, makespan, peak):
        done.append(what)

    effort = SearchEffort(0, itertools.count().__next__, scale=0.1, memory=False, exact=False, progress=progress)
    find(fused_problem(4, 4, 8, 5, 2), FAMILIES["fused"], effort)
    assert bool(done) != large


def test_rolled_stitching_beats_the_fused_bound_for_equal_models_and_six_mini_batches():
    problem = fused_problem(8, 8, 8, 1, 1, mini_batches=6)
    serial = find(problem, FAMILIES["serial"], QUICK).makespan
    assert serial / find(problem, FAMILIES["stitched-rolled"], QUICK).makespan == pytest.approx(1.748, abs=5e-4)
    assert serial / lower_bound(family_instance(problem, FAMILIES["fused"])) == pytest.approx(1.579, abs=5e-4)


def test_zero_bubble_reaches_its_formula():
    """ZB1P of M micro-batches on P stages: (3 M + P - 1) f for forward = input gradient = weight gradient = f."""
    problem = fused_problem(4, 4, 6, 3, 1)
    found = find(problem, FAMILIES["zero-bubble"], SearchEffort(scale=0.1))
    assert found.makespan == (3 * 6 + 3) * 3 + (3 * 6 + 3) * 1


@pytest.mark.slow
def test_the_answer_depends_on_the_seed_and_not_on_the_number_of_threads():
    problem = fused_problem(4, 2, 8, 5, 3, communication=0.5)
    found = [find(problem, FAMILIES["fused"], SearchEffort(scale=0.005, workers=w, seed=3)) for w in (1, 2, 4)]
    assert all((f.orders == found[0].orders).all() for f in found)


def test_a_deadline_ends_the_search_with_the_best_so_far():
    ticks = itertools.count()
    effort = SearchEffort(seconds=3, clock=lambda: next(ticks), scale=0.01)
    problem = fused_problem(8, 8, 32, 5, 2)
    found = find(problem, FAMILIES["fused"], effort)
    check_steps(problem, steps(found))
    assert next(ticks) < 50


def test_progress_is_shown():
    seen = []
    effort = SearchEffort(
        scale=0.01, progress=lambda what, makespan, peak: seen.append((what, makespan, peak)), seconds=1
    )
    best = find(fused_problem(4, 4, 4, 2, 1), FAMILIES["fused"], effort)
    assert (seen[-1][1], seen[-1][2]) == (best.makespan, best.peak)


@pytest.mark.slow
def test_a_schedule_of_several_mini_batches_is_no_slower_than_one_of_each():
    effort = SearchEffort(scale=0.003, memory=False, exact=False)
    one, three = (fused_problem(8, 8, 16, 1, 1, mini_batches=n, memory_limit=8.0) for n in (1, 3))
    found = find(three, FAMILIES["fused"], effort)
    check_steps(three, steps(found))
    assert found.makespan <= 3 * find(one, FAMILIES["fused"], effort).makespan * (1 + 1e-9)


@pytest.mark.slow
def test_choice_takes_the_fastest_and_says_what_the_others_lose():
    problem = fused_problem(4, 4, 4, 1, 1, mini_batches=3)
    choice = choose(problem, QUICK)
    assert set(choice.schedules) == {*family_names(problem), "dedicated"} == {*FAMILIES, "dedicated"}
    assert choice.best.makespan == min(s.makespan for s in choice.schedules.values())
    assert choice.loss(choice.best.family) == 0
    assert choice.loss("serial") == choice.schedules["serial"].makespan / choice.best.makespan - 1 > 0.3


def test_choice_passes_over_families_that_do_not_fit():
    choice = choose(fused_problem(4, 4, 8, 2, 1, memory_limit=2.0), QUICK)
    assert choice.best.peak <= 2.0
    assert "needs 4 of activation memory, the limit is 2" in choice.refused["serial"]


def test_the_document_holds_every_pass_in_order():
    problem = fused_problem(4, 2, 4, 5, 2, communication=0.5)
    found = find(problem, FAMILIES["fused"], QUICK)
    written = document(found)
    assert written["ranks"] == 4
    assert written["communication"] == 0.5
    assert written["models"][1] == {
        "name": "critic",
        "pipelines": 2,
        "stages": 2,
        "ranks": [[1, 0], [3, 2]],
        "micro_batches": 2,
        "forward": 4,
        "backward": 8,
        "activation": 0.8,
    }
    assert [len(mine) for mine in written["actions"]] == [2 * 4 + 2 * 2] * 4
    for mine in written["actions"]:
        assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(mine))
    assert max(a["end"] for mine in written["actions"] for a in mine) == found.makespan == written["makespan"]
    critic = [a for a in written["actions"][1] if a["model"] == "critic"]
    assert {(a["pipeline"], a["stage"]) for a in critic} == {(0, 0)}, "reversed inside its block of ranks"


def test_fixed_orders_of_serial_are_1f1b():
    instance = family_instance(fused_problem(2, 2, 3, 2, 1), FAMILIES["serial"])
    assert fixed_orders(instance, FAMILIES["serial"]).tolist() == [
        [0, 0, 1, 0, 1, 1, 3, 3, 4, 3, 4, 4],
        [0, 1, 0, 1, 0, 1, 3, 4, 3, 4, 3, 4],
    ]


def test_a_known_schedule_is_a_start_and_no_more():
    problem = fused_problem(8, 8, 16, 5, 2)
    nothing = SearchEffort(seconds=0, clock=itertools.count().__next__, memory=False)
    best = find(problem, FAMILIES["fused"], SearchEffort(scale=0.1, memory=False))
    again = find(problem, FAMILIES["fused"], nothing, start=best)
    assert again.makespan == best.makespan
    other = find(fused_problem(4, 4, 4, 5, 2), FAMILIES["fused"], QUICK)
    assert find(problem, FAMILIES["fused"], nothing, start=other).makespan > 0


@pytest.mark.parametrize("split", [False, True])
def test_a_steady_part_is_repeated_for_the_larger_model_alone(split):
    problem = fused_problem(4, 2, 16, 5, 2, critic_activation=0.5)
    family = FAMILIES["fused-split" if split else "fused"]
    fewer = drop(problem)
    assert fewer is not None
    assert [m.micro_batches for m in fewer.models] == [4 + 2, problem.models[1].micro_batches]
    # One model after the other, whose actor has a steady part that can be repeated without loss.
    short_instance, instance = family_instance(fewer, family), family_instance(problem, family)
    short = evaluate(short_instance, fixed_orders(short_instance, FAMILIES["serial"]), family.name)
    orders = restore(instance, short, limit=100.0)
    assert orders is not None
    longer = evaluate(instance, orders)
    assert longer.makespan == pytest.approx(short.makespan + 10 * 15)
    assert longer.peak == pytest.approx(short.peak)
    check_steps(problem, steps(longer))
    assert restore(instance, short, limit=short.peak / 2) is None
    assert drop(fused_problem(4, 2, 8, 5, 2)) is None, "little would be left out"
    # Where the critic is the larger one, its micro-batches are left out.
    turned = drop(fused_problem(4, 4, 16, 2, 5))
    assert turned is not None
    assert [m.micro_batches for m in turned.models] == [16, 6]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((8, 4, 7, 5, 2), "actor's 7 micro-batches cannot be divided among the critic's 2 pipelines of 4 stages"),
        ((8, 3, 8, 5, 2), "critic's 3 pipeline stages do not divide the actor's 8; use 2"),
        ((3, 8, 8, 5, 2), "actor's 3 pipeline stages do not divide the critic's 8"),
        ((8, 8, 0, 5, 2), "micro-batches is 0; it must be at least 1"),
        ((8, 8, 8, -5, 2), "actor's forward is -5; it must be above 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, sentence):
    with pytest.raises(ProblemError, match=sentence):
        fused_problem(*arguments)


def test_a_memory_limit_below_the_least_names_the_least():
    with pytest.raises(ProblemError, match=r"limit of 0.7 .* take 1.5 on a rank, which is the least"):
        fused_problem(4, 2, 4, 5, 2, critic_activation=0.75, memory_limit=0.7)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(problems(), st.sampled_from(["zero-bubble", "shared", "fused", "fused-split", "fused-rolled", "fused-v"]))
def test_a_few_rules_make_legal_schedules_that_are_the_same_each_time(problem, name):
    effort = SearchEffort(seed=3, compiled=False)
    found, again = (find(problem, FAMILIES.get(name) or family_of(name), effort) for _ in range(2))
    check_steps(problem, steps(found))
    assert np.array_equal(found.orders, again.orders)
    assert found.bound <= found.makespan * (1 + 1e-9)


@pytest.mark.parametrize("name", ["fused", "fused-split", "shared-rolled", "zero-bubble"])
def test_a_few_rules_reach_the_bound_of_equal_stages_on_two_ranks(name):
    problem = fused_problem(2, 2, 4, 1, 1, mini_batches=2)
    assert find(problem, FAMILIES[name], SearchEffort(compiled=False)).at_bound


def test_a_few_rules_keep_to_the_memory_limit():
    free = fused_problem(4, 4, 8, 2, 1)
    limit = serial_memory(free) * 1.001
    found = find(dataclasses.replace(free, memory_limit=limit), FAMILIES["fused"], SearchEffort(compiled=False))
    assert found.fits(limit)
    assert found.makespan < find(free, FAMILIES["serial"], SearchEffort()).makespan
