"""SimulatedScorers, event by event: who takes what, and when."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.fusion.scorer_queues import SimulatedScorer, Together, score


def seconds(batch: Together) -> tuple[float, float]:
    """A second a token; the scores are there a second later."""
    busy = float(sum(tokens for tokens, _ in batch))
    return busy, busy + 1


def test_each_queue_scores_each_sample_and_one_device_has_one_pass_at_a_time() -> None:
    """Two models take turns on a device, and another copy of the first model has a device of its own."""
    scorers = [SimulatedScorer("a", ("gpu",), seconds, rows=1), SimulatedScorer("b", ("gpu",), seconds, rows=1)]
    scorers.append(SimulatedScorer("a", ("other",), seconds, begin=2.0, rows=1))
    coming = [(0.0, 4, 0), (1.0, 3, 1)]
    passes = score(scorers, coming, {"gpu": 0.0, "other": 0.0})
    on = {
        device: sorted(p[1:3] for p in passes if scorers[p.scorer].devices == (device,)) for device in ("gpu", "other")
    }
    assert on == {"gpu": [(0.0, 4.0), (4.0, 4.0), (8.0, 3.0)], "other": [(2.0, 3.0)]}
    assert max(p.scored for p in passes) == 12.0


def test_a_scorer_waits_for_its_first_sample_and_takes_the_longest_first() -> None:
    taken: list[Together] = []

    def noted(batch: Together) -> tuple[float, float]:
        taken.append(batch)
        return 1.0, 1.0

    passes = score([SimulatedScorer("", (0,), noted, least=10)], [(5.0, 2, 0), (5.0, 6, 1), (5.5, 1, 2)], {0: 0.0})
    assert [each.start for each in passes] == [5.0, 6.0]
    assert taken == [[(6, 1)], [(2, 0), (1, 2)]]


def test_no_sample_is_scored_before_it_is_generated() -> None:
    """Several samples end at once, and several scorers wait for them since different times."""
    scorers = [SimulatedScorer("", (i,), seconds, rows=1) for i in range(3)]
    passes = score(scorers, [(5.0, 2, 0), (5.0, 6, 1), (5.0, 1, 2)], {0: 0.0, 1: 1.0, 2: 2.0})
    assert passes == [(0, 5.0, 6.0, 12.0), (1, 5.0, 2.0, 8.0), (2, 5.0, 1.0, 7.0)]


def test_a_part_costs_the_same_however_many_scorers_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    popped = 0

    def counted(heap: list[Any]) -> Any:
        nonlocal popped
        popped += 1
        return heapq.heappop(heap)

    counting = SimpleNamespace(heappop=counted, heappush=heapq.heappush)
    monkeypatch.setattr("dovetail.fusion.scorer_queues.heapq", counting)
    scorers = [SimulatedScorer("", (i,), seconds) for i in range(100)]
    coming = [(2.0 * i, 1, i) for i in range(1000)]
    passes = score(scorers, coming, dict.fromkeys(range(100), 0.0))
    # They take turns: the one that is idle for the longest takes the next part.
    assert [(each.scorer, each.start) for each in passes] == [(i % 100, 2.0 * i) for i in range(1000)]
    assert popped < 5 * len(coming) + 3 * len(scorers)
