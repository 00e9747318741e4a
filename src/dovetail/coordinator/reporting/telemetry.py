"""Writes the output of a run, which is Prometheus metrics, TensorBoard event files, history.jsonl and the live
status."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from dovetail.coordinator.reporting.time_left import TimeLeft, position
from dovetail.manifest.types import Stage
from dovetail.protocol.http.client_session import resent


class _Resent(Collector):
    def collect(self) -> Iterator[Metric]:
        """The count of `dovetail.protocol.http.client_session.resend`."""
        text = "Requests that were sent again, because the connection kept for them had ended. This is no failure."
        yield CounterMetricFamily("dovetail_requests_resent", text, resent())


class CoordinatorMetrics:
    """Prometheus metrics in base units. The plan limits the values of labels: stage, phase and instance names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stage_step = Gauge("dovetail_stage_step", "Last finished step of a stage.", ["stage"], registry=registry)
        self.steps = Counter("dovetail_steps", "Finished steps, replays included.", ["stage"], registry=registry)
        self.reward = Gauge("dovetail_reward_mean", "Mean score of the last iteration's samples.", registry=registry)
        self.reward_functions = Gauge(
            "dovetail_reward_function_mean",
            "Mean of each reward function over the last iteration's samples, before its weight.",
            ["function"],
            registry=registry,
        )
        self.kl = Gauge("dovetail_kl_nats", "Mean KL per sample to the reference, last iteration.", registry=registry)
        self.samples = Counter("dovetail_samples", "Samples generated.", registry=registry)
        self.tokens = Counter("dovetail_response_tokens", "Response tokens generated.", registry=registry)
        self.rate = Gauge("dovetail_samples_per_second", "Samples per second of the last iteration.", registry=registry)
        self.phase_seconds = Counter("dovetail_phase_seconds", "Time by phase of PPO.", ["phase"], registry=registry)
        self.iteration_seconds = Histogram(
            "dovetail_iteration_seconds",
            "PPO iteration time.",
            registry=registry,
            buckets=(0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800),
        )
        self.generations = Counter(
            "dovetail_trainer_generations", "Times the trainers formed their groups.", registry=registry
        )
        self.instance_ready = Gauge(
            "dovetail_instance_ready",
            "1 if an instance may take work.",
            ["instance", "kind"],
            registry=registry,
        )
        self.buffered = Gauge(
            "dovetail_buffered_bytes",
            "Batches in the coordinator's memory, by what holds them.",
            ["holder"],
            registry=registry,
        )
        self.retries = Counter(
            "dovetail_sample_retries",
            "Attempts at a sample that failed. It went on, on the same rollout or on another.",
            registry=registry,
        )
        registry.register(_Resent())
        self.migrations = Counter(
            "dovetail_migrations",
            "Samples that continued on another rollout: KV cache moved (kv), or prefilled again (tokens).",
            ["mechanism", "reason"],
            registry=registry,
        )
        self.migration_bytes = Counter(
            "dovetail_migration_bytes", "Bytes of migrating samples.", ["mechanism"], registry=registry
        )
        self.migration_seconds = Histogram(
            "dovetail_migration_seconds",
            "From the decision to a sample's first token on its new rollout.",
            ["mechanism"],
            registry=registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
        )
        self.fusion_threshold = Gauge(
            "dovetail_fusion_threshold_samples",
            "Unfinished samples at which the tail migrates; 0: it does not; -1: stages run one after the other.",
            registry=registry,
        )
        self.fusion_seconds = Gauge(
            "dovetail_fusion_stage_seconds",
            "Generation and inference of the last iteration: measured, predicted, predicted one after the other.",
            ["kind"],
            registry=registry,
        )
        self.hidden_seconds = Counter(
            "dovetail_fusion_hidden_seconds", "Inference done while samples were generated.", registry=registry
        )
        self.idle_seconds = Counter(
            "dovetail_instance_idle_seconds",
            "Time of generation and inference in which a rollout neither generated nor scored.",
            ["instance"],
            registry=registry,
        )
        self.samples_left = Gauge(
            "dovetail_samples_left", "Samples of the iteration still to be generated.", registry=registry
        )
        self.unhealthy = Gauge(
            "dovetail_unhealthy",
            "1 if the last iteration has this verdict (docs/health.md).",
            ["reason"],
            registry=registry,
        )
        self.evaluation = Gauge(
            "dovetail_evaluation_mean",
            "Mean of each metric over the prompts of the last evaluation.",
            ["metric"],
            registry=registry,
        )
        self.evaluation_iteration = Gauge(
            "dovetail_evaluation_iteration", "Iteration after which weights were last evaluated.", registry=registry
        )
        self.weight_version = Gauge("dovetail_weight_version", "Version of the published weights.", registry=registry)


def whole_lines(path: Path) -> None:
    """Complete a line that a full disk or a crash cut off. Otherwise the next line would be lost with it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
            file.write(b"\n")


class MetricsHistory:
    """history.jsonl and TensorBoard files, with one entry for each step. A repeated step is written again. Readers use
    its last entry."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._path = run_dir / "history.jsonl"
        whole_lines(self._path)
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._board = Writer(str(run_dir / "tensorboard"))

    def add(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Add the entry of one step. `stage` is one of ROW_STAGES."""
        line = {"stage": str(stage), "step": step, "time": round(time.time(), 3), "metrics": metrics}
        self._file.write(json.dumps(line) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(f"{stage}/{name}", value, step)

    def since(self, offset: int) -> dict[str, Any]:
        """The rows of history.jsonl from byte `offset` on, at most 1 MiB, and the offset after them."""
        with self._path.open("rb") as file:
            # Some file systems cannot seek far behind the end.
            file.seek(min(offset, file.seek(0, os.SEEK_END)))
            whole, newline, _ = file.read(1 << 20).rpartition(b"\n")
        rows = []
        for line in whole.split(b"\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:  # a crash cut the line off
                continue
        return {"offset": offset + len(whole) + len(newline), "rows": rows}

    def close(self) -> None:
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # an error of a full disk would hide why the run ends
                file.close()


class Status:
    """The document of GET /v1/status. `stages` has the job's stages, and `iterations` is the number of PPO iterations.
    `predicted` is the predicted seconds of one iteration, or None."""

    def __init__(self, stages: Sequence[Stage] = (), iterations: int = 0, predicted: float | None = None) -> None:
        self._stages, self._iterations, self._predicted = list(stages), iterations, predicted
        self._time_left = TimeLeft()
        self._fields: dict[str, Any] = {
            "state": "starting",
            "stage": None,
            "step": 0,
            "total_steps": 0,
            "iteration": 0,
            "open_iterations": [],
            "total_iterations": 0,
            "phase": None,
            "samples_done": 0,
            "samples_total": 0,
            "metrics": {},
            "message": "",
            "plan": {},
            "health": {},
            "evaluation": {},
            "method": None,
        }

    def update(self, **fields: Any) -> None:
        """Change some fields. Raises KeyError for unknown names."""
        unknown = set(fields) - set(self._fields)
        if unknown:
            raise KeyError(f"no status field {sorted(unknown)}")
        self._fields.update(fields)
        place = position(self._fields)
        if place is not None:
            self._time_left.see(*place, time.monotonic())

    def document(self, instances: dict[str, Any]) -> dict[str, Any]:
        return {**self._fields, **self._left(), "instances": instances}

    def _left(self) -> dict[str, float | None]:
        """The expected remaining seconds of the stage and of the job. Each is None if it is unknown."""
        place = position(self._fields)
        if place is None or self._fields["state"] != "running":
            return {"stage_seconds_left": None, "seconds_left": None}
        left = self._time_left.left(time.monotonic())
        later = self._stages[self._stages.index(place[0]) + 1 :] if place[0] in self._stages else []
        whole = left
        if later:
            known = later == [Stage.PPO] and self._predicted is not None and left is not None
            whole = (left or 0.0) + self._iterations * (self._predicted or 0.0) if known else None
        return {"stage_seconds_left": left, "seconds_left": whole}
