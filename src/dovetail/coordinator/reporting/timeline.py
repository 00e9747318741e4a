"""The spans of the current iteration, and its trace file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.protocol import clock
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
