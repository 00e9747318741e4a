"""The results of a job so far. They are kept in the store, and written as summary.json."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.store.manifest_changes import CHANGES
from dovetail.coordinator.store.store import Store
from dovetail.protocol.files.durable import write_json


def mean_ci95(values: Sequence[float]) -> dict[str, float]:
    """The mean, and the half-width of its 95% confidence interval. That is 1.96 s / sqrt(n) with the unbiased standard
    deviation s, and 0 for n < 2."""
    n = len(values)
    if n == 0:
        raise ValueError("no values")
    mean = math.fsum(values) / n
    if n < 2:
        return {"mean": mean, "ci95": 0.0}
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return {"mean": mean, "ci95": 1.96 * math.sqrt(variance / n)}


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in nested dictionaries: set_path(d, "ppo.reward_first", x). Missing dictionaries are created."""
    *parents, last = path.split(".")
    for name in parents:
        document = document.setdefault(name, {})
    document[last] = value


def build(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Nest facts with dotted names: {"sft.loss_before": 3.1} -> {"sft": {"loss_before": 3.1}}."""
    document: dict[str, Any] = {}
    for path in sorted(facts):
        set_path(document, path, facts[path])
    return document


NOTE_SECONDS = 5.0
# The records that are not facts. Stages are in the order in which they run.
STEPS = {"sft": "sft/step", "reward": "reward/step", "dpo": "dpo/step", "ppo": "ppo/progress"}
RECORDS = ("job/seconds", "ppo/totals", CHANGES, *STEPS.values())


def summarise(records: Mapping[str, Any], state: str, reason: str | None = None) -> dict[str, Any]:
    """The content of summary.json, from a store's records. It has facts, totals and the job's progress.

    `progress` has the last stage that began, and its last finished step. For PPO that is an iteration."""
    document = build({key.removeprefix("fact/"): value for key, value in records.items() if key.startswith("fact/")})
    document["state"] = state
    if reason is not None:
        document["reason"] = reason
    if "job/seconds" in records:
        document["wall_seconds"] = records["job/seconds"]
    for stage, key in STEPS.items():
        done = records.get(key)
        if done is not None:
            document["progress"] = {"stage": stage, "done": done["step"] if isinstance(done, dict) else done}
    if changed := records.get(CHANGES):
        document["changes"] = changed
    totals = records.get("ppo/totals")
    if totals:
        document["samples_per_second"] = totals["samples"] / totals["seconds"]
        document["phases"] = totals["phases"]
        if "overlap" in totals:
            document["overlap"] = totals["overlap"]
    return document


class Results:
    """Facts by dotted name (`sft.loss_before`), totals of the PPO iterations, and the job's wall time over restarts.

    `clock` returns seconds that never go back."""

    def __init__(self, store: Store, run_dir: Path, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._path = run_dir / "summary.json"
        self._seed = seed
        self._clock = clock
        self._earlier = float(store.get("job/seconds") or 0.0)
        self._started = self._noted = clock()

    def fact(self, name: str, value: object) -> None:
        """Set one fact."""
        self._store.put(f"fact/{name}", value)

    def add_iteration(
        self, samples: int, wall_seconds: float, phases: Mapping[str, float], synchronous: float | None = None
    ) -> None:
        """Add one PPO iteration to the totals. If its phases overlap, `synchronous` is the seconds that they would take
        one after the other."""
        totals = self._store.get("ppo/totals") or {"samples": 0, "seconds": 0.0, "phases": {}}
        totals["samples"] += samples
        totals["seconds"] += wall_seconds
        for name, seconds in phases.items():
            totals["phases"][name] = totals["phases"].get(name, 0.0) + seconds
        if synchronous is not None:
            before = totals.get("overlap") or {"iterations": 0, "seconds": 0.0, "synchronous_seconds": 0.0}
            totals["overlap"] = {
                "iterations": before["iterations"] + 1,
                "seconds": before["seconds"] + wall_seconds,
                "synchronous_seconds": before["synchronous_seconds"] + synchronous,
            }
        self._store.put("ppo/totals", totals)

    def note_time(self) -> None:
        """Store the wall time from time to time, so that the time of a coordinator that is killed counts too."""
        now = self._clock()
        if now - self._noted >= NOTE_SECONDS:
            self._noted = now
            self._store.put("job/seconds", self.wall_seconds())

    def write(self, state: str, reason: str | None = None) -> dict[str, Any]:
        """Write summary.json. Returns its content. Raises OSError."""
        document = self.document(state, reason)
        write_json(self._path, document)
        return document

    def document(self, state: str, reason: str | None = None) -> dict[str, Any]:
        """The content of summary.json, if it were written now."""
        records = self._store.items("fact") | {key: self._store.get(key) for key in RECORDS}
        return summarise(records | {"job/seconds": self.wall_seconds()}, state, reason) | {"seed": self._seed}

    def wall_seconds(self) -> float:
        """The job's wall time, over all restarts of its coordinator."""
        return self._earlier + self._clock() - self._started


def write_final_summary(run_dir: Path, state: str, reason: str | None) -> None:
    """Write summary.json for a coordinator that could not write it. It uses the readable part of the store. No
    coordinator may have the store open. Raises OSError."""
    document = summarise(_records(run_dir / "store.sqlite"), state, reason)
    # A pod's manifest is in another folder, and a damaged manifest may be the reason for the failure.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document["seed"] = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))["spec"]["seed"]
    write_json(run_dir / "summary.json", document)


def _records(path: Path) -> dict[str, Any]:
    """Everything that `summarise` needs. {} if the store is missing or cannot be read."""
    try:
        # This does not use `Store`, which would recover the samples of a dead coordinator.
        with contextlib.closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=5.0)) as db:
            marks = ",".join("?" * len(RECORDS))
            rows = db.execute(
                f"SELECT key, value FROM kv WHERE key LIKE 'fact/%' OR key IN ({marks})", RECORDS
            ).fetchall()
        return {key: json.loads(value) for key, value in rows}
    except (sqlite3.Error, ValueError):
        return {}
