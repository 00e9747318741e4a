"""Follows the files of a run and tells one tracker what is new in them.

The coordinator starts it, with its order as a line of JSON on standard input, and closes that when the run is over.
What has been told is kept in `trackers/<kind>.json` of the run directory. So a tracker that was down, or a coordinator
that was restarted, loses nothing. Exits with 0 when all is told."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.telemetry.summary import write_json
from dovetail.coordinator.trackers.tracker_clients import CLIENTS, State, TrackerClient, TrackerSettings

FOLDER = "trackers"
LOOK_SECONDS = 1.0
# Bytes of history.jsonl at a time.
PAGE = 1 << 20
_TRACE = re.compile(r"iteration-(\d+)\.json")


class RunFollower:
    """What is new in a run directory since `state`, which it changes as it goes."""

    def __init__(self, run_dir: Path, state: State, client: TrackerClient) -> None:
        self._dir, self._state, self._client = run_dir, state, client

    def tell(self) -> None:
        """Tell all that is new. After each part the state can be kept. Raises what the client raises."""
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
            except (ValueError, KeyError, TypeError):  # cut off by a crash
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
    """Whether summary.json says that the run has succeeded."""
    try:
        return bool(json.loads((run_dir / "summary.json").read_text(encoding="utf-8")).get("state") == "succeeded")
    except (OSError, ValueError, AttributeError):
        return False


def read_state(path: Path) -> State:
    """The kept state; {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def follow(order: Mapping[str, Any], is_over: Callable[[float], bool]) -> None:
    """Tell the tracker of `order` until `is_over(seconds)`, which waits so long, says that the run is over."""
    kind, run_dir = str(order["kind"]), Path(order["run_dir"])
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.json"
    state = read_state(path)
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
    """Returns the exit code. An error is one line, the last on standard error."""
    os.nice(10)  # training comes first
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
