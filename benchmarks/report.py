"""Runs the benchmarks of docs/performance.md and writes the page: `make report-performance`.

    python benchmarks/report.py [--only coordinator batches ...] [--timeout 3600]

Figures are kept in benchmarks/results.json, those of each section with commit, date, machine and load. A run takes all
sections again, or some. A section whose benchmark fails, or never ran, is not in the page. Words are in
benchmarks/performance.md.jinja, and so are figures that few machines or hours can take again."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs/performance.md"
KEPT_TEXT_LINES = 40
# 100,000 samples at once, one in a thousand of them with 32,768 tokens, and 125 servers that are killed.
FLEET = {
    "SAMPLES": "100000",
    "INSTANCES": "2000",
    "PROCESSES": "16",
    "STEP": "0.1",
    "STRIDE": "32",
    "LONG": "1000",
    "KILL": "1",
    "END_SAMPLES": "64",
}


@dataclass(frozen=True)
class Section:
    """`command`: arguments of Python, in the repository. `environment`: set for it. `columns`: {header: (field,
    format)} of its JSON lines, where `keep` has the values that a line must have. Without columns the end of what it
    prints is shown, from the first line that has `begin` on."""

    command: str
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    keep: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    begin: str = ""

    def measure(self, seconds: float) -> dict[str, Any] | None:
        """What is kept of a run. None if the benchmark failed, or took longer than `seconds`."""
        command = [sys.executable, *self.command.split()]
        told = {"command": self.shown, **here()}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | self.environment, stdout=subprocess.PIPE, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            print(f"{self.command} took longer than {seconds:.0f} s", file=sys.stderr)
            return None
        # Libraries print dictionaries of Python, too.
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
        # A benchmark also exits with 1 where an aim was missed: the page says that.
        if done.returncode > 1 or (self.columns and not lines) or not done.stdout.strip():
            print(f"{self.command} exited with {done.returncode}", file=sys.stderr)
            return None
        if self.columns:
            fields = [name.partition(".")[0] for name, _ in self.columns.values()]
            wanted = [line for line in lines if self.keep.items() <= line.items()]
            return {
                **told,
                "lines": [{k: v for k, v in line.items() if k in {*fields, *self.keep}} for line in wanted],
            }
        return {**told, "text": [line.rstrip() for line in done.stdout.splitlines()][-KEPT_TEXT_LINES:]}

    def show(self, result: Mapping[str, Any]) -> str:
        """The figures and what gave them, in Markdown."""
        found = self.table(result["lines"]) if self.columns else self.text(result["text"])
        taken = [result[name] for name in ("commit", "date", "machine") if name in result]
        load = [f"load average {result['load']}"] if "load" in result else []
        return f"{found}\n\n`{result['command']}`: {', '.join([*taken, *load])}."

    @property
    def shown(self) -> str:
        """The command as a user would type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), f"python {self.command}"])

    def table(self, lines: Sequence[Mapping[str, Any]]) -> str:
        rows = [line for line in lines if self.keep.items() <= line.items()]
        shown = {
            head: each for head, each in self.columns.items() if any(_value(row, each[0]) is not None for row in rows)
        }
        text = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
        for row in rows:
            cells = [_cell(_value(row, name), spec) for name, spec in shown.values()]
            text.append(f"| {' | '.join(cells)} |")
        return "\n".join(text)

    def text(self, printed: Sequence[str]) -> str:
        begin = next((i for i, line in enumerate(printed) if self.begin in line), 0)
        return "\n".join(["```text", *printed[begin:], "```"])


def _value(line: Mapping[str, Any], name: str) -> Any:
    found: Any = line
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "–"
    return format(value, spec) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


SECTIONS = {
    "demo": Section(
        "benchmarks/bench_demo.py",
        {
            "seed": ("seed", ""),
            "reward, first": ("reward_first", ".2f"),
            "reward, last": ("reward_last", ".2f"),
            "KL, last (nats)": ("kl_last", ".2f"),
            "quality after SFT": ("quality_after_sft", ".3f"),
            "quality after PPO": ("quality_after_ppo", ".3f"),
            "±": ("quality_ci95", ".3f"),
            "CPU s": ("cpu_seconds", ".0f"),
            "wall s": ("seconds", ".0f"),
        },
    ),
    "e2e": Section(
        "benchmarks/bench_e2e.py --rounds 1",
        {
            "answers": ("case", ""),
            "system": ("system", ""),
            "CPU s": ("cpu_seconds", ".1f"),
            "to the end of the first iteration": ("start_up_cpu_seconds", ".1f"),
            "CPU ms a further sample": ("cpu_ms_a_sample", ".2f"),
            "wall s": ("wall_seconds", ".0f"),
        },
    ),
    "race": Section(
        "benchmarks/bench_race.py --parts steps",
        {
            "loss": ("case", ""),
            "steps": ("steps", ""),
            "difference": ("difference", ".1e"),
            "largest difference of an advantage": ("advantages", ".1e"),
        },
        {"measurement": "steps"},
    ),
    "coordinator": Section(
        "benchmarks/bench_coordinator.py",
        {
            "CPU ms a sample": ("cpu_ms_per_sample", ".2f"),
            "CPU µs a token": ("cpu_us_per_token", ".1f"),
            "bytes a token": ("bytes_per_token", ".1f"),
            "turn, p99 ms": ("turn_ms_p99", ".1f"),
            "turn, longest ms": ("turn_ms_max", ".0f"),
            "memory, MB": ("memory_mb", ".0f"),
            "retries": ("retries", ""),
        },
        {"benchmark": "coordinator"},
    ),
    "fleet": Section(
        "benchmarks/bench_coordinator.py",
        {
            "servers": ("instances", ",d"),
            "killed": ("killed", ""),
            "samples": ("samples", ",d"),
            "tokens": ("tokens", ",d"),
            "CPU ms a sample": ("cpu_ms_per_sample", ".2f"),
            "CPU µs a token": ("cpu_us_per_token", ".1f"),
            "bytes a token": ("bytes_per_token", ".1f"),
            "turn, p99 ms": ("turn_ms_p99", ".1f"),
            "turn, longest ms": ("turn_ms_max", ".0f"),
            "memory, MB": ("memory_mb", ",.0f"),
        },
        {"benchmark": "coordinator"},
        FLEET,
    ),
    "batches": Section(
        "benchmarks/bench_batches.py",
        {
            "what": ("benchmark", ""),
            "CPU s": ("cpu_seconds", ".2f"),
            "longest turn, CPU ms": ("turn_ms", ".0f"),
            "file, MB": ("file_mb", ".0f"),
            "sent, MB": ("sent_mb", ",.0f"),
            "rise of memory, MB": ("peak_mb", ".0f"),
        },
    ),
    "scoring": Section(
        "benchmarks/bench_scoring.py",
        {
            "way": ("way", ""),
            "tokens": ("tokens", ",d"),
            "CPU s": ("cpu_seconds", ".2f"),
            "times padded": ("speedup", ".2f"),
        },
    ),
    "weights": Section(
        "benchmarks/bench_weights.py",
        {
            "way": ("way", ""),
            "GB/s": ("gigabytes_per_second", ".2f"),
            "share of a raw broadcast": ("share_of_raw_send", ".2f"),
            "with loading": ("share_of_raw_total", ".2f"),
        },
    ),
    "interstage": Section(
        "benchmarks/bench_interstage.py --instances 8 16 32",
        {
            "servers": ("instances", ""),
            "best": ("best_speedup", ".2f"),
            "chosen": ("chosen_speedup", ".2f"),
            "chosen over best, seconds": ("chosen_over_best_seconds", ".3f"),
            "largest error of predictions": ("prediction_error_max", ".1%"),
        },
        {"measurement": "interstage emulated choice"},
    ),
    "async": Section(
        "benchmarks/bench_async.py",
        {
            "lag": ("lag", ""),
            "times lag 0": ("speedup", ".2f"),
            "predicted": ("predicted_speedup", ".2f"),
            "trainers idle": ("trainer_idle", ".1%"),
        },
    ),
    "spot": Section(
        "benchmarks/bench_spot.py --life 60 --gap 15 --rounds 64",
        {
            "noticed": ("noticed", ""),
            "deaths": ("deaths", ""),
            "goodput": ("goodput", ".3f"),
            "tokens made twice": ("twice", ".2%"),
            "same tokens": ("same", ""),
        },
    ),
    "predict": Section(
        "benchmarks/bench_predict.py",
        {
            "jobs": ("jobs", ""),
            "median error": ("median_error", ".1%"),
            "worst": ("worst_error", ".1%"),
            "rank correlation": ("rank_correlation", ".2f"),
            "chosen plan over best": ("chosen_over_best", ".3f"),
        },
        {"measurement": "predict summary"},
    ),
    "pipeline": Section(
        "benchmarks/bench_pipeline.py",
        environment={"PARTS": "real"},
        begin="schedule",
    ),
    "table3": Section(
        "research/bench_table3.py",
        environment={"PROBLEMS": "0", "SECONDS_TABLE": "105"},
        begin="speed-up",
    ),
    "memory": Section(
        "benchmarks/bench_memory_gpu.py --only 8B 70B",
        {
            "case": ("case", ""),
            "allocated": ("allocated_gib", ".1f"),
            "reserved": ("reserved_gib", ".1f"),
            "planner": ("predicted_gib", ".1f"),
            "error": ("error", "+.1%"),
        },
    ),
    "operator": Section(
        "benchmarks/bench_operator.py",
        {
            "jobs": ("jobs", ",d"),
            "all pods, s": ("operator.all_pods_s", ".0f"),
            "times JobSets alone": ("times_jobset_alone", ".2f"),
            "times by hand": ("times_all_objects_by_hand", ".2f"),
            "CPU ms a job": ("operator.own_cpu_ms_of_a_job", ""),
            "event to applied, p99 ms": ("events.p99_ms", ""),
        },
    ),
}


def page(results: Mapping[str, Any]) -> str:
    """The page, from what is kept of each section."""

    def section(name: str, caller: Callable[[], str]) -> str:
        found = results.get(name)
        return f"{caller().strip()}\n\n{SECTIONS[name].show(found)}\n\n" if found is not None else ""

    template = Template(
        (HERE / "performance.md.jinja").read_text(encoding="utf-8"), trim_blocks=True, undefined=StrictUndefined
    )
    return template.render(section=section, taken=results).strip() + "\n"


def kept() -> dict[str, Any]:
    """The figures that were taken, by section."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def here() -> dict[str, Any]:
    """Of what, when and where figures are taken."""
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "commit": commit,
        "date": f"{datetime.now(UTC):%-d %B %Y}",
        "machine": f"{len(os.sched_getaffinity(0))} cores ({model or platform.machine()})",
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    """1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="none: write the page alone"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each")
    options = parser.parse_args()
    results, failed = kept(), False
    for name in options.only:
        print(f"{name}: python {SECTIONS[name].command}", file=sys.stderr, flush=True)
        found = SECTIONS[name].measure(options.timeout)
        failed = failed or found is None
        results.pop(name, None)
        if found is not None:
            results[name] = found
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
