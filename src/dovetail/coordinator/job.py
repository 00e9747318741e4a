"""What every part of a job's loop needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dovetail.coordinator.loop.model_sources import ModelSources
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.plan import Plan


@dataclass(frozen=True)
class Job:
    """A job and its run. `folder` is the run's, and `run` its id. `records` are its store, files, metrics and log.
    `sources` says from what each model starts. Other processes may take `start_seconds` to start. It is infinity if
    something else limits that. `clock` returns monotonic seconds."""

    spec: RLHFJobSpec
    plan: Plan
    folder: Path
    run: str
    records: RunRecords
    sources: ModelSources
    start_seconds: float = float("inf")
    clock: Callable[[], float] = time.monotonic

    @property
    def store(self) -> Store:
        return self.records.store

    @property
    def log(self) -> Callable[..., None]:
        return self.records.log
