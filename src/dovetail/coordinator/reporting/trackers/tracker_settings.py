"""The interface of a tracker's client. Every client gets its settings and `state`, a dictionary that is kept between
the processes of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

State = dict[str, Any]


@dataclass(frozen=True)
class TrackerSettings:
    """The settings of a tracker. `run` is the run's id, and `manifest` is the spec without default values. The client's
    own files go to `folder`."""

    project: str
    name: str
    url: str | None
    run: str
    folder: Path
    manifest: Mapping[str, Any] = field(default_factory=dict)


class TrackerClient(Protocol):
    """The interface of a client. `log` gets rows of history.jsonl, with `time` in seconds since the epoch. `trace` gets
    the timelines of iterations. All methods may raise any exception."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None: ...
    def trace(self, document: Mapping[str, Any]) -> None: ...
    def finish(self, succeeded: bool) -> None: ...
