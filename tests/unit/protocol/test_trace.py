"""Chrome traces of spans."""

import json

from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span


def span(name, process, start, end, lane="main", **more):
    return Span(name=name, process=process, lane=lane, start=start, end=end, **more)


def bars(trace):
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def test_times_are_microseconds_from_the_first_start():
    trace = chrome_trace([span("a", "trainer-0", 100.5, 101.0, iteration=3), span("b", "coordinator", 100.0, 100.25)])
    by_name = {e["name"]: e for e in bars(trace)}
    assert by_name["b"]["ts"] == 0
    assert by_name["b"]["dur"] == 250_000
    assert by_name["a"]["ts"] == 500_000
    assert by_name["a"]["args"]["iteration"] == 3
    assert trace["otherData"]["start_seconds"] == 100.0


def test_processes_and_lanes_are_named_with_the_coordinator_first():
    trace = chrome_trace(
        [span("a", "small-0", 0, 1), span("b", "trainer-0", 0, 1, lane="comm"), span("c", "coordinator", 0, 1)]
    )
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["coordinator", "trainer-0", "small-0"]
    assert "comm" in [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]


def test_no_spans_is_a_valid_trace():
    assert bars(chrome_trace([])) == []


def test_backward_clock_gives_an_empty_bar():
    assert bars(chrome_trace([span("a", "x", 5.0, 4.0)]))[0]["dur"] == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 10), st.sampled_from(["x", "y"]), st.sampled_from(["m", "n"])),
        max_size=30,
    )
)
def test_every_span_appears_and_tracks_only_nest(raw):
    trace = chrome_trace([span(f"s{i}", p, float(s), float(s + d), lane=lane) for i, (s, d, p, lane) in enumerate(raw)])
    events = bars(json.loads(json.dumps(trace)))
    assert sorted(e["name"] for e in events) == sorted(f"s{i}" for i in range(len(raw)))
    tracks = {}
    for e in events:
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for intervals in tracks.values():
        for a in intervals:
            for b in intervals:
                assert not (a[0] < b[0] < a[1] < b[1])
