"""Whole PPO iterations against TRL's PPO trainer, on the same cores, in one run.

    python benchmarks/bench_e2e.py [--rounds 2] [--iterations 8] [--epochs 1 4] [--json FILE]

The same 3.3-million-parameter float32 Llama, prompts (64 of 16 tokens) and PPO settings for both; responses of at most
128 tokens end with probability 1/32 a token, so their lengths have a long tail and a mean of a quarter of the maximum.
Ours runs as `dovetail run` runs it: two vLLM servers, two scorers, two trainer ranks, a coordinator. TRL runs as one
process with two threads and as two processes with one; the faster of the two in the first round counts. Rounds
alternate. Times are medians over the rounds' iterations; the first two iterations of each run are left out, and so are
start-up, checkpoints and the final export. `cpu s` is the processor time that all processes of a system took for an
iteration: it tells on a busy machine what the clock does not.

First, TRL's losses on one batch are compared with ours (e2e/losses.py); the run fails when they differ.

TRL 1.12.0 is installed by uv into a virtual environment of its own, in --cache (not in the clone)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.settings import Folder, Settings

TRL, TORCH = "1.12.0", "2.13.0"
WORKER = Path(__file__).parent / "e2e" / "trl_worker.py"
PHASES = ("generation", "inference", "training", "weights", "other")
RUN_SECONDS = 3600.0
# Whole batches as mini-batches, so that TRL's random order does not matter, and a rate at which ratios leave 1 and
# clipping starts.
LOSS_STEPS, LOSS_RATE = 3, 1e-4
Rows = list[dict[str, float]]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail" / f"trl-{TRL}"


def trl_python(cache: Path) -> Path:
    """TRL's interpreter; makes the environment on first use. Raises RuntimeError when it cannot."""
    python = cache / "bin" / "python"
    done = cache / ".installed"
    if done.exists():
        return python
    uv = Path(sys.executable).with_name("uv")
    commands = [
        [str(uv), "venv", "--clear", "--python", sys.executable, str(cache)],
        [str(uv), "pip", "install", "--python", str(python), f"trl=={TRL}", f"torch=={TORCH}"],
    ]
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"could not install TRL: {' '.join(command)} failed")
    done.touch()
    return python


def run_trl(
    python: Path, folder: Folder, settings: Settings, work: Path, processes: int, threads: int, dump: Path | None = None
) -> Rows:
    """One TRL run; a row an iteration. Raises RuntimeError with the end of its log when it fails."""
    work.mkdir(parents=True)
    settings.save(work / "settings.json")
    command = [str(python)]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(WORKER), str(folder.path), str(work / "settings.json"), str(work / "rows.json")]
    command += ["--dump", str(dump)] if dump is not None else []
    environ = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    with (work / "log").open("wb") as log:
        status = subprocess.run(
            command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=RUN_SECONDS
        ).returncode
    if status or not (work / "rows.json").exists():
        raise RuntimeError(f"TRL failed:\n{(work / 'log').read_text(errors='replace')[-3000:]}")
    rows: Rows = json.loads((work / "rows.json").read_text())
    for row in rows:
        row["cpu_seconds"] *= processes  # rank 0's; the ranks do the same work
    return rows


def summarise(rows: Rows, batch: int) -> dict[str, Any]:
    """Medians over measured iterations; phases in seconds."""
    seconds = statistics.median(row["seconds"] for row in rows)
    phases = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in PHASES}
    cpu = [row["cpu_seconds"] for row in rows if "cpu_seconds" in row]
    return {
        "iterations": len(rows),
        "samples_per_second": round(batch / seconds, 3),
        "iteration_seconds": round(seconds, 3),
        "phases": {name: round(value, 3) for name, value in phases.items()},
        "other_share": round(statistics.median(row["other"] / row["seconds"] for row in rows), 4),
        "cpu_seconds": round(statistics.median(cpu), 3) if cpu else None,
        "response_length": round(statistics.fmean(row["response_length"] for row in rows), 2),
    }


def compare_losses(python: Path, folder: Folder, settings: Settings, work: Path) -> list[dict[str, Any]]:
    """One JSON line a quantity."""
    from e2e.losses import agree

    dump = work / "dump.safetensors"
    one = replace(
        settings, iterations=1, warmup=0, mini_batches=1, epochs=LOSS_STEPS, learning_rate=LOSS_RATE, kl_coef=0.05
    )
    run_trl(python, folder, one, work / "losses", 1, 1, dump)
    lines = []
    for found in agree(folder, one, dump):
        lines.append(
            {
                "measurement": "losses",
                "quantity": found.name,
                "trl": [round(x, 7) for x in found.trl],
                "ours": [round(x, 7) for x in found.ours],
                "max_difference": found.difference,
                "agrees": found.ok,
            }
        )
    return lines


def compare_speed(
    python: Path, folder: Folder, settings: Settings, work: Path, rounds: int, ours_only: bool = False
) -> list[dict[str, Any]]:
    """Alternate; one JSON line a system, and one with the ratio."""
    from e2e.ours import manifest, run

    ways = {"2 processes of 1 thread": (2, 1), "1 process of 2 threads": (1, 2)}
    rows: dict[str, Rows] = {"ours": [], "trl": []}
    way = ""
    for number in range(rounds):
        here = work / f"epochs-{settings.epochs}-round-{number}"
        rows["ours"] += run(manifest(folder, settings), here / "ours")[settings.warmup :]
        if ours_only:
            continue
        tries = {
            name: run_trl(python, folder, settings, here / f"trl-{processes}", processes, threads)[settings.warmup :]
            for name, (processes, threads) in ways.items()
            if not way or name == way
        }
        way = way or min(tries, key=lambda name: statistics.median(row["seconds"] for row in tries[name]))
        rows["trl"] += tries[way]
    lines = [
        {"measurement": "e2e", "system": name, "epochs": settings.epochs, **summarise(found, settings.batch)}
        for name, found in rows.items()
        if found
    ]
    if ours_only:
        return lines
    lines[1]["way"] = way
    ratio = lines[0]["samples_per_second"] / lines[1]["samples_per_second"]
    cpu = lines[1]["cpu_seconds"] / lines[0]["cpu_seconds"] if lines[0]["cpu_seconds"] else None
    lines.append(
        {
            "measurement": "e2e ratio",
            "epochs": settings.epochs,
            "ours_over_trl": round(ratio, 3),
            "trl_cpu_over_ours": cpu and round(cpu, 3),
            "load_average": round(os.getloadavg()[0], 1),
        }
    )
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    speed = [line for line in lines if line["measurement"] == "e2e"]
    if speed:
        table = Table(title="one iteration of 64 samples: seconds (medians)")
        for name in ("system", "epochs", "samples/s", "iteration", *PHASES, "cpu s", "tokens"):
            table.add_column(name, justify="right")
        for line in speed:
            phases = [f"{line['phases'][name]:.2f}" for name in PHASES]
            table.add_row(
                line["system"],
                str(line["epochs"]),
                f"{line['samples_per_second']:.2f}",
                f"{line['iteration_seconds']:.2f}",
                *phases,
                "-" if line["cpu_seconds"] is None else f"{line['cpu_seconds']:.2f}",
                f"{line['response_length']:.1f}",
            )
        console.print(table)
    for line in lines:
        if line["measurement"] == "e2e ratio":
            console.print(f"epochs {line['epochs']}: {line['ours_over_trl']:.2f} times TRL's samples per second")
    losses = [line for line in lines if line["measurement"] == "losses"]
    if losses:
        table = Table(title="the same batch through both")
        for name in ("quantity", "TRL", "ours", "largest difference"):
            table.add_column(name, justify="right")
        for line in losses:
            numbers = [" ".join(f"{x:.6f}" for x in line[name]) for name in ("trl", "ours")]
            table.add_row(line["quantity"], *numbers, f"{line['max_difference']:.1e}")
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    """0 if everything ran and the losses agree, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8, help="of a run, with two that are not measured")
    parser.add_argument("--epochs", type=int, nargs="*", default=[1, 4], help="PPO epochs to measure with")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="TRL's virtual environment")
    parser.add_argument("--ours-only", action="store_true", help="skip TRL, for profiling")
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args(argv)
    settings = Settings(iterations=options.iterations)
    if settings.iterations <= settings.warmup:
        parser.error(f"--iterations must be above {settings.warmup}")
    python = options.cache / "bin" / "python" if options.ours_only else trl_python(options.cache)

    from e2e.model import make_models

    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = Folder(work / "models")
        make_models(folder, settings)
        if not options.ours_only:
            lines += compare_losses(python, folder, settings, work)
        for epochs in options.epochs:
            chosen = replace(settings, epochs=epochs)
            lines += compare_speed(python, folder, chosen, work, options.rounds, options.ours_only)
    show(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(text)
    wrong = [line["quantity"] for line in lines if line["measurement"] == "losses" and not line["agrees"]]
    if wrong:
        print(f"TRL and ours disagree on: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
