"""The recorded runs of `dovetail ui --demo`. One of them is played as if it were running now. hack/record_demo.py
records runs of examples/quickstart.yaml."""

from __future__ import annotations

import asyncio
import base64
import json
import lzma
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

RECORDING = "demo.json.xz"
# The seconds of a PPO iteration in the demo, and those of a step of the stages before it.
PPO_SECONDS, STEP_SECONDS = 2.5, 0.05
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Recorded:
    """The runs of the recording. `files`: texts by path. `batches`: safetensors by iteration. `folder`: the folder to
    unpack it in."""

    folder: Path
    files: Mapping[str, str]
    batches: Mapping[int, bytes]

    def write(self, path: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.files[path], encoding="utf-8")

    def write_batch(self, iteration: int) -> None:
        target = self.folder / "experience" / f"{iteration:06d}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.batches[iteration])

    def write_all(self) -> None:
        for path in self.files:
            self.write(path)
        for iteration in self.batches:
            self.write_batch(iteration)


def recorded(scratch: Path) -> list[Recorded]:
    """The runs of the recording. The first one is the one that is played. Nothing is written yet."""
    packed = (resources.files("dovetail.tools.run_page") / RECORDING).read_bytes()
    document = json.loads(lzma.decompress(packed))
    return [
        Recorded(
            scratch / run["name"],
            run["files"],
            {int(number): base64.b64decode(data) for number, data in run["batches"].items()},
        )
        for run in document["runs"]
    ]


def unpack(scratch: Path) -> Recorded:
    """Write all runs except the first below `scratch`, and return the first."""
    first, *others = recorded(scratch)
    for run in others:
        run.write_all()
    return first


async def play(run: Recorded, pause: Pause = asyncio.sleep, clock: Callable[[], float] = time.time) -> None:
    """Write the run's files in the order in which the run wrote them. Their times become the present times."""
    for path in run.files:
        if path.startswith(("job.json", "plan.json", "tokenizer/")):
            run.write(path)
    rows = [json.loads(line) for line in run.files["history.jsonl"].splitlines()]
    events = [json.loads(line) for line in run.files["events.jsonl"].splitlines()]
    for row in rows:
        await pause(PPO_SECONDS if row["stage"] == "ppo" else STEP_SECONDS)
        moved = clock() - row["time"]
        while events and events[0]["time"] <= row["time"]:
            _append(run.folder / "events.jsonl", events.pop(0), moved)
        if row["stage"] in ("ppo", "evaluation"):
            _write_iteration(run, row["stage"], row["step"])
        _append(run.folder / "history.jsonl", row, moved)
    for event in events:
        _append(run.folder / "events.jsonl", event, clock() - event["time"])
    for path in run.files:
        if path.startswith(("models/", "summary.json")):
            run.write(path)


def _append(path: Path, entry: dict[str, Any], moved: float) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**entry, "time": round(entry["time"] + moved, 3)}) + "\n")


def _write_iteration(run: Recorded, stage: str, step: int) -> None:
    """Write what a run keeps of an iteration or an evaluation."""
    kind = "iteration" if stage == "ppo" else "evaluation"
    wanted = [f"samples/{kind}-{step:06d}.jsonl", *([f"traces/iteration-{step:04d}.json"] if stage == "ppo" else [])]
    for path in [*wanted, "schedule.json"]:
        if path in run.files:
            run.write(path)
    if stage == "ppo" and step in run.batches:
        run.write_batch(step)
