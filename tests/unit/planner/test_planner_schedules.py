"""Serial 1F1B of trainer ranks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ScheduleError
from dovetail.protocol.messages import Action
from dovetail.protocol.plan import coordinates, rank_at
from helpers.lockstep import hung

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
    assert [words(mine) for mine in serial_1f1b({"actor": Parallelism(pp=3)}, {"actor": 4}, ["actor"])] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_keeps_at_most_the_stages_left_alive(stages, micro_batches):
    lists = serial_1f1b({"actor": Parallelism(pp=stages)}, {"actor": micro_batches}, ["actor"])
    for stage, mine in enumerate(lists):
        alive = peak = 0
        for action in mine:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert alive == 0
        assert peak == min(stages - stage, micro_batches)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([None, 1, 2]))
def test_serial_1f1b_runs_to_its_end(problem, receives_ahead):
    layouts, counts = problem
    lists = serial_1f1b(layouts, counts, ["actor", "critic"])
    wanted = Counter((m, i, k) for m, count in counts.items() for i in range(count) for k in "FB")
    for mine in lists:
        assert Counter((a.model, a.micro_batch, a.kind) for a in mine) == wanted
        assert [a.model for a in mine] == sorted(a.model for a in mine), "one model after the other"
    assert not hung(lists, layouts, receives_ahead)


def test_the_run_of_lists_notices_who_hangs():
    """What the tests of this folder rely on."""

    def act(word, model="actor"):
        return Action(model=model, micro_batch=int(word[1:]), kind=word[0])

    def lists(*texts):
        return [[act(word) for word in text.split()] for text in texts]

    assert hung(lists("B0 F0"), {"actor": Parallelism()}) == {0}
    assert hung(lists("F0 B0 F1 B1", "F0 F1 B0 B1"), {"actor": Parallelism(pp=2)}) == {0, 1}
    one = [act("F0"), act("B0"), act("F0", "critic"), act("B0", "critic")]
    layouts = {"actor": Parallelism(dp=2), "critic": Parallelism(dp=2)}
    assert not hung([one, one], layouts)
    assert hung([one, one[2:] + one[:2]], layouts)
    serial = serial_1f1b({"actor": Parallelism(pp=2)}, {"actor": 3}, ["actor"])
    assert not hung(serial, {"actor": Parallelism(pp=2)})
    assert hung(serial, {"actor": Parallelism(pp=2)}, receives_ahead=0)


def test_layouts_of_unlike_size_are_refused():
    layouts = {"actor": Parallelism(dp=2), "critic": Parallelism(dp=3)}
    with pytest.raises(ScheduleError, match="same trainer ranks"):
        serial_1f1b(layouts, {"actor": 1, "critic": 1}, ["actor", "critic"])


def test_a_model_without_micro_batches_is_refused():
    with pytest.raises(ScheduleError, match="needs at least 1"):
        serial_1f1b({"actor": Parallelism()}, {"actor": 0}, ["actor"])
