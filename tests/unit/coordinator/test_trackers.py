"""Trackers: what they are told of a run, and that a run does not notice what becomes of them."""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dovetail.cli.run import tracker_line
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.coordinator.reporting.trackers import tracker_worker
from dovetail.coordinator.reporting.trackers.otlp_spans import OtlpClient
from dovetail.coordinator.reporting.trackers.tracker_clients import MlflowClient, flattened
from dovetail.coordinator.reporting.trackers.tracker_processes import TrackerProcesses, missing
from dovetail.coordinator.reporting.trackers.tracker_settings import TrackerSettings
from dovetail.coordinator.reporting.trackers.tracker_worker import RunFollower
from dovetail.manifest.types import DataSource, RLHFJobSpec, Tracker
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.files.trace import chrome_trace
from helpers.finished_runs import spans
from helpers.free_ports import free_port
from helpers.jobs import tiny_job

RUN = "0123456789abcdef"


def spec_of(*trackers: Mapping[str, object]) -> RLHFJobSpec:
    return RLHFJobSpec.model_validate({"groups": [{"name": "a", "roles": ["trainer"]}], "trackers": list(trackers)})


def add_rows(run_dir: Path, *rows: tuple[str, int, float]) -> None:
    with (run_dir / "history.jsonl").open("a") as file:
        for stage, step, reward in rows:
            file.write(json.dumps({"stage": stage, "step": step, "time": 5.0, "metrics": {"reward": reward}}) + "\n")


def add_trace(run_dir: Path, iteration: int) -> None:
    folder = run_dir / "traces"
    folder.mkdir(exist_ok=True)
    document = chrome_trace(spans(iteration), {"iteration": iteration})
    (folder / f"iteration-{iteration:04d}.json").write_text(json.dumps(document))


class Told:
    """A tracker that remembers, or that is down."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, float]] = []
        self.traces: list[int] = []
        self.down = False

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.rows.append((stage, step, metrics["reward"]))

    def trace(self, document: Mapping[str, Any]) -> None:
        if self.down:
            raise ConnectionError("down")
        self.traces.append(document["otherData"]["iteration"])

    def finish(self, succeeded: bool) -> None: ...


def test_each_row_and_timeline_is_told_once_whoever_restarts(tmp_path: Path) -> None:
    told, state = Told(), dict[str, Any]()
    RunFollower(tmp_path, state, told).tell()  # before the run has any file
    add_rows(tmp_path, ("sft", 1, 0.5), ("ppo", 1, 1.0))
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "st\n{"stage": "ppo"')  # cut off by a crash; still being written
    add_trace(tmp_path, 1)
    told.down = True
    with pytest.raises(ConnectionError):
        RunFollower(tmp_path, state, told).tell()
    told.down = False
    state = json.loads(json.dumps(state))
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write("\n")
    add_rows(tmp_path, ("evaluation", 1, 2.0))
    add_trace(tmp_path, 2)
    RunFollower(tmp_path, state, told).tell()
    RunFollower(tmp_path, state, told).tell()
    assert told.rows == [("sft", 1, 0.5), ("ppo", 1, 1.0), ("evaluation", 1, 2.0)]
    assert told.traces == [1, 2]


def test_a_manifest_is_flattened_into_parameters() -> None:
    found = dict(flattened({"ppo": {"kl": {"coef": 0.1}}, "groups": [{"name": "a"}], "seed": 3}))
    assert found == {"ppo.kl.coef": 0.1, "groups": "[{'name': 'a'}]", "seed": 3}


def test_no_name_of_mlflow_is_the_folder_of_another_one_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["reward", "reward/length", "reward/length/p99", "reward.length", "reward/length.p99", "reward_length"]
    names += ["é", "_", "..", ".", "a/../b", "/a", "a/", "", "a//b", "pass@1", "pass#1", "a\\b", "n" * 300, "n" * 301]
    got: dict[str, float] = {}

    class Client:
        def __init__(self, **_: object) -> None: ...
        def log_batch(self, run: str, metrics: Sequence[tuple[str, float, int, int]]) -> None:
            got.update({name: value for name, value, _, _ in metrics})

    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.__dict__.update(Metric=lambda *row: row, Param=None, RunTag=None)
    tracking.__dict__.update(MlflowClient=Client)
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    client = MlflowClient(TrackerSettings("lab", "sums", None, RUN, Path()), {"run": "known"})
    client.log("ppo", 1, {name: float(number) for number, name in enumerate(names)}, 5.0)
    assert sorted(got.values()) == [float(number) for number in range(len(names))], "no two are the same"
    assert {"ppo/reward", "ppo/reward.length", "ppo/reward.length.p99"} <= got.keys()
    for name in got:
        assert re.fullmatch(r"[A-Za-z0-9_\-. /]{1,250}", name), "MLflow's rule"
        assert posixpath.normpath(name) == name, "MLflow refuses other paths"
        assert not any(other.startswith(f"{name}/") for other in got)


# ---------------------------------------------------------------- OpenTelemetry


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP receiver: its address, and what it got."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_iteration_becomes_a_trace_with_all_its_spans(
    tmp_path: Path, collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    url, got = collector
    settings = TrackerSettings("lab", "sums", url, RUN, tmp_path)
    document = chrome_trace(spans(7), {"iteration": 7})
    for _ in range(2):
        OtlpClient(settings, {}).trace(document)
    first, second = (
        [
            (span, resource.resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        for request in got
    )
    assert {span.span_id for span, _ in first} == {span.span_id for span, _ in second}, "sent again: the same trace"
    expected = list(spans(7))
    assert len(first) == len(expected) + 1
    root = next(span for span, _ in first if not span.parent_span_id)
    assert root.name == "iteration 7"
    assert all(span.parent_span_id == root.span_id for span, _ in first if span is not root)
    assert {span.trace_id for span, _ in first} == {root.trace_id}
    begun, ended = min(s.start for s in expected), max(s.end for s in expected)
    assert root.start_time_unix_nano == pytest.approx(begun * 1e9, abs=2000)
    assert root.end_time_unix_nano == pytest.approx(ended * 1e9, abs=2000)
    about = [{a.key: a.value.string_value for a in resource.attributes} for _, resource in first]
    assert {a["service.instance.id"] for a in about} >= {"coordinator", "trainer-0", "small-1-scorer"}
    assert {a["service.namespace"] for a in about} == {"lab"}
    drawn = [span.attributes for span, _ in first if span.name == "generate"]
    tokens = [a.value.int_value for attributes in drawn for a in attributes if a.key == "tokens"]
    assert sorted(set(tokens)) == [0, 20, 40, 60, 80, 100]


# ---------------------------------------------------------------- processes

STAND_IN = """
import json, os, pathlib, time
class Settings:
    def __init__(self, **_): pass
def init(**given):
    mode = pathlib.Path(os.environ["STAND_IN"], "mode").read_text()
    if mode == "down":
        raise ConnectionError("the server at wandb.example is down")
    time.sleep(3600 if mode == "hangs" else 0)
    return Run(pathlib.Path(os.environ["STAND_IN"], "told"))
class Run:
    def __init__(self, path): self.path = path
    def define_metric(self, *_, **__): pass
    def log(self, row): self.path.open("a").write(json.dumps(row) + "\\n")
    def finish(self, exit_code): self.path.open("a").write(f'"ended {exit_code}"\\n')
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for W&B's client: its file `mode` says how it behaves, `told` what it was told."""
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


async def run_with(spec: RLHFJobSpec, run_dir: Path, finish_seconds: float = 300.0) -> list[tuple[str, dict[str, Any]]]:
    """What is logged while a run with these trackers has its rows written and ends."""
    logged: list[tuple[str, dict[str, Any]]] = []
    run_dir.mkdir(exist_ok=True)
    trackers = TrackerProcesses(spec, run_dir, RUN, lambda event, **told: logged.append((event, told)))
    trackers.start()
    add_rows(run_dir, ("ppo", 1, 1.0))
    (run_dir / "summary.json").write_text('{"state": "succeeded"}')
    await trackers.close(finish_seconds)
    return logged


@pytest.mark.slow
def test_a_tracker_that_was_down_gets_all_of_it_later(tmp_path: Path, stand_in: Path) -> None:
    spec, run_dir = spec_of({"kind": "wandb"}), tmp_path / "run"
    (stand_in / "mode").write_text("down")
    logged = asyncio.run(run_with(spec, run_dir))
    assert [event for event, _ in logged] == ["tracker.failed"]
    told_in_the_terminal = tracker_line(json.dumps({"event": logged[0][0], **logged[0][1]}))
    assert told_in_the_terminal == (
        "Warning: the tracker wandb gets no metrics: ConnectionError: the server at wandb.example is down (it is tried "
        "again; its log: logs/tracker-wandb.log)"
    )
    (stand_in / "mode").write_text("up")
    assert asyncio.run(run_with(spec, run_dir)) == []
    told = [json.loads(line) for line in (stand_in / "told").read_text().splitlines()]
    assert told == [{"ppo/step": 1, "ppo/reward": 1.0}, {"ppo/step": 1, "ppo/reward": 1.0}, "ended 0"]


@pytest.mark.slow
def test_a_tracker_that_hangs_does_not_hold_up_the_end_of_a_run(tmp_path: Path, stand_in: Path) -> None:
    (stand_in / "mode").write_text("hangs")
    began = time.monotonic()
    logged = asyncio.run(run_with(spec_of({"kind": "wandb"}), tmp_path / "run", finish_seconds=0.5))
    assert [event for event, _ in logged] == ["tracker.late"]
    assert time.monotonic() - began < 300


@pytest.mark.slow
def test_a_run_that_fails_before_it_begins_ends_in_its_trackers(tmp_path: Path, stand_in: Path) -> None:
    """Else it would seem to run for ever there."""
    (stand_in / "mode").write_text("up")
    job = tiny_job()
    sources = job.spec.data.model_copy(update={"prompts": [DataSource(path="nowhere.jsonl")]})
    trackers = [Tracker(kind="wandb", project="lab")]
    spec = job.spec.model_copy(update={"data": sources, "trackers": trackers})
    logged: list[str] = []

    async def run() -> None:
        settings = CoordinatorSettings(tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)
        async with Engines(spec, make_plan(job.spec), settings, lambda event, **_: logged.append(event)):
            pass

    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        asyncio.run(run())
    assert (stand_in / "told").read_text().splitlines() == ['"ended 1"']
    assert "tracker.failed" not in logged


def test_a_client_that_is_not_installed_is_named_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracker_worker.CLIENTS, "trackio", ("no_such_package.at_all", Told))  # type: ignore[arg-type]
    spec = spec_of({"kind": "otlp"}, {"kind": "trackio"})
    sentence = (
        "spec.trackers[1] is trackio, whose client is not installed here: the run goes on without it; pip install "
        "'dovetail-rlhf[trackio]'"
    )
    assert [told for _, told in missing(spec.trackers)] == [sentence]
    logged = asyncio.run(run_with(spec_of({"kind": "trackio"}), tmp_path / "run"))
    assert [told["message"] for _, told in logged] == [sentence.replace("[1]", "[0]")]
