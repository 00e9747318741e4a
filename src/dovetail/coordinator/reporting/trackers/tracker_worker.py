"""Reads the new content of a run's files and sends it to one tracker.

The coordinator starts this process. Its settings are one JSON line on standard input, which the coordinator closes when
the run has ended. `trackers/<kind>.json` in the run directory records what was sent. So nothing is lost if the tracker
was unreachable or the coordinator was restarted. The process exits with 0 when everything is sent."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.trackers.tracker_clients import CLIENTS
from dovetail.coordinator.reporting.trackers.tracker_settings import State, TrackerClient, TrackerSettings
from dovetail.protocol.files.durable import read_object, write_json

FOLDER = "trackers"
LOOK_SECONDS = 1.0
# The number of bytes of history.jsonl that are read at a time.
PAGE = 1 << 20
_TRACE = re.compile(r"iteration-(\d+)\.json")


class RunFollower:
    """The new content of a run directory since `state`. It updates `state` as it sends."""

    def __init__(self, run_dir: Path, state: State, client: TrackerClient) -> None:
        self._dir, self._state, self._client = run_dir, state, client

    def tell(self) -> None:
        """Send everything that is new. The state can be saved after each part. Raises what the client raises."""
        while self._page():
            pass
        for number, path in self._traces():
            self._client.trace(json.loads(path.read_text(encoding="utf-8")))
            self._state["trace"] = number

    def _page(self) -> bool:
        offset = int(self._state.get("offset") or 0)
        try:
            with (self._dir / "history.jsonl").open("rb") as file:
                file.seek(offset)
                whole, newline, _ = file.read(PAGE).rpartition(b"\n")
        except FileNotFoundError:
            return False
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                row = str(row["stage"]), int(row["step"]), dict(row["metrics"]), float(row["time"])
            except (ValueError, KeyError, TypeError):  # a crash cut the line off
                continue
            self._client.log(*row)
        self._state["offset"] = offset + len(whole) + len(newline)
        return bool(newline)

    def _traces(self) -> list[tuple[int, Path]]:
        told = int(self._state.get("trace") or 0)
        try:
            names = os.listdir(self._dir / "traces")
        except FileNotFoundError:
            return []
        numbers = ((int(found[1]), name) for name in names if (found := _TRACE.fullmatch(name)))
        return [(number, self._dir / "traces" / name) for number, name in sorted(numbers) if number > told]


def succeeded(run_dir: Path) -> bool:
    """Whether summary.json says that the run succeeded."""
    return bool(read_object(run_dir / "summary.json").get("state") == "succeeded")


def follow(order: Mapping[str, Any], is_over: Callable[[float], bool]) -> None:
    """Send new content to the tracker of `order` until the run has ended. `is_over(seconds)` waits for that time and
    says whether it has."""
    kind, run_dir = str(order["kind"]), Path(order["run_dir"])
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.json"
    state = read_object(path)
    settings = TrackerSettings(order["project"], order["name"], order["url"], order["run"], folder, order["manifest"])
    client = CLIENTS[kind][1](settings, state)
    follower = RunFollower(run_dir, state, client)
    over = False
    while True:
        try:
            follower.tell()
        finally:
            write_json(path, state)
        if over:
            break
        over = is_over(LOOK_SECONDS)
    client.finish(succeeded(run_dir))


def main(argv: list[str] | None = None) -> int:
    """The entry point. Returns the exit code. An error is one line, the last one on standard error."""
    os.nice(10)  # training has priority
    order = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())

    def is_over(seconds: float) -> bool:
        ready, _, _ = select.select([0], [], [], seconds)
        return bool(ready)

    try:
        follow(order, is_over)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{type(error).__name__}: {text[:500]}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
