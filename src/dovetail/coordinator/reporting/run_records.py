"""The files and metrics in which a run records what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.results import Results
from dovetail.coordinator.reporting.sample_files import Row, SampleFiles, best_and_worst, sample_rows, shortened
from dovetail.coordinator.reporting.telemetry import CoordinatorMetrics, MetricsHistory, Status
from dovetail.coordinator.reporting.timeline import Timeline
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJobSpec, SampleLog
from dovetail.protocol.experience import Experience


@dataclass(frozen=True)
class RunRecords:
    """The records of a run. `store` and `batches` are for a restart. `history`, `results` and `timeline` are for the
    user. `metrics`, `progress` and `log` show the live state. `texts` is None if no text of samples is kept."""

    store: Store
    results: Results
    history: MetricsHistory
    timeline: Timeline
    batches: ExperienceFiles
    metrics: CoordinatorMetrics
    progress: Status
    log: Callable[..., None]
    texts: SampleFiles | None = None

    @staticmethod
    def of(
        run_dir: Path,
        store: Store,
        spec: RLHFJobSpec,
        registry: CollectorRegistry,
        log: Callable[..., None],
        predicted: float | None = None,
    ) -> RunRecords:
        """The records of the run in `run_dir`. `registry` holds its metrics. `predicted` is the predicted seconds of an
        iteration, or None."""
        megabytes = spec.samples.keep_megabytes
        return RunRecords(
            store,
            Results(store, run_dir, spec.seed),
            MetricsHistory(run_dir),
            Timeline(run_dir),
            ExperienceFiles(run_dir),
            CoordinatorMetrics(registry),
            Status(spec.stages, spec.ppo.iterations, predicted),
            log,
            SampleFiles(run_dir, megabytes * 10**6) if megabytes else None,
        )

    async def keep_text(self, settings: SampleLog, experience: Experience) -> None:
        """Write an iteration's samples as text. In some iterations, also log the best and the worst sample. A full disk
        does not stop the run."""
        if self.texts is None:
            return
        iteration, every = experience.iteration, settings.show_every_iterations
        rows, lost = await asyncio.to_thread(self._write_text, self.texts, experience)
        if lost is not None:
            self.log("samples.lost", iteration=iteration, error=lost)
        if not every or (iteration > 1 and iteration % every):
            return
        for which, row in best_and_worst(rows):
            told = {key: row[key] for key in ("reward", "rewards", "kl", "tokens", "finish_reason")}
            told = {key: value for key, value in told.items() if value is not None and value != {}}
            texts = {key: shortened(row[key]) for key in ("prompt", "response")}
            self.log("sample.shown", which=which, iteration=iteration, **told, **texts)

    def _write_text(self, texts: SampleFiles, experience: Experience) -> tuple[list[Row], str | None]:
        """Write the samples' file. Returns its rows, and the error if they could not be written."""
        iteration, table = experience.iteration, self.store.samples
        samples = table.samples(iteration)
        if len(samples) != len(experience.responses):
            return [], None  # a user's own loop may leave samples out
        rows = sample_rows(experience, samples, table.rewards(iteration))
        try:
            texts.write(iteration, rows)
        except OSError as error:
            return rows, str(error)
        return rows, None

    def close(self) -> None:
        """Close the files."""
        self.history.close()
        self.store.close()
