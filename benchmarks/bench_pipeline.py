"""The executor on real processes over Gloo: predicted and measured time of schedules, their memory, its own overhead.

1. Two ranks with real transformer stages: one mini-batch of actor and critic, serial (with a barrier between the
   models), zero-bubble, stitched, fused, split, and several stages a rank, and on torch.distributed.pipelining's own
   1F1B and ZB-V. Predictions use the times of forwards and backwards measured beforehand, waits left out. A second
   prediction of each round uses the same orders and the times of that round's own passes: what is missing are waits and
   the executor's own work.
2. Four and eight ranks whose stages sleep (on fewer cores, so computing ones would measure the scheduler of the
   operating system), also on torch's ZB-V: reached over predicted, overhead per action.

LAYERS (4), HIDDEN (256), MICRO_BATCHES (8), SEQUENCES (4), TOKENS (96): of part 1. UNIT: seconds of an actor's
forward in part 2 (0.005). REPEATS (7). PARTS (real,4,8)."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - once, before the ranks are forked
from pipeline import real, sleeping

from helpers.free_ports import free_port


def number(name: str, default: float) -> Any:
    """An environment variable, of the default's type."""
    return type(default)(os.environ.get(name, default))


def together(part: str, world: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the ranks of one part, forked from here; each one's results."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank_main, args=(part, r, world, port, settings, folder)) for r in range(world)]
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(timeout=560)
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses := [rank.exitcode for rank in ranks]):
            raise SystemExit(f"ranks of part {part} ended with {statuses}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def rank_main(part: str, rank: int, world: int, port: int, settings: dict[str, Any], folder: str) -> None:
    """One rank of a part."""
    run = real.run if part == "real" else sleeping.run
    (Path(folder) / f"{rank}.json").write_text(json.dumps(run(rank, world, port, settings)))


def print_real(results: list[dict[str, Any]]) -> None:
    rows = results[0]["rows"]
    base, predicted_base = statistics.median(rows["serial"]["seconds"]), rows["serial"]["predicted"]
    print(f"latency of a boundary tensor {results[0]['latency'] * 1e3:.2f} ms")
    print(f"both halves of a split backward take {results[0]['split']:+.1%} longer than the whole")
    columns = "".join(f"{name:>{width}}" for name, width in (("seconds", 9), ("min", 8), ("predicted", 11)))
    columns += f"{'speed-up':>10}{'predicted':>11}{'ratio':>7}{'own passes':>12}{'reached':>9}"
    print(f"  {'schedule':22}{columns}  peak MiB by rank (predicted)")
    for name, row in rows.items():
        took, promise = statistics.median(row["seconds"]), predicted_base / row["predicted"]
        speed = base / took
        own = reached = ""
        if row["own"]:
            ratios = [found / seconds for found, seconds in zip(row["own"], row["seconds"], strict=True)]
            own, reached = f"{statistics.median(row['own']):.3f}", f"{statistics.median(ratios):.3f}"
        memory = ""
        if row["peaks"]:
            memory = ", ".join(f"{m / 2**20:.1f} ({p / 2**20:.1f})" for m, p in zip(*row["peaks"], strict=True))
        print(
            f"  {name:22}{took:9.3f}{min(row['seconds']):8.3f}{row['predicted']:11.3f}{speed:10.3f}{promise:11.3f}"
            f"{speed / promise:7.3f}{own:>12}{reached:>9}  {memory}"
        )


def print_sleeping(world: int, results: list[dict[str, Any]]) -> None:
    print(f"\n{world} ranks that sleep")
    print(f"  {'schedule':18}{'seconds':>9}{'predicted':>11}{'reached':>9}{'us an action':>14}")
    for name, row in results[0].items():
        took = statistics.median(row["seconds"])
        over = (took - row["predicted"]) / row["actions"] * 1e6
        print(f"  {name:18}{took:9.3f}{row['predicted']:11.3f}{row['predicted'] / took:9.3f}{over:14.0f}")


def main() -> None:
    parts = os.environ.get("PARTS", "real,4,8").split(",")
    print(f"{os.cpu_count()} cores, load average before: {os.getloadavg()[0]:.1f}")
    real.compile_search()
    repeats = number("REPEATS", 7)
    if "real" in parts:
        settings = {
            "layers": number("LAYERS", 4),
            "hidden": number("HIDDEN", 256),
            "micro_batches": number("MICRO_BATCHES", 8),
            "sequences": number("SEQUENCES", 4),
            "tokens": number("TOKENS", 96),
            "repeats": repeats,
        }
        print("\ntwo ranks: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
        print_real(together("real", 2, settings))
    for part in parts:
        if part.isdigit():
            settings = {"unit": number("UNIT", 0.005), "ratio": 1.0, "micro_batches": 2 * int(part)}
            settings |= {"mini_batches": 2, "repeats": min(3, repeats)}
            print_sleeping(int(part), together("sleep", int(part), settings))
    print(f"\nload average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
