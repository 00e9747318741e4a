"""The files and metrics in which a run records what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.results import Results
from dovetail.coordinator.reporting.sample_files import Row, SampleFiles, best_and_worst, sample_rows, shortened
from dovetail.coordinator.reporting.telemetry import CoordinatorMetrics, MetricsHistory, Status
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJobSpec, SampleLog
from dovetail.protocol import clock
from dovetail.protocol.experience import Experience
from dovetail.protocol.files.durable import write_json
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import COORDINATOR


class Timeline:
    """Collects the spans that end between two calls of `begin`, and the seconds of each iteration's phases. If
    generation runs while the trainers train, a phase may belong to another iteration than the one that ends next."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "traces"
        self._dir.mkdir(parents=True, exist_ok=True)
        self._spans: list[Span] = []
        self._counters: dict[str, list[tuple[float, float]]] = {}
        self._of: dict[int, dict[str, float]] = {}
        self.started = clock.now()

    def begin(self) -> None:
        """Start an iteration. Spans of the last iteration that were not written are dropped."""
        self._spans = []
        self._counters = {}
        self.started = clock.now()

    def add(self, spans: Iterable[Span]) -> None:
        self._spans.extend(spans)

    def count(self, name: str, points: Iterable[tuple[float, float]]) -> None:
        """Add points (seconds since the epoch, value) to a curve."""
        self._counters.setdefault(name, []).extend(points)

    def spans(self, name: str) -> list[Span]:
        """The spans with this name so far."""
        return [s for s in self._spans if s.name == name]

    @contextmanager
    def phase(self, name: str, iteration: int, lane: str = "phases") -> Iterator[None]:
        """Measure a phase of an iteration."""
        start = clock.now()
        try:
            yield
        finally:
            end = clock.now()
            phases = self._of.setdefault(iteration, {})
            phases[name] = phases.get(name, 0.0) + end - start
            self._spans.append(
                Span(name=name, process=COORDINATOR, lane=lane, start=start, end=end, iteration=iteration)
            )

    def of(self, iteration: int) -> dict[str, float]:
        """The seconds of each phase that was measured for this iteration."""
        return dict(self._of.get(iteration, {}))

    def forget_through(self, iteration: int) -> None:
        """Drop the measurements of iterations up to this one."""
        self._of = {number: phases for number, phases in self._of.items() if number > iteration}

    def write(self, iteration: int) -> None:
        """Write traces/iteration-0001.json, for Perfetto and the report."""
        trace = chrome_trace(self._spans, {"iteration": iteration}, self._counters)
        write_json(self._path(iteration), trace)

    def read(self, iteration: int) -> bytes:
        """The trace that `write` wrote, as JSON. Raises FileNotFoundError."""
        return self._path(iteration).read_bytes()

    def _path(self, iteration: int) -> Path:
        return self._dir / f"iteration-{iteration:04d}.json"


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
        rows = sample_rows(experience, samples, table.rewards(iteration), self.store.episodes.of(iteration))
        try:
            texts.write(iteration, rows)
        except OSError as error:
            return rows, str(error)
        return rows, None

    def close(self) -> None:
        """Close the files."""
        self.history.close()
        self.store.close()
