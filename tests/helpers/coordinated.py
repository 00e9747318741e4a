"""What parts of the coordinator are given: a job, a pool of scorers, weights that nobody sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dovetail.coordinator.samples.scoring import Scorer
from dovetail.manifest.training_types import Generation
from dovetail.manifest.types import RLHFJobSpec


def silent(event: str, **fields: Any) -> None:
    """A log that keeps nothing."""


def job_of(
    store: Any,
    folder: Path = Path(),
    log: Callable[..., None] = silent,
    keep: int = 2,
    run: str = "",
    start_seconds: float = 5.0,
    **more: Any,
) -> Any:
    """What a part reads of `Job`, with `more` of its fields."""
    records = SimpleNamespace(store=store, log=log, timeline=SimpleNamespace(add=lambda spans: None))
    given = {"spec": SimpleNamespace(checkpoint=SimpleNamespace(keep=keep)), "clock": time.monotonic, **more}
    return SimpleNamespace(
        store=store, records=records, folder=folder, log=log, run=run, start_seconds=start_seconds, **given
    )


def drawn_with(generation: Generation, lag: int = 0, replay: bool = False) -> Any:
    """What a generator reads of the job's spec."""
    models: dict[str, Any] = {"actor": {"source": {"scratch": {}}}}
    groups = [{"name": "rollout", "roles": ["rollout"]}, {"name": "train", "roles": ["trainer"]}]
    spec = RLHFJobSpec.model_validate({"models": models, "groups": groups})
    ppo = spec.ppo.model_copy(update={"lag": lag, "routing_replay": replay})
    return spec.model_copy(update={"generation": generation, "ppo": ppo})


class NoWeights:
    """Nobody sends weights: servers have them."""

    def begin(self, version: int) -> None:
        pass


@dataclass
class ScorerPool:
    session: Any
    found: Callable[[], Sequence[Scorer]]
    on_failure: Callable[[Scorer, str], None] = lambda scorer, reason: None
    count: int = 1
    is_gone: Callable[[Scorer], bool] = lambda _: False

    def scorers(self) -> Sequence[Scorer]:
        return self.found()

    def everyone(self) -> int:
        return self.count

    def gone(self, scorer: Scorer) -> bool:
        return self.is_gone(scorer)

    def failed(self, scorer: Scorer, reason: str) -> None:
        self.on_failure(scorer, reason)

    def succeeded(self, scorer: Scorer) -> None:
        pass
