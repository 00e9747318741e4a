"""Keeps the models of each scorer. A scorer loads them before it takes weights or samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import aiohttp

from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.samples.scoring import Scorer, load_models
from dovetail.coordinator.samples.scoring_lanes import Lane, lanes_of
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.preparing import Preparing
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.process_names import rollout_of

LOAD_SECONDS = 600.0
# The time that `load_all` waits for scorers before it looks for others.
LOOK_SECONDS = 0.5


class ScorerModels:
    """Loads the models of scorers. `sources` has the source of each model that scorers hold. `plan_holds` has for each
    rollout the models that the plan gives its scorer. A scorer that the plan does not know (of a surplus rollout) holds
    all models. `session` sends the job's token. `folders` says whether the models are what they were."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], ModelRef]],
        plan_holds: Mapping[str, Sequence[str]],
        fleet: Fleet,
        session: aiohttp.ClientSession,
        folders: ModelFolders,
    ) -> None:
        self._sources, self._plan_holds, self._fleet, self._session = sources, plan_holds, fleet, session
        self._folders = folders
        # For each scorer's name, the incarnation that has loaded its models.
        self._loaded: dict[str, str] = {}
        self._loading: Preparing[Scorer] = Preparing(self.load)
        self.lanes = lanes_of(list(sources), list(plan_holds.values())) if plan_holds else []

    def held_by(self, scorer: str) -> list[str]:
        """The models that a scorer serves."""
        return [model for model in self._sources if model in self._plan_holds.get(rollout_of(scorer), self._sources)]

    def has_loaded(self, name: str, incarnation: str) -> bool:
        """Whether this process has loaded its models."""
        return self._loaded.get(name) == incarnation

    async def load(self, scorer: Scorer) -> None:
        """Let the scorer load its models, unless it has. Raises OSError or TimeoutError, and DataError if a model's
        files have changed."""
        if self.has_loaded(scorer.name, scorer.incarnation):
            return
        models = {model: self._sources[model]() for model in self.held_by(scorer.name)}
        await self._folders.check(ref.folder for ref in models.values())
        try:
            if models:
                await load_models(self._session, scorer, models, LOAD_SECONDS)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        self._loaded[scorer.name] = scorer.incarnation

    async def load_all(self) -> None:
        """Let every scorer that may take work load its models. It does not wait long, so call it repeatedly. A scorer
        that fails to load them counts as failed in the fleet."""
        eligible = [Scorer(i.name, i.url, i.incarnation) for i in self._fleet.eligible("scorer")]
        lacking = [s for s in eligible if not self.has_loaded(s.name, s.incarnation) and not self._loading.running(s)]
        _, failed = await self._loading.ready(lacking, LOOK_SECONDS)
        for scorer, problem in failed:
            self._fleet.failed(scorer.name, f"could not load its models: {problem}")

    async def close(self) -> None:
        """Stop the loading of models."""
        await self._loading.close()

    def scorers(self, lane: Lane, version: int) -> list[Scorer]:
        """The scorers that can score with all models of the lane now. `version` is the critic's weight version, for
        scorers that hold a critic."""
        return [
            Scorer(i.name, i.url, i.incarnation, int(i.abilities.get("room") or 0))
            for i in self._fleet.eligible("scorer")
            if self.has_loaded(i.name, i.incarnation) and self.serves(i.name, lane) and self._fleet.holds(i, version)
        ]

    def serves(self, scorer: str, lane: Lane) -> bool:
        """Whether a scorer's models include the lane's."""
        return set(lane) <= set(self.held_by(scorer))
