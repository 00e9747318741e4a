r"""Make the recording of `dovetail ui --demo` from finished runs of this machine.

    for seed in 1 2 3; do
        dovetail run examples/quickstart.yaml --run-dir runs/quickstart-seed-$seed --seed $seed
    done
    dovetail run examples/quickstart.yaml --run-dir runs/quickstart-little-sft --seed 4 \
        --set spec.sft.steps=20 --set spec.reward.steps=20 --set spec.ppo.iterations=30
    python hack/record_demo.py runs/quickstart-seed-{1,2,3} runs/quickstart-little-sft

The page shows the folders' names. The first run is kept with its samples, timelines and schedule. Only the data that a
comparison needs is kept of the others."""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.protocol.wire import pack, unpack

TARGET = Path(__file__).parents[1] / "src/dovetail/tools/run_page/demo.json.xz"
# In the stages before PPO one of so many steps is kept.
EVERY = 5
# The tokens and log-probabilities of so many last iterations are kept.
BATCHES = 1
_DROPPED_EVENTS = ("instance.health", "sample.shown", "iteration.finished", "requests.aborted")


def rounded(value: Any, digits: int = 5) -> Any:
    """The value with all its numbers rounded to so many significant digits, and paths of this machine without their
    folders."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: part if key in ("time", "start_seconds") else rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part, digits) for part in value]
    if isinstance(value, str) and re.match(r"/[\w.-]+/", value):
        return value.rpartition("/")[2]
    return value


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def compact(document: Any, digits: int = 5) -> str:
    return json.dumps(rounded(document, digits), ensure_ascii=False, separators=(",", ":"))


def history(path: Path) -> str:
    rows = [row for row in lines(path) if row["stage"] in ("ppo", "evaluation") or row["step"] % EVERY == 1]
    return "".join(compact(row) + "\n" for row in rows)


def files(run: Path, whole: bool) -> dict[str, str]:
    """The texts of a run that are kept, by their path."""
    found = {name: compact(json.loads((run / name).read_text())) for name in ("job.json", "plan.json", "summary.json")}
    found["history.jsonl"] = history(run / "history.jsonl")
    events = [event for event in lines(run / "events.jsonl") if event["event"] not in _DROPPED_EVENTS]
    found["events.jsonl"] = "".join(compact(event) + "\n" for event in events)
    found |= {f"models/{path.parent.name}/dovetail.json": "{}" for path in sorted(run.glob("models/*/dovetail.json"))}
    if not whole:
        return found
    for path in sorted(run.glob("samples/*.jsonl")):
        found[f"samples/{path.name}"] = "".join(compact(row) + "\n" for row in lines(path))
    for path in sorted(run.glob("traces/*.json")):
        found[f"traces/{path.name}"] = compact(json.loads(path.read_text()), 7)
    if (run / "schedule.json").is_file():
        found["schedule.json"] = compact(json.loads((run / "schedule.json").read_text()))
    found["tokenizer/tokenizer.json"] = json.dumps(
        json.loads((run / "tokenizer" / "tokenizer.json").read_text()), ensure_ascii=False, separators=(",", ":")
    )
    return found


def batches(run: Path) -> dict[str, str]:
    """The tokens and log-probabilities of the last iterations."""
    found = {}
    for path in sorted(run.glob("experience/*.safetensors"))[-BATCHES:]:
        arrays = unpack(path.read_bytes())
        small = {
            n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in arrays.items() if n != "routed_experts"
        }
        found[str(int(path.stem))] = base64.b64encode(pack(small)).decode()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    runs = parser.parse_args().runs
    document = {
        "runs": [
            {"name": run.name, "files": files(run, i == 0), "batches": batches(run) if i == 0 else {}}
            for i, run in enumerate(runs)
        ]
    }
    packed = lzma.compress(json.dumps(document, ensure_ascii=False).encode(), preset=9 | lzma.PRESET_EXTREME)
    TARGET.write_bytes(packed)
    print(f"{TARGET}: {len(packed) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
