"""Switching a model's layout between real Gloo processes (PUZZLE section 5.2): bytes, and time.

    python benchmarks/bench_switch.py [--layers 10] [--hidden 1024] [--repeats 3] [--json FILE]

1. Four processes hold a training layout (pp 2 x dp 2, FSDP) and come to hold a generation layout (tp 2 x dp 2): by the
   routing table, against a broadcast of everything to everyone. Bytes received by all ranks together, against the least
   possible; contents are compared element by element.
2. Four trainer ranks (pp 2 x dp 2) with the trainer's engine and weight publisher, two receivers that verify and
   assemble. Gathered: each stage is gathered over dp, and its first rank sends it. Routed: every rank sends its shards.
   Then with an AdamW step before: one after the other, or each layer sent as it is stepped.

Times are medians of the repeats, from the first process's start to the last one's end. Prints a table for each part,
then one line of JSON for each row."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "research"))

import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from switching import layouts, publish
from switching.shapes import tensors

from helpers.free_ports import free_port

DEADLINE = 500.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "layers": options.layers,
        "hidden": options.hidden,
        "repeats": options.repeats,
        "receivers": 2,
        "source": {"pp": 2, "dp": 2, "sharded": True},
        "target": {"tp": 2, "dp": 2},
    }
    size = sum(4 * torch.Size(t.shape).numel() for t in tensors(options.layers, options.hidden))
    print(f"a model of {size / 1e6:.0f} MB in float32 on {os.cpu_count()} CPUs")
    rows = switch_rows(run_ranks("layouts", settings, 4)) + publish_rows(run_ranks("publish", settings, 6)[:4])
    lines = [json.dumps({"benchmark": "switch", "model_bytes": size, **row}) for row in rows]
    print("\n".join(lines))
    if options.json is not None:
        with options.json.open("a") as out:
            out.write("\n".join(lines) + "\n")
    return 0


def run_ranks(which: str, settings: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """Fork the processes of one part; what each of them found."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=rank_main, args=(which, r, port, settings, Path(folder))) for r in range(processes)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + DEADLINE
        try:
            for rank in ranks:
                rank.join(max(0.0, end - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        if any(statuses := [rank.exitcode for rank in ranks]):
            raise SystemExit(f"the processes of part {which} ended with {statuses}")
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(processes)]


def rank_main(which: str, rank: int, port: int, settings: dict[str, Any], folder: Path) -> None:
    found: dict[str, Any] = {}
    if which == "layouts":
        found = layouts.run(rank, 4, port, settings)
    elif rank < 4:
        found = publish.train(rank, 4, port, settings, folder)
    else:
        publish.receive(rank - 4, settings, folder, wait)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def wait(path: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.001)


def switch_rows(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    least = sum(rank["least"] for rank in ranks)
    found = []
    for way in ("broadcast of everything", "routed"):
        received = sum(rank[way]["received"] for rank in ranks)
        seconds = max(rank[way]["seconds"] for rank in ranks)
        found.append(
            {"part": "layouts", "way": way, "received": received, "least": least, "seconds": round(seconds, 3)}
        )
    show(
        "training layout (pp 2, dp 2) to generation layout (tp 2, dp 2), 4 processes",
        ["way", "MB received", "of the least possible", "seconds"],
        [
            [r["way"], f"{r['received'] / 1e6:.0f}", f"{r['received'] / least:.2f}", f"{r['seconds']:.2f}"]
            for r in found
        ],
    )
    return found


def publish_rows(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = ranks[0]
    found = []
    for way, seconds in first["ways"].items():
        found.append(
            {
                "part": "publish",
                "way": way,
                "bytes": first["bytes"],
                "seconds": round(seconds["median"], 3),
                "best": round(seconds["best"], 3),
                "step": round(first["step"], 3) if "step" in way else 0.0,
            }
        )
    show(
        f"4 trainer ranks (pp 2, dp 2) to 2 receivers; the optimizer step alone takes {first['step']:.2f} s",
        ["way", "MB sent", "seconds", "best"],
        [[r["way"], f"{r['bytes'] / 1e6:.0f}", f"{r['seconds']:.2f}", f"{r['best']:.2f}"] for r in found],
    )
    return found


def show(title: str, headings: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
