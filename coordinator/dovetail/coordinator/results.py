"""What a job has achieved so far, kept in the store, and summary.json made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.changes import CHANGES
from dovetail.coordinator.store import Store
from dovetail.coordinator.summary import build, write_json

NOTE_SECONDS = 5.0


class Results:
    """Facts by dotted name (`sft.loss_before`), totals of the PPO iterations, and the job's wall time over restarts.

    `clock`: seconds."""

    def __init__(self, store: Store, run_dir: Path, seed: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._path = run_dir / "summary.json"
        self._seed = seed
        self._clock = clock
        self._earlier = float(store.get("job/seconds") or 0.0)
        self._started = self._noted = clock()

    def fact(self, name: str, value: object) -> None:
        """Set one fact."""
        self._store.put(f"fact/{name}", value)

    def add_iteration(self, samples: int, wall_seconds: float, phases: Mapping[str, float]) -> None:
        """Add one PPO iteration to the totals."""
        totals = self._store.get("ppo/totals") or {"samples": 0, "seconds": 0.0, "phases": {}}
        totals["samples"] += samples
        totals["seconds"] += wall_seconds
        for name, seconds in phases.items():
            totals["phases"][name] = totals["phases"].get(name, 0.0) + seconds
        self._store.put("ppo/totals", totals)

    def note_time(self) -> None:
        """Keep the wall time now and then, so that a killed coordinator's life counts."""
        now = self._clock()
        if now - self._noted >= NOTE_SECONDS:
            self._noted = now
            self._store.put("job/seconds", self._wall_seconds())

    def write(self, state: str, reason: str | None = None) -> dict[str, Any]:
        """Write summary.json; returns its content."""
        document = build({key.removeprefix("fact/"): value for key, value in self._store.items("fact").items()})
        document |= {"state": state, "seed": self._seed, "wall_seconds": self._wall_seconds()}
        if reason is not None:
            document["reason"] = reason
        if changed := self._store.get(CHANGES):
            document["changes"] = changed
        totals = self._store.get("ppo/totals")
        if totals:
            document["samples_per_second"] = totals["samples"] / totals["seconds"]
            document["phases"] = totals["phases"]
        write_json(self._path, document)
        return document

    def _wall_seconds(self) -> float:
        return self._earlier + self._clock() - self._started
