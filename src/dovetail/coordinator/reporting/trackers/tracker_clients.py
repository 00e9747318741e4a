"""The client of each kind of tracker. It sends a run's metrics with the tracker's own package, which is optional."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.coordinator.reporting.trackers.tracker_settings import State, TrackerClient, TrackerSettings
from dovetail.protocol.files.run_rows import ROW_STAGES


class WandbClient:
    """Weights & Biases. WANDB_MODE=offline writes the run into the run directory, for `wandb sync`."""

    def __init__(self, settings: TrackerSettings, state: State) -> None:
        import wandb

        if settings.url is not None:
            os.environ["WANDB_BASE_URL"] = settings.url
        self._run = wandb.init(
            project=settings.project,
            name=settings.name,
            id=settings.run,
            resume="allow",
            config=dict(settings.manifest),
            dir=str(settings.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        for stage in ROW_STAGES:
            self._run.define_metric(f"{stage}/step")
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in metrics.items()}})

    def trace(self, document: Mapping[str, Any]) -> None:
        """This sends nothing, because the tracker does not support spans."""

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MlflowClient:
    """MLflow. Without a URL, the client's own default is used (MLFLOW_TRACKING_URI)."""

    def __init__(self, settings: TrackerSettings, state: State) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient as Client

        self._metric = Metric
        self._client = Client(tracking_uri=settings.url)
        self._run = str(state.get("run") or "")
        if not self._run:
            known = self._client.get_experiment_by_name(settings.project)
            experiment = known.experiment_id if known else self._client.create_experiment(settings.project)
            made = self._client.create_run(experiment, run_name=settings.name)
            self._run = state["run"] = made.info.run_id
            params = [Param(_mlflow_name(name, "."), str(value)[:500]) for name, value in flattened(settings.manifest)]
            for at in range(0, len(params), 100):
                self._client.log_batch(self._run, params=params[at : at + 100])
            self._client.log_batch(self._run, tags=[RunTag("dovetail.run", settings.run)])

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        rows = [
            self._metric(f"{stage}/{_mlflow_name(name, '/')}", value, int(time * 1000), step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._run, metrics=rows)

    def trace(self, document: Mapping[str, Any]) -> None:
        """This sends nothing, because MLflow's traces are for requests and not for training."""

    def finish(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")


class TrackioClient:
    """Trackio. Without a URL, it writes to the folder that `trackio show` reads (TRACKIO_DIR)."""

    def __init__(self, settings: TrackerSettings, state: State) -> None:
        import trackio

        self._trackio = trackio
        where = {} if settings.url is None else {"server_url": settings.url}
        trackio.init(
            project=settings.project,
            name=settings.name,
            config=dict(flattened(settings.manifest)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **where,
        )

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._trackio.log({f"{stage}/{name}": value for name, value in metrics.items()}, step=step)

    def trace(self, document: Mapping[str, Any]) -> None:
        """This sends nothing, because the tracker does not support spans."""

    def finish(self, succeeded: bool) -> None:
        self._trackio.finish()


def _otlp(settings: TrackerSettings, state: State) -> TrackerClient:
    from dovetail.coordinator.reporting.trackers.otlp_spans import OtlpClient

    return OtlpClient(settings, state)


# For each kind, the module that it needs, and its client.
CLIENTS: dict[str, tuple[str, Callable[[TrackerSettings, State], TrackerClient]]] = {
    "wandb": ("wandb", WandbClient),
    "mlflow": ("mlflow", MlflowClient),
    "trackio": ("trackio", TrackioClient),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", _otlp),
}


def flattened(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with dotted names, such as ('ppo.kl.coef', 0.1). A list is one value."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value if isinstance(value, str | int | float | bool) else str(value)


def _mlflow_name(name: str, separator: str) -> str:
    """A name that MLflow accepts. Different names with the same `separator` of their parts stay different.

    MLflow's file store makes a file of each name, and a folder of each part before a slash. So `reward` and
    `reward/length` cannot both be there, and parts are separated by a dot. A name with other characters than MLflow
    takes ends with a part of its hash."""
    if re.fullmatch(rf"[\w -]+({re.escape(separator)}[\w -]+)*", name, re.ASCII) and len(name) <= 200:
        return name.replace(separator, ".")
    plain = re.sub(r"[^\w .-]", "_", name.replace("/", "."), flags=re.ASCII)[:200]
    return f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
