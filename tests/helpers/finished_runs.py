"""A run directory as a finished run leaves it, for tests of what shows it."""

import json
import math
import re
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.page.overview import last_of_each_step
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span

SUMMARY = {
    "state": "succeeded",
    "seed": 7,
    "wall_seconds": 247.4,
    "samples_per_second": 13.37,
    "sft": {"loss_before": 6.2341, "loss_after": 1.8765},
    "reward_model": {"accuracy": 0.934, "pairs": 256},
    "ppo": {
        "reward_first": {"mean": 0.123, "ci95": 0.045},
        "reward_last": {"mean": 1.987, "ci95": 0.067},
        "kl_first": {"mean": 0.001, "ci95": 0.0005},
        "kl_last": {"mean": 2.34, "ci95": 0.21},
    },
    "evaluation": {
        "prompts": 64,
        "quality": {"before_ppo": {"mean": 0.475, "ci95": 0.06}, "after_ppo": {"mean": 0.931, "ci95": 0.02}},
    },
    "phases": {
        "generation": 50.0,
        "inference": 10.0,
        "training": 30.0,
        "weights": 5.0,
        "checkpoint": 3.0,
        "other": 2.0,
    },
    "stages": {"sft": 31.0, "reward": 22.0, "ppo": 100.0},
}


def spans(iteration: int = 1):
    def span(name, process, start, end, lane="main", **args):
        return Span(
            name=name, process=process, lane=lane, start=1e9 + start, end=1e9 + end, iteration=iteration, args=args
        )

    yield span("generation", "coordinator", 0.0, 2.0, "phases")
    yield span("inference", "coordinator", 2.0, 2.4, "phases")
    yield span("training", "coordinator", 2.4, 3.6, "phases")
    yield span("weights", "coordinator", 3.6, 3.8, "phases")
    for server in range(2):
        for k in range(6):
            yield span("generate", f"small-{server}", 0.01 + 0.01 * k, 0.6 + 0.25 * k + 0.1 * server, tokens=20 * k)
        yield span("score", f"small-{server}-scorer", 1.2, 2.3, samples=32)
    for rank in range(2):
        for k in range(8):
            yield span(
                "F" if k % 2 == 0 else "B", f"trainer-{rank}", 2.45 + 0.14 * k, 2.57 + 0.14 * k, micro_batch=k // 2
            )


def finished_run(path: Path, *, iterations: int = 30) -> Path:
    (path / "traces").mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(SUMMARY))
    (path / "job.json").write_text(json.dumps({"metadata": {"name": "quick-run"}}))
    lines = []
    for k in range(1, 121):
        lines.append(("sft", k, {"loss": 6.2 * math.exp(-k / 30) + 1.8, "learning_rate": 1e-3}))
    for k in range(1, 81):
        lines.append(("reward", k, {"loss": 0.69 * math.exp(-k / 25) + 0.1, "accuracy": 1 - 0.5 * math.exp(-k / 20)}))
    for k in range(1, iterations + 1):
        lines.append(
            (
                "ppo",
                k,
                {
                    "reward": 2 - 2 * math.exp(-k / 10),
                    "reward_ci95": 0.1,
                    "kl": 0.08 * k,
                    "kl_ci95": 0.02,
                    "response_length": 24 - 0.1 * k,
                    "response_length_max": 48,
                    "entropy": 1.5 - 0.02 * k,
                    "value_loss": 0.5 / k,
                    "policy_loss": -0.01,
                    "samples_per_second": 13.0,
                },
            )
        )
    text = "".join(json.dumps({"stage": s, "step": k, "time": 0.0, "metrics": m}) + "\n" for s, k, m in lines)
    (path / "history.jsonl").write_text(text + '{"stage": "ppo", "st')
    for k in (iterations - 1, iterations):
        trace = json.dumps(chrome_trace(spans(k), {"iteration": k}))
        (path / "traces" / f"iteration-{k:04d}.json").write_text(trace)
    return path


def history_of(run_dir: Path) -> dict[str, dict[int, dict[str, float]]]:
    """{stage: {step: metrics}} of a run's history."""
    rows = RunFolder(run_dir).rows()
    return {
        stage: {step: row["metrics"] for step, row in last_of_each_step(rows, stage).items()}
        for stage in dict.fromkeys(row["stage"] for row in rows)
    }


def report_answers(run_dir: Path) -> dict[str, Any]:
    """The answers to the page's questions in a run's report.html."""
    return page_data((run_dir / "report.html").read_text())["answers"]


def page_data(text: str) -> Any:
    """The data of a page that is one file."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)
