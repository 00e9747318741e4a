"""Asks the coordinator of a run on this machine about the step in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.sample_files import regular
from dovetail.launch.local.status_poll import fetch_status

HOST = "127.0.0.1"
SECONDS = 1.0
# The fields of a status document that the page shows.
SHOWN = (
    *("stage", "phase", "step", "total_steps", "iteration", "total_iterations", "samples_done", "samples_total"),
    *("message", "seconds_left", "stage_seconds_left", "weight_version", "instances"),
)


def coordinator_port(events: Sequence[Mapping[str, Any]]) -> int | None:
    """The port of the run's last coordinator, from the run's events. None if the coordinator is not on this machine's
    loopback, because the run's token must not be sent elsewhere."""
    ready = [event for event in events if event.get("event") == "coordinator.ready"]
    if not ready or ready[-1].get("host") != HOST or not isinstance(ready[-1].get("port"), int):
        return None
    return int(ready[-1]["port"])


def live_status(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The fields SHOWN of the coordinator's status. None if it does not answer."""
    port = coordinator_port(events)
    try:
        with open(run_dir / "token", encoding="utf-8", opener=regular) as file:
            token = file.read().strip()
    except (OSError, ValueError):
        return None
    if port is None or not token.isalnum():
        return None
    found = fetch_status(f"http://{HOST}:{port}", token, SECONDS)
    return None if found is None else {name: found[name] for name in SHOWN if name in found}
