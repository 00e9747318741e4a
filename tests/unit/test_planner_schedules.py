"""Serial 1F1B and the schedule checker."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ScheduleError, one_f_one_b, serial_1f1b, validate_schedule
from dovetail.protocol.messages import Action
from dovetail.protocol.plan import coordinates, rank_at

degrees = st.integers(1, 4)
layout = st.builds(Parallelism, pp=degrees, dp=degrees, tp=st.integers(1, 2))


@st.composite
def problems(draw):
    """Two models over one world, in unlike layouts, with unlike numbers of micro-batches."""
    actor = draw(layout)
    world = world_size(actor)
    pp = draw(st.sampled_from([p for p in range(1, world + 1) if world % p == 0]))
    dp = draw(st.sampled_from([d for d in range(1, world // pp + 1) if (world // pp) % d == 0]))
    critic = Parallelism(pp=pp, dp=dp, tp=world // pp // dp)
    return {"actor": actor, "critic": critic}, {"actor": draw(st.integers(1, 6)), "critic": draw(st.integers(1, 6))}


@given(layout)
def test_ranks_and_coordinates_are_one_to_one(parallelism):
    places = [coordinates(rank, parallelism) for rank in range(world_size(parallelism))]
    assert len(set(places)) == world_size(parallelism)
    assert [rank_at(place, parallelism) for place in places] == list(range(world_size(parallelism)))


def test_convention_tp_varies_fastest_then_dp_then_pp():
    places = [coordinates(rank, Parallelism(pp=2, dp=3, tp=2)) for rank in range(12)]
    assert places[:3] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert places[6] == (1, 0, 0)


def test_a_rank_outside_the_layout_is_refused():
    with pytest.raises(ValueError, match="rank 4 is outside a layout of 4 ranks"):
        coordinates(4, Parallelism(pp=2, dp=2))


def words(actions):
    return " ".join(f"{a.kind}{a.micro_batch}" for a in actions)


def test_1f1b_of_three_stages_and_four_micro_batches():
    assert words(one_f_one_b("actor", 0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(one_f_one_b("actor", 1, 3, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(one_f_one_b("actor", 2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_keeps_at_most_the_stages_left_alive(stages, micro_batches):
    for stage in range(stages):
        alive = peak = 0
        for action in one_f_one_b("actor", stage, stages, micro_batches):
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert alive == 0
        assert peak == min(stages - stage, micro_batches)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([None, 1, 2]))
def test_serial_1f1b_runs_to_its_end(problem, receives_ahead):
    layouts, counts = problem
    actions = serial_1f1b(layouts, counts, ["actor", "critic"])
    validate_schedule(actions, layouts, counts, receives_ahead)
    for mine in actions:
        models = [a.model for a in mine]
        assert models == sorted(models), "one model after the other"


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_the_checker_accepts_any_order_that_a_simulated_run_produced(problem, seed):
    """Random valid single-column interleavings: actions taken in an order in which their inputs exist."""
    layouts = {m: Parallelism(pp=lay.pp * lay.dp * lay.tp) for m, lay in problem[0].items()}
    counts, rng = problem[1], random.Random(seed)
    world = world_size(layouts["actor"])
    todo = [(m, i, k, r) for m in counts for i in range(counts[m]) for k in "FB" for r in range(world)]
    done, result = set(), [[] for _ in range(world)]

    def ready(item):
        m, i, k, r = item
        if k == "F":
            return r == 0 or (m, i, "F", r - 1) in done
        return (m, i, "F", r) in done and (r == world - 1 or (m, i, "B", r + 1) in done)

    while todo:
        item = rng.choice([x for x in todo if ready(x)])
        todo.remove(item)
        done.add(item)
        result[item[3]].append(Action(model=item[0], micro_batch=item[1], kind=item[2]))
    validate_schedule(result, layouts, counts)


def act(word, model="actor"):
    return Action(model=model, micro_batch=int(word[1:]), kind=word[0])


def test_a_backward_before_its_forward_deadlocks():
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 waits at B of actor's micro-batch 0"):
        validate_schedule([[act("B0"), act("F0")]], {"actor": Parallelism()}, {"actor": 1})


def test_two_ranks_that_wait_for_each_other_deadlock():
    schedule = [[act("F0"), act("B0"), act("F1"), act("B1")], [act("F0"), act("F1"), act("B0"), act("B1")]]
    with pytest.raises(ScheduleError, match="2 of 2 ranks never finish"):
        validate_schedule(schedule, {"actor": Parallelism(pp=2)}, {"actor": 2})


def test_data_parallel_ranks_that_reach_two_models_in_unlike_order_deadlock():
    one = [act("F0"), act("B0"), act("F0", "critic"), act("B0", "critic")]
    layouts = {"actor": Parallelism(dp=2), "critic": Parallelism(dp=2)}
    validate_schedule([one, one], layouts, {"actor": 1, "critic": 1})
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate_schedule([one, one[2:] + one[:2]], layouts, {"actor": 1, "critic": 1})


def test_blocking_sends_without_receives_ahead_deadlock_where_buffered_ones_do_not():
    layouts = {"actor": Parallelism(pp=2)}
    schedule = serial_1f1b(layouts, {"actor": 3}, ["actor"])
    validate_schedule(schedule, layouts, {"actor": 3})
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate_schedule(schedule, layouts, {"actor": 3}, receives_ahead=0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("F0", "rank 0 never runs B of actor's micro-batch 0"),
        ("F0 B0 F0", "rank 0 runs F of actor's micro-batch 0 twice"),
        ("F0 B0 F1 B1", "rank 0 runs F of actor's micro-batch 1, which is not part of the step"),
    ],
)
def test_counts_are_checked(words, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        validate_schedule([[act(w) for w in words.split()]], {"actor": Parallelism()}, {"actor": 1})


def test_layouts_of_unlike_size_are_refused():
    layouts = {"actor": Parallelism(dp=2), "critic": Parallelism(dp=3)}
    with pytest.raises(ScheduleError, match="same trainer ranks"):
        serial_1f1b(layouts, {"actor": 1, "critic": 1}, ["actor", "critic"])


def test_a_model_without_micro_batches_is_refused():
    with pytest.raises(ScheduleError, match="needs at least 1"):
        serial_1f1b({"actor": Parallelism()}, {"actor": 0}, ["actor"])
