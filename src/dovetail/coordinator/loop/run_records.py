"""The files and metrics to which a run writes what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.results import Results
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.telemetry.telemetry import CoordinatorMetrics, MetricsHistory, Status
from dovetail.coordinator.telemetry.timeline import Timeline


@dataclass(frozen=True)
class RunRecords:
    """What a run keeps for a restart (`store`, `batches`), what it tells its user (`history`, `results`, `timeline`),
    and what it shows (`metrics`, `progress`, `log`)."""

    store: Store
    results: Results
    history: MetricsHistory
    timeline: Timeline
    batches: ExperienceFiles
    metrics: CoordinatorMetrics
    progress: Status
    log: Callable[..., None]

    @staticmethod
    def of(run_dir: Path, store: Store, seed: int, registry: CollectorRegistry, log: Callable[..., None]) -> RunRecords:
        """The records of the run in `run_dir`. Its metrics are in `registry`."""
        return RunRecords(
            store,
            Results(store, run_dir, seed),
            MetricsHistory(run_dir),
            Timeline(run_dir),
            ExperienceFiles(run_dir),
            CoordinatorMetrics(registry),
            Status(),
            log,
        )

    def close(self) -> None:
        """Close the files."""
        self.history.close()
        self.store.close()
