"""The benchmark of rollouts that come and go: its traces, and a small run of it."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_spot
from spot.trace import drawn, recorded


@given(st.integers(0, 2**31), st.integers(1, 8), st.floats(0, 1))
def test_drawn_lives_follow_each_other_in_a_slot_and_are_the_same_again(seed, slots, noticed):
    lives = drawn(seed, slots, 600.0, 300.0, 60.0, noticed)
    assert lives == drawn(seed, slots, 600.0, 300.0, 60.0, noticed)
    for slot in range(slots):
        mine = [life for life in lives if life.slot == slot]
        assert mine[0].start == 0
        for one, other in pairwise(mine):
            assert one.start <= (one.told or one.start) <= one.death <= other.start
        assert mine[-1].start < 600


def test_lives_have_the_mean_that_was_asked_for():
    lives = drawn(0, 200, 10_000.0, 300.0, 60.0, 0.5)
    assert abs(sum(life.death - life.start for life in lives) / len(lives) - 300) < 10
    assert abs(sum(life.notice is not None for life in lives) / len(lives) - 0.5) < 0.05


def test_a_recorded_trace_has_a_life_for_each_run_of_ticks(tmp_path):
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 34}, "data": [0, 1, 1, 0, 0, 1]}))
    assert [(life.start, life.death) for life in recorded([path], 120.0)] == [(34, 102), (170, 204)]


@pytest.mark.slow
def test_instances_die_and_no_token_changes(capsys):
    """Every life is a second or two long, so all die several times."""
    short = ("--instances", "2", "--concurrent", "4", "--rounds", "8", "--scale", "4", "--life", "3", "--gap", "1")
    assert bench_spot.main([*short, "--weights", "0.5", "--reserve", "1", "--noticed", "0.5"]) == 0
    calm, found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (calm["deaths"], calm["goodput"], calm["twice"]) == (0, 1.0, 0.0)
    assert found["deaths"] >= 2
    assert found["same"]
    assert 0 <= found["twice"] < 0.5
