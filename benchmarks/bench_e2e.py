"""Whole GRPO runs beside TRL's GRPOTrainer: CPU seconds of all processes, start-up apart.

    python benchmarks/bench_e2e.py [--rounds 2] [--cases short long] [--json FILE]

Both get the same small float32 Llama with random weights, the same prompts, reward function and settings. A random
answer ends with probability 1/32 a token, so the limit of tokens decides the mean: `short` has 10,240 answers of 5
tokens, `long` 640 of 27. Ours is a whole job: coordinator, a vLLM server, a scorer, a trainer rank, a reward worker.
TRL is one process with one thread. Rounds alternate. `start-up` ends with the first iteration, so it has the
iteration's own cost; the last column but one is what each further answer costs. CPU seconds tell on a busy machine what
the clock does not."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e import ours
from race.ours import TRL_OPTIMIZER, manifest
from race.tasks import SETTINGS

CASES: dict[str, dict[str, Any]] = {
    "short": SETTINGS | {"iterations": 20, "prompts": 64, "samples": 8, "max_tokens": 5},
    "long": SETTINGS | {"iterations": 10, "prompts": 8, "samples": 8, "max_tokens": 58},
}
POSITIONS = 128
PROMPTS = 2048
RUN_SECONDS = 3600.0
Marks = list[tuple[float, float]]


def make_base(folder: Path) -> None:
    """Write the model, its tokenizer and prompts.jsonl."""
    import torch
    from race.models import CONFIG, tokenizer
    from race.tasks import prompts
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    records = prompts("sort", PROMPTS, 0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG | {"max_position_embeddings": POSITIONS})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def run_trl(base: Path, settings: dict[str, Any], work: Path) -> Marks:
    """Raises RuntimeError with the end of its log when it fails."""
    work.mkdir(parents=True)
    (work / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "e2e.trl_worker", str(base), str(work / "settings.json"), str(work / "marks.json")]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parent)
    with (work / "log").open("wb") as log:
        status = subprocess.run(
            command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=RUN_SECONDS
        ).returncode
    if status:
        raise RuntimeError(f"TRL failed:\n{(work / 'log').read_text(errors='replace')[-3000:]}")
    return [(cpu, wall) for cpu, wall in json.loads((work / "marks.json").read_text())]


def run_ours(base: Path, settings: dict[str, Any], work: Path) -> Marks:
    """Raises RuntimeError if the job fails."""
    meter = ours.CpuMeter(work / "history.jsonl")
    ours.run(manifest(base, settings, 0, TRL_OPTIMIZER), work, meter)
    return meter.marks[1:]


@dataclass(frozen=True)
class Run:
    """`cpu` and `wall`: seconds of the whole run, with its end. `marks`: those when each iteration had ended."""

    cpu: float
    wall: float
    marks: Marks


def measured(run: Callable[..., Marks], *arguments: Any) -> Run:
    """Run a system. Its processes are children of this one, or children of these."""

    def cpu() -> float:
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    before, begun = cpu(), time.monotonic()
    marks = run(*arguments)
    return Run(cpu() - before, time.monotonic() - begun, marks)


def summarise(runs: list[Run], settings: dict[str, Any]) -> dict[str, float]:
    """Medians over runs. A run may end before the mark of its last iteration was taken."""
    batch = settings["prompts"] * settings["samples"]

    def further(marks: Marks) -> float:
        return 1000 * (marks[-1][0] - marks[0][0]) / (batch * (len(marks) - 1))

    return {
        "cpu_seconds": round(statistics.median(run.cpu for run in runs), 3),
        "start_up_cpu_seconds": round(statistics.median(run.marks[0][0] for run in runs), 3),
        "cpu_ms_a_sample": round(statistics.median(further(run.marks) for run in runs), 3),
        "wall_seconds": round(statistics.median(run.wall for run in runs), 3),
    }


def show(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="GRPO, medians")
    for name in ("case", "system", "cpu s", "of this start-up", "cpu ms a further sample", "wall s"):
        table.add_column(name, justify="right")
    for line in lines:
        numbers = ("cpu_seconds", "start_up_cpu_seconds", "cpu_ms_a_sample", "wall_seconds")
        table.add_row(line["case"], line["system"], *(f"{line[name]:.2f}" for name in numbers))
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    """0 if everything ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ours-only", action="store_true", help="skip TRL, for profiling")
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args(argv)
    systems = {"ours": run_ours} if options.ours_only else {"ours": run_ours, "TRL": run_trl}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        make_base(work / "base")
        for case in options.cases:
            runs: dict[str, list[Run]] = {name: [] for name in systems}
            for number in range(options.rounds):
                for name, run in systems.items():
                    place = work / f"{case}-{name}-{number}"
                    runs[name].append(measured(run, work / "base", CASES[case], place))
            for name, found in runs.items():
                lines.append({"measurement": "e2e", "case": case, "system": name} | summarise(found, CASES[case]))
    show(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
