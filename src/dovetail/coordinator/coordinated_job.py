"""What every part of a job's loop needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dovetail.coordinator.loop.model_sources import ModelSources
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.plan import Plan


@dataclass(frozen=True)
class CoordinatedJob:
    """A job and its run. `folder` is the run's, and `run` its id. `records` are its store, files, metrics and log.
    `sources` says from what each model starts."""

    spec: RLHFJobSpec
    plan: Plan
    folder: Path
    run: str
    records: RunRecords
    sources: ModelSources
