"""Prometheus metrics of a trainer rank, served on its own port."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dovetail.protocol.messages import CommandResult
from dovetail.trainer.rank.metrics_server import MetricsServer

# These metrics of commands are shown. The set is fixed, whatever later steps report.
SHOWN = frozenset(
    {
        "loss",
        "accuracy",
        "reward",
        "kl",
        "policy_loss",
        "value_loss",
        "approx_kl",
        "clipfrac",
        "entropy",
        "explained_variance",
        "grad_norm",
        "learning_rate",
        "actor_grad_norm",
        "critic_grad_norm",
        "actor_learning_rate",
        "critic_learning_rate",
        "mismatch_kl",
        "response_length",
    }
)


class TrainerMetrics:
    """The metrics of this rank. Labels: `kind` of a command (eight), `stage` (three), `name` (SHOWN)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.generation = Gauge("dovetail_trainer_generation", "Current generation, 0: none", registry=self.registry)
        self.rejoins = Counter("dovetail_trainer_rejoins", "Generations that this process left", registry=self.registry)
        self.step = Gauge("dovetail_trainer_step", "Last applied step", ["stage"], registry=self.registry)
        self.failures = Counter(
            "dovetail_trainer_command_failures", "Commands that failed", ["kind"], registry=self.registry
        )
        self.seconds = Histogram(
            "dovetail_trainer_command_seconds",
            "Duration of commands",
            ["kind"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=self.registry,
        )
        self.idle_seconds = Counter(
            "dovetail_trainer_idle_seconds", "Time spent waiting for commands", registry=self.registry
        )
        self.values = Gauge(
            "dovetail_trainer_value", "Latest value of a training metric", ["name"], registry=self.registry
        )

    def observe(self, kind: str, result: CommandResult, seconds: float, stage: str | None, step: int) -> None:
        """Record an executed command that took `seconds`."""
        self.seconds.labels(kind).observe(seconds)
        if not result.ok:
            self.failures.labels(kind).inc()
        if stage is not None:
            self.step.labels(stage).set(step)
        if kind == "step":
            for name in SHOWN & result.metrics.keys():
                self.values.labels(name).set(result.metrics[name])

    def serve(self, port: int, host: str) -> None:
        """Serve /metrics from a thread. Raises OSError if the port is taken."""
        MetricsServer((host, port), self.registry).start()
