"""The scorers of a job and the models of each. A scorer loads them before it takes weights or samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.job import Job
from dovetail.coordinator.samples.model_sets import ModelSet, model_sets
from dovetail.coordinator.samples.scoring import Scorer, ScorerPool, load_models
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.preparing import Preparing
from dovetail.manifest.sizes import has_critic
from dovetail.protocol.process.process_names import rollout_of

LOAD_SECONDS = 600.0
REWARD_MODEL = "reward"
# The time that `load_all` waits for scorers before it looks for others.
LOOK_SECONDS = 0.5


class Scorers:
    """The scorers and their models. A scorer that the plan does not know (of a surplus rollout) holds all models.
    `session` sends the job's token. `folders` says whether the models are what they were. If a `reward_model` gives the
    rewards, scorers hold it."""

    def __init__(
        self, job: Job, fleet: Fleet, session: aiohttp.ClientSession, folders: ModelFolders, reward_model: bool
    ) -> None:
        spec, sources = job.spec, job.sources
        self._sources = {"reference": sources.reference} if spec.ppo.reads_reference else {}
        if reward_model:
            self._sources[REWARD_MODEL] = sources.reward_for_ppo
        if has_critic(spec):
            self._sources["critic"] = sources.critic
        # For each rollout, the models that the plan gives its scorer.
        self._plan_holds = {rollout.name: rollout.scores for rollout in job.plan.rollouts}
        self._fleet, self.session = fleet, session
        self._folders = folders
        # For each scorer's name, the incarnation that has loaded its models.
        self._loaded: dict[str, str] = {}
        self._loading: Preparing[Scorer] = Preparing(self.load)
        self.model_sets = model_sets(list(self._sources), list(self._plan_holds.values())) if self._plan_holds else []

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
                await load_models(self.session, scorer, models, LOAD_SECONDS)
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

    def scorers(self, models: ModelSet, version: int) -> list[Scorer]:
        """The scorers that can score with all models of the set now. `version` is the critic's weight version, for
        scorers that hold a critic."""
        return [
            Scorer(i.name, i.url, i.incarnation, int(i.abilities.get("room") or 0))
            for i in self._fleet.eligible("scorer")
            if self.has_loaded(i.name, i.incarnation) and self.serves(i.name, models) and self._fleet.holds(i, version)
        ]

    def pool(self, models: ModelSet, version: int, allowed: Callable[[Scorer], bool]) -> ScorerPool:
        """The scorers of `scorers(models, version)` that are `allowed`."""
        return _SetPool(self, self._fleet, models, version, allowed)

    def serves(self, scorer: str, models: ModelSet) -> bool:
        """Whether a scorer's models include those of the set."""
        return set(models) <= set(self.held_by(scorer))


@dataclass(frozen=True)
class _SetPool:
    all: Scorers
    fleet: Fleet
    models: ModelSet
    version: int
    allowed: Callable[[Scorer], bool]

    @property
    def session(self) -> aiohttp.ClientSession:
        return self.all.session

    def scorers(self) -> list[Scorer]:
        return [scorer for scorer in self.all.scorers(self.models, self.version) if self.allowed(scorer)]

    def everyone(self) -> int:
        return sum(self.all.serves(i.name, self.models) for i in self.fleet.instances("scorer"))

    def gone(self, scorer: Scorer) -> bool:
        return self.fleet.gone(scorer.name, scorer.incarnation)

    def failed(self, scorer: Scorer, reason: str) -> None:
        self.fleet.failed(scorer.name, reason)

    def succeeded(self, scorer: Scorer) -> None:
        self.fleet.succeeded(scorer.name)
