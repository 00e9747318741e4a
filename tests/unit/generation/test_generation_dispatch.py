"""Which instance a sample goes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.samples.dispatch import Speeds, excess, place

LOADS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1)


def test_like_instances_get_even_shares() -> None:
    assert sorted(place(10, {"a": 0, "b": 0}, {"a": 1.0, "b": 1.0}, 64)) == ["a"] * 5 + ["b"] * 5


def test_a_faster_instance_gets_more_in_proportion() -> None:
    placed = place(40, {"a": 0, "b": 0}, {"a": 3.0, "b": 1.0}, 64)
    assert placed.count("a") == 30


@given(LOADS, st.integers(0, 100), st.integers(1, 40))
def test_nobody_is_filled_beyond_capacity_and_no_room_is_left_unused(
    loads: dict[str, int], count: int, capacity: int
) -> None:
    placed = place(count, loads, dict.fromkeys(loads, 1.0), capacity)
    room = sum(max(0, capacity - n) for n in loads.values())
    assert len(placed) == min(count, room)
    for name in loads:
        assert placed.count(name) + loads[name] <= max(capacity, loads[name])


@given(LOADS, st.sets(st.sampled_from("abcxyz"), min_size=1), st.integers(1, 40))
def test_newcomers_get_at_most_an_even_share(loads: dict[str, int], newcomers: set[str], capacity: int) -> None:
    loads = {n: 0 if n in newcomers else load for n, load in loads.items()}
    taken = excess(loads, sorted(newcomers), capacity)
    share = -(-sum(loads.values()) // len(set(loads) | newcomers))
    assert sum(taken.values()) <= min(share, capacity) * len(newcomers)
    assert all(loads[name] - n >= share for name, n in taken.items())


def test_noise_does_not_unbalance_like_servers_and_real_differences_count() -> None:
    speeds = Speeds()
    assert speeds.relative(["a", "b"]) == {"a": 1.0, "b": 1.0}
    speeds.measured("a", 110, 1, 1.0)
    speeds.measured("b", 90, 1, 1.0)
    assert speeds.relative(["a", "b", "new"]) == {"a": 1.0, "b": 1.0, "new": 1.0}
    speeds.measured("a", 600, 2, 1.0)
    speeds.measured("b", 200, 2, 1.0)
    assert speeds.relative(["a", "b"]) == {"a": 1.0, "b": 1.0}, "one moment says little"
    for _ in range(500):
        speeds.measured("a", 600, 2, 1.0)
        speeds.measured("a", 300, 1, 1.0)
        speeds.measured("b", 200, 2, 1.0)
        speeds.measured("b", 100, 1, 1.0)
        speeds.measured("b", 5, 1, 0.001)  # too short to mean anything
    assert speeds.relative(["a", "b"]) == pytest.approx({"a": 1.5, "b": 0.5}, rel=0.05)


def test_a_server_is_not_faster_for_having_less_to_do() -> None:
    speeds = Speeds()
    for _ in range(30):
        speeds.measured("a", 100, 1, 1.0)
        speeds.measured("b", 32 * 50, 32, 1.0)
    assert speeds.relative(["a", "b"]) == {"a": 1.0, "b": 1.0}
