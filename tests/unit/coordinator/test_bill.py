"""The bill: what GPUs did and why they waited, of runs whose every second is known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.coordinator.reporting.bill import Bill, both, merged, sentences, take
from dovetail.coordinator.reporting.page.page_documents import PageDocuments
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.store.outcomes import ROW, Fate, FatePart, counts_key
from dovetail.coordinator.store.store import Store
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span
from helpers.finished_runs import report_answers
from helpers.jobs import tiny_job

H100, L40S = "NVIDIA-H100-80GB-HBM3", "NVIDIA-L40S"
PRICES = f"pools:\n- {{product: {H100}, pricePerGPUHour: 3.6}}\n- {{product: {L40S}, pricePerGPUHour: 1.8}}\n"


class Known:
    """The folder of a run with a trainer rank on an H100 and two servers, each on two L40S. Times are seconds after
    the run's beginning."""

    def __init__(self, folder: Path, lag: int = 0) -> None:
        self.folder = folder
        (folder / "traces").mkdir(parents=True)
        groups = [
            {"name": "trainers", "roles": ["trainer"], "gpu": {"product": H100}},
            {"name": "small", "roles": ["rollout"], "replicas": 2, "gpu": {"product": L40S, "perPod": 2}},
        ]
        job = tiny_job(stages=["ppo"], groups=groups)
        (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
        plan = {
            "lag": lag,
            "trainers": [{"name": "trainer-0", "group": "trainers"}],
            "rollouts": [{"name": f"small-{i}", "group": "small"} for i in range(2)],
            "prediction": {"iterationSeconds": 10.0},
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "summary.json").write_text(json.dumps({"state": "succeeded"}))

    def event(self, time: float, name: str, **fields: Any) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1e6 + time, "process": "coordinator", "event": name, **fields}) + "\n")

    def life(self, start: float, *, formed: bool = True) -> None:
        """A coordinator starts in 2 s, trainers join after 3 s more, load weights for 1 s, and send them in 2 s."""
        self.event(start, "coordinator.started")
        self.event(start + 2, "coordinator.ready")
        if formed:
            self.event(start + 5, "trainers.formed")
            self.event(start + 5, "trainers.load", stage="ppo", checkpoint_step=0, target_step=0)
        self.event(start + 6, "weights.published")

    def iteration(self, number: int, start: float, end: float, *spans: tuple[str, str, str, float, float]) -> None:
        """`spans`: (process, lane, name, start, end)."""
        self.event(end, "iteration.finished", iteration=number)
        row = {"stage": "ppo", "step": number, "time": 1e6 + end, "metrics": {"iteration_seconds": end - start}}
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        told = [Span(process=p, lane=lane, name=n, start=1e6 + a, end=1e6 + b) for p, lane, n, a, b in spans]
        path = self.folder / "traces" / f"iteration-{number:04d}.json"
        path.write_text(json.dumps(chrome_trace(told, {"iteration": number})))

    def elapsed(self, seconds: float) -> None:
        (self.folder / "elapsed.json").write_text(json.dumps({"seconds": seconds}))

    def bill(self, **more: Any) -> dict[str, Any]:
        found = Bill(RunFolder(self.folder), **more).document()
        assert sum(seconds for _, seconds, _ in found["parts"]) == pytest.approx(found["seconds"] * found["gpus"])
        return found


def parts(bill: dict[str, Any]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds, _ in bill["parts"]}


def drawn(start: float) -> list[tuple[str, str, str, float, float]]:
    """An iteration of 15 s: 5 s of generation, of which the second server needs 3 s, a second of scoring by the first
    one, a second of rewards, 6 s of training, 2 s of weights."""
    return [
        ("coordinator", "phases", "generation", start, start + 5),
        ("small-0", "main", "generation", start, start + 5),
        ("small-1", "main", "generation", start, start + 3),
        ("coordinator", "phases", "inference", start + 5, start + 7),
        ("small-0-scorer", "main", "inference", start + 5, start + 6),
        ("coordinator", "reward", "reward function", start + 6, start + 7),
        ("coordinator", "phases", "training", start + 7, start + 13),
        ("trainer-0", "commands", "ppo/1/step", start + 7.5, start + 12.5),
        ("trainer-0", "actions", "actor F0", start + 8, start + 10),
        ("trainer-0", "actions", "actor B0", start + 10, start + 12),
        ("coordinator", "phases", "weights", start + 13, start + 15),
        ("trainer-0", "sending", "publish", start + 13, start + 14),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Known:
    """An iteration; the next one is half drawn when the coordinator is killed. Another one takes over."""
    known = Known(tmp_path / "run")
    known.life(0)
    known.iteration(1, 10, 25, *drawn(10))
    known.event(28, "instance.registered")
    known.life(31, formed=False)  # the trainers live on
    known.event(39, "trainers.replay", stage="ppo", step=1)
    known.event(41, "weights.published")
    known.iteration(2, 41, 56, *drawn(41))
    known.event(58, "job.succeeded")
    known.elapsed(64)
    return known


def test_each_second_of_a_killed_run_has_its_cause(run: Known) -> None:
    bill = run.bill()
    assert (bill["unit"], bill["gpus"], bill["seconds"]) == ("GPU", 5, 64)
    expected = {
        "generation": 2 * (2 * 5 + 2 * 3),
        "inference": 2 * 2 * 1,
        "training passes": 2 * 4,
        # Half a second before and after the passes in the step, and outside of the step.
        "training, between the passes": 2 * 2,
        "sending weights": 2 * 1,
        "steps run again": 2,
        "wait for samples": 2 * 6,
        # The second server, while the first one draws and scores.
        "wait for other servers' samples": 2 * 2 * 3,
        "wait for reward functions": 2 * (1 + 2 + 2),
        "wait for the trainers": 2 * 4 * 6 + 4 * 2,
        "wait for weights": 2 * (1 + 4 * 2),
        "coordinator starts": 5 * (2 + 2),
        # It waits for the trainers from its beginning on, and they load for a second.
        "trainers start": 5 * 4,
        "before the first iteration": 5 * (4 + 6),
        "cut off by a death": 5 * 3,
        "after the last iteration": 5 * 2,
        # 3 s until the next coordinator, and 6 s before the first and after the last event.
        "start, restart and end of processes": 5 * 9,
    }
    assert parts(bill) == pytest.approx(expected)
    assert bill["steps_again"] == 1
    assert [(one["iteration"], one["gpu_seconds"]) for one in bill["iterations"]] == [(1, 75), (2, 75)]
    assert bill["planned_iteration"] == 50
    assert bill["price"] is None


def test_in_pods_processes_run_on_while_the_coordinator_starts_again(run: Known) -> None:
    (run.folder / "elapsed.json").unlink()
    assert run.bill()["seconds"] == 58
    # Nobody pays for a job that is suspended.
    lines = (run.folder / "events.jsonl").read_text().replace("instance.registered", "coordinator.stopped")
    (run.folder / "events.jsonl").write_text(lines)
    assert run.bill()["seconds"] == 58 - 3


def test_what_is_drawn_ahead_counts_when_it_was_drawn(tmp_path: Path) -> None:
    """With a lag, samples of the next iteration are drawn while one is learnt. Their span is in the next trace."""
    known = Known(tmp_path / "run", lag=1)
    known.life(0)
    learnt = ("trainer-0", "commands", "ppo/1/step", 12.0, 20.0)
    known.iteration(1, 10, 20, ("small-0", "main", "generation", 10, 12), learnt)
    bill = Bill(RunFolder(known.folder))
    assert bill.document()["iterations"][0]["parts"]["generation"] == pytest.approx(2 * 2), "as far as it is known"
    known.iteration(2, 20, 30, ("small-0", "main", "generation", 14, 28), ("small-1", "main", "generation", 14, 18))
    known.event(30, "job.succeeded")
    assert bill.document() == known.bill()
    first, second = bill.document()["iterations"]
    assert first["parts"]["generation"] == pytest.approx(2 * (2 + 6) + 2 * 4)
    assert second["parts"]["generation"] == pytest.approx(2 * 8)


def test_a_server_that_dies_is_away_and_trainers_wait_for_it(tmp_path: Path) -> None:
    known = Known(tmp_path / "run")
    known.life(0)
    for name, health, time in (("small-0", "healthy", 6), ("small-1", "healthy", 6), ("small-1", "dead", 12)):
        known.event(time, "instance.health", instance=name, health=health)
    known.event(18, "instance.health", instance="small-1", health="stale")
    phase = ("coordinator", "phases", "weights", 11.0, 20.0)
    known.iteration(1, 10, 20, phase)
    known.event(20, "job.succeeded")
    (one,) = known.bill()["iterations"]
    # All wait while the weights cannot be sent: 6 s for the dead server, 3 s for the weights.
    assert one["parts"] == pytest.approx({"server starts or is away": 5 * 6, "wait for weights": 5 * 3, "other": 5})


def test_tokens_that_were_drawn_for_nothing_are_told(run: Known) -> None:
    store = Store(run.folder)
    for iteration, fate, lengths in ((1, Fate.TRAINED, [10, 20]), (2, Fate.DISCARDED, [7]), (2, Fate.TRAINED, [5, 5])):
        rows = np.zeros(len(lengths), ROW)
        rows["response_tokens"] = lengths
        store.outcomes.put(FatePart(iteration, fate, rows))
    store.put(counts_key(2), {"kept_tokens": 9, "lost_tokens": 3})
    store.close()
    bill = run.bill()
    twice = {"replaced": 0, "drawn again": 7, "of lost episodes": 3, "computed again": 0}
    assert bill["tokens"] == {"trained": 40, **twice}
    generation = next(one["parts"]["generation"] for one in bill["iterations"] if one["iteration"] == 2)
    assert bill["lost_generation"] == pytest.approx(generation / 4)
    said = f"3 in episodes that were discarded or played again, about {generation / 4:,.0f} GPU seconds"
    assert said in " ".join(sentences(bill))
    assert [one["samples"] for one in bill["iterations"]] == [2, 2]


def report(*args: object) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, args)], catch_exceptions=False)


def test_prices_of_an_inventory_are_in_text_json_and_on_the_page(run: Known) -> None:
    prices = run.folder.parent / "gpus.yaml"
    prices.write_text(PRICES)
    hour = 3.6 + 4 * 1.8
    bill = json.loads(report(run.folder, "--json", "--inventory", prices).output)["bill"]
    assert bill["price"] == pytest.approx(hour * 64 / 3600)
    assert bill["iterations"][0]["price"] == pytest.approx(hour * 15 / 3600)
    assert not (run.folder / "report.html").exists(), "--json writes nothing"
    said = report(run.folder, "--inventory", prices).output
    assert "5 GPUs for 64 s: 320 GPU seconds, a price of 0.19; 16% of them worked." in said
    assert "Trainers ran 1 step again after they were lost." in said
    assert "50 GPU seconds planned, 75 measured (+50%)" in said
    shown = report_answers(run.folder)["bill"]
    assert shown["price"] == pytest.approx(bill["price"])
    assert shown["parts"] == bill["parts"]
    assert "a price of" not in report(run.folder).output, "without prices there is none"


def test_a_run_without_events_has_no_bill(run: Known) -> None:
    (run.folder / "events.jsonl").unlink()
    assert Bill(RunFolder(run.folder)).document() == {}
    assert "Bill" not in report(run.folder).output


def test_the_page_of_a_long_run_reads_the_newest_traces_and_each_once(tmp_path: Path) -> None:
    known = Known(tmp_path / "run")
    known.life(0)
    for number in range(1, 6):
        start = 10.0 * number
        known.iteration(number, start, start + 10, ("small-0", "main", "generation", start, start + 5))
    reads: list[int] = []

    class Counted(RunFolder):
        def trace(self, iteration: int) -> dict[str, Any]:
            reads.append(iteration)
            return super().trace(iteration)

    bill = Bill(Counted(known.folder))
    found = bill.document(newest=2)
    assert (found["first_iteration"], found["seconds"]) == (4, 20)
    assert sum(seconds for _, seconds, _ in found["parts"]) == pytest.approx(5 * 20)
    assert sorted(reads) == [4, 5]
    known.iteration(6, 60, 70)
    assert bill.document(newest=2)["first_iteration"] == 5
    assert 4 not in reads[2:]
    answer = json.loads(PageDocuments(RunFolder(known.folder)).answer("bill", 0.0, alive=True))
    assert answer["sentences"][0].startswith("5 GPUs for")


def test_spans_are_divided_as_seconds_are() -> None:
    """Against sets of whole seconds."""
    chosen = random.Random(3)

    def spans() -> list[tuple[float, float]]:
        starts = [chosen.randrange(40) for _ in range(chosen.randrange(6))]
        return merged((float(a), float(a + chosen.randrange(8))) for a in starts)

    def seconds(found: list[tuple[float, float]]) -> set[int]:
        return {second for a, b in found for second in range(int(a), int(b))}

    for _ in range(500):
        one, other = spans(), spans()
        taken, rest = take(one, other)
        assert taken == len(seconds(one) & seconds(other))
        assert seconds(rest) == seconds(one) - seconds(other)
        assert seconds(both(one, other)) == seconds(one) & seconds(other)
