"""Keeps the weights of the best evaluation as models/actor-best."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dovetail.coordinator.samples.evaluation import Evaluator
from dovetail.coordinator.store.store import KeyValues
from dovetail.coordinator.workers.ranks import Ranks
from dovetail.manifest.types import RLHFJobSpec

BEST = "actor-best"
# The store's key of the version whose weights are in models/actor-best.
KEPT = "evaluation/kept"


class BestWeights:
    """Keeps the weights with the best evaluation. The trainers export the weights that they hold. Without a lag, that
    is the version that was evaluated. With a lag, the trainers are ahead of it. So each version that will be evaluated
    is exported to a folder before the trainers train on."""

    def __init__(
        self, spec: RLHFJobSpec, run_dir: Path, store: KeyValues, session: Ranks, evaluation: Evaluator
    ) -> None:
        self._spec, self._store, self._session, self._evaluation = spec, store, session, evaluation
        self._best = run_dir / "models" / BEST
        self._aside = run_dir / "set-aside"

    def wants(self, version: int) -> bool:
        """Whether these weights are the best so far and are not kept yet."""
        return self._unkept() == version

    async def export(self, version: int) -> None:
        """Keep the weights that the trainers hold. They are those of `version`."""
        await self._session.export("actor", self._best)
        self._store.put(KEPT, version)

    async def set_aside(self, version: int) -> None:
        """Export the weights that the trainers hold, if they may become the best. Usually their evaluation comes after
        the trainers have trained on. It may also be over by now, if the trainers had to wait."""
        folder = self._folder(version)
        if not self._spec.evaluation.keep_best or folder.is_dir():
            return
        if self._evaluation.due(version) or self.wants(version):
            await self._session.export("actor", folder)
            if not self._evaluation.due(version):
                self.choose(version)

    def choose(self, version: int) -> None:
        """Call this after the evaluation of `version`. It keeps the best weights if they were set aside, and deletes
        older ones. The best version may be older, if the coordinator was killed after its evaluation."""
        best = self._unkept()
        if best is not None and (folder := self._folder(best)).is_dir():
            if self._best.exists():
                self._session.delete(self._best)
            self._best.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(self._best)
            self._store.put(KEPT, best)
        for older in self._aside.glob("*"):
            if older.name.isdecimal() and int(older.name) <= version:
                self._session.prune(older)

    def close(self, version: int) -> None:
        """Call this after the run's last evaluation, of `version`. It deletes the weights that were set aside and never
        evaluated."""
        self.choose(version)
        with contextlib.suppress(OSError):
            for rest in self._aside.iterdir():
                self._session.prune(rest)
            self._aside.rmdir()

    def _unkept(self) -> int | None:
        """The version of the best weights so far, if the job keeps them and has not kept them yet."""
        best = self._evaluation.best() if self._spec.evaluation.keep_best else None
        return None if best is None or self._store.get(KEPT) == best.version else best.version

    def _folder(self, version: int) -> Path:
        return self._aside / f"{version}"
