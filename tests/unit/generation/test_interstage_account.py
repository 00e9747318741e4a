"""What fusion did, in numbers: overlap, seconds saved, idle rollouts, and where it shows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.reporting.page.iteration_timeline import timeline
from dovetail.coordinator.reporting.summary_rows import fusion_rows
from dovetail.coordinator.samples.fusion.account import account, totals, union_seconds
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda x: (float(x[0]), float(x[0] + x[1]))))


@given(INTERVALS)
@settings(deadline=None)
def test_a_union_counts_every_second_once(intervals: list[tuple[float, float]]) -> None:
    seconds = {second for start, end in intervals for second in range(int(start), int(end))}
    assert union_seconds(intervals) == len(seconds)


def span(process: str, start: float, end: float, name: str = "inference") -> Span:
    return Span(name=name, process=process, start=start, end=end)


def test_what_is_hidden_behind_generation_and_who_is_idle() -> None:
    generating = [span("r0", 10.0, 20.0, "generation"), span("r1", 10.0, 16.0, "generation")]
    scoring = [span("r0-scorer", 20.0, 22.0), span("r1-scorer", 17.0, 19.0), span("r1-scorer", 19.5, 21.0)]
    found = account(10.0, 20.0, 22.0, generating, scoring, 2)
    assert (found.seconds, found.generation) == (12.0, 10.0)
    assert found.overlap == (17.0, 20.0)
    assert account(10.0, 20.0, 22.0, generating, scoring[:1], 2).overlap is None
    assert found.hidden == pytest.approx(2.5)
    assert found.saved == pytest.approx(1.25)
    assert found.idle == pytest.approx({"r0": 0.0, "r1": 12.0 - 6.0 - 2.0 - 1.5})


def test_totals_add_up_over_iterations() -> None:
    first = totals(None, {"a": 1.0})
    assert totals(first, {"a": 2.0, "b": 3.0}) == {"a": 3.0, "b": 3.0}


def test_the_curve_of_samples_left_is_in_the_trace_and_comes_back() -> None:
    trace = chrome_trace([span("coordinator", 5.0, 9.0)], None, {"samples left": [(5.0, 4.0), (7.5, 1.0), (9.0, 0.0)]})
    curves = timeline(trace)["curves"]
    assert curves == {"samples left": [[0.0, 4.0], [2.5, 1.0], [4.0, 0.0]]}


def test_the_summary_says_what_fusion_saved() -> None:
    fusion = {"setting": "Auto", "threshold": 6, "samples_migrated": 12.0, "seconds_saved": 1.5}
    shown = {row[0]: row[2] for row in fusion_rows({"fusion": {**fusion, "predicted_seconds_saved": 2.0}})}
    assert list(shown.values()) == ["12", "when 6 samples were left", "1.5 s (2.0 s predicted)"]
    for migrated, said in ((0.0, "none had to migrate"), (2.0, "2 of them migrated")):
        row = fusion_rows({"fusion": {**fusion, "samples_migrated": migrated, "migrated": migrated}})[1]
        assert row[0].endswith("scoring began early"), "nothing migrates that is where it should be"
        assert row[2] == f"when 6 samples were left, {said}"
    assert fusion_rows({"fusion": {**fusion, "threshold": 0}})[1][2] == "not, as that was not faster"
    assert fusion_rows({"fusion": {"setting": "Off"}}) == fusion_rows({}) == []
