"""Keeps steps of a job for the time when its coordinator is gone. Their number is limited."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import CONFIG_MAP
from dovetail.manifest.types import Stage
from dovetail.operator.render.context import Object, RenderContext
from dovetail.protocol.files.run_rows import EVALUATION, ROW_STAGES

# A row has 200 to 400 bytes, so these rows take about 30 KB of a ConfigMap, which may hold 1 MiB.
MOST_ROWS = 100
MOST_METRICS = 20
MOST_CHARACTERS = 64  # of a metric's name
# The metrics that the curves and the timeline show. `seconds_*` are the times of an iteration's phases.
KEPT = {"loss", "accuracy", "margin", "reward", "reward_ci95", "kl", "kl_ci95", "response_length"}
KEPT |= {"samples_per_second", "iteration_seconds"}


class JobHistory:
    """The steps of one job. `token` is the job's token. The coordinator's next rows begin at `offset`."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.offset = 0
        self._rows: dict[tuple[str, int], str] = {}  # lines of JSON, which take a tenth of the memory of objects

    def take(self, rows: Iterable[Any], *, missing: bool = False) -> None:
        """Add rows of history.jsonl, in order. With `missing`, add only steps that are not there yet. If a step was run
        again, the last row counts. Items that are no rows are ignored. If there are too many rows, every second one is
        dropped, so older steps are further apart."""
        for item in rows:
            row = _row(item)
            if row is None:
                continue
            place = row["stage"], row["step"]
            if missing and place in self._rows:
                continue
            self._rows.pop(place, None)
            self._rows[place] = json.dumps(row, separators=(",", ":"))
            if len(self._rows) > MOST_ROWS:
                for key in list(self._rows)[1:-1:2]:
                    del self._rows[key]

    def text(self) -> str:
        """The rows as a JSON list. It is the empty string if there are none."""
        return f"[{','.join(self._rows.values())}]" if self._rows else ""


def _row(item: Any) -> dict[str, Any] | None:
    try:
        stage, step, time = str(item["stage"]), int(item["step"]), round(float(item["time"]), 1)
        metrics = {
            name: float(f"{value:.6g}")
            for name, value in item["metrics"].items()
            if (stage == EVALUATION or name in KEPT or name.startswith("seconds_"))
            and len(name) <= MOST_CHARACTERS
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    if stage not in ROW_STAGES or not math.isfinite(time) or not 0 <= step < 2**53:
        return None
    return {"stage": stage, "step": step, "time": time, "metrics": dict(list(metrics.items())[:MOST_METRICS])}


def last_row(document: Mapping[str, Any], time: float) -> dict[str, Any]:
    """A row for the last step in a coordinator's status. It may be incomplete."""
    ppo = document.get("stage") == Stage.PPO.value
    step = document.get("iteration" if ppo else "step")
    return {"stage": document.get("stage"), "step": step, "time": time, "metrics": document.get("metrics")}


def history_config_map(context: RenderContext, text: str) -> Object:
    """The ConfigMap that is written once, when the job ends. The status API shows it."""
    return {
        **CONFIG_MAP.type_meta,
        "metadata": context.metadata(names.history_config_map(context.name), "history"),
        "data": {names.ITERATIONS_KEY: text},
    }
