"""Keeps the weights of the best evaluation as models/actor-best."""

from __future__ import annotations

import shutil
from pathlib import Path

from dovetail.coordinator.loop.evaluation import Evaluator
from dovetail.coordinator.store.store import KeyValues
from dovetail.coordinator.trainers.trainer_session import TrainerSession
from dovetail.manifest.types import RLHFJobSpec

BEST = "actor-best"
# In the store: the version whose weights are in models/actor-best.
KEPT = "evaluation/kept"


class BestWeights:
    """The trainers export what they hold. Without a lag that is the version that was evaluated. With a lag they are
    ahead of it, so each version that will be evaluated is set aside before the trainers leave it."""

    def __init__(
        self, spec: RLHFJobSpec, run_dir: Path, store: KeyValues, session: TrainerSession, evaluation: Evaluator
    ) -> None:
        self._spec, self._store, self._session, self._evaluation = spec, store, session, evaluation
        self._best = run_dir / "models" / BEST
        self._aside = run_dir / "set-aside"

    def wants(self, version: int) -> bool:
        """Whether these weights are the best so far, and are not kept yet."""
        return self._unkept() == version

    async def export(self, version: int) -> None:
        """Keep the weights that the trainers hold, those of `version`."""
        await self._session.export("actor", self._best)
        self._store.put(KEPT, version)

    async def set_aside(self, version: int) -> None:
        """Export the weights that the trainers hold, if they will be evaluated when the trainers have gone on."""
        folder = self._folder(version)
        wanted = self._spec.evaluation.keep_best and self._evaluation.due(version)
        if wanted and not folder.is_dir():
            await self._session.export("actor", folder)

    def choose(self, version: int) -> None:
        """Call this after the evaluation of `version`. It keeps the best weights if they were set aside, and drops
        older ones. The best may be of an older version, if the coordinator was killed after that was evaluated."""
        best = self._unkept()
        if best is not None and (folder := self._folder(best)).is_dir():
            shutil.rmtree(self._best, ignore_errors=True)
            self._best.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(self._best)
            self._store.put(KEPT, best)
        for older in self._aside.glob("*"):
            if older.name.isdecimal() and int(older.name) <= version:
                shutil.rmtree(older, ignore_errors=True)

    def close(self, version: int) -> None:
        """Call this after the run's last evaluation, of `version`. It drops weights that were set aside and never
        evaluated."""
        self.choose(version)
        shutil.rmtree(self._aside, ignore_errors=True)

    def _unkept(self) -> int | None:
        """The version of the best weights so far, if they are to be kept and are not yet."""
        best = self._evaluation.best() if self._spec.evaluation.keep_best else None
        return None if best is None or self._store.get(KEPT) == best.version else best.version

    def _folder(self, version: int) -> Path:
        return self._aside / f"{version}"
