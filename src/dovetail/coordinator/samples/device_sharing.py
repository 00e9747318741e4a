"""Decides who uses the GPUs that rollouts, scorers and trainers share, and makes instances ready for weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import aiohttp

from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.job import Job
from dovetail.coordinator.samples.fusion.fusion import Fusion, StageFusion
from dovetail.coordinator.samples.fusion.sleep import Sleepers
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.lineup import KIND as ROLLOUT
from dovetail.coordinator.samples.scorers import Scorers
from dovetail.coordinator.samples.scoring import Scorer
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.publishing import Target
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import rollout_of


class Devices:
    """`session` sends the job's token. `folders` says whether the models are what they were."""

    def __init__(
        self, job: Job, fleet: Fleet, session: aiohttp.ClientSession, scorers: Scorers, folders: ModelFolders
    ) -> None:
        self.fleet, self._scorers, self._folders = fleet, scorers, folders
        self._colocated = {g.name for g in job.spec.groups if g.colocated}
        self._fusion = Fusion(job.spec, job.store, job.log)
        self._sleepers = Sleepers(fleet, session, job.log, self._fusion.swapped)
        self._waking: asyncio.Task[None] | None = None
        # The version of the rollouts' weights when the trainers began to use their GPUs.
        self._trained_beside: int | None = None
        self._found: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._found is not None:
            self._found.cancel()
        self._sleepers.close()

    async def prepare(self, target: Target) -> None:
        """Prepare an instance for new weights: wake a rollout, or load a scorer's models. Raises OSError or
        TimeoutError, and DataError if the files that it loads have changed."""
        if target.kind == ROLLOUT:
            await self._folders.check(self._folders.for_rollouts)
            await self._sleepers.wake(target.name)
        if target.kind == "scorer":
            await self._scorers.load(Scorer(target.name, target.url, target.incarnation))

    # ------------------------------------------------------------ rollouts and trainers

    async def rest(self) -> None:
        """Call it before training. Rollouts of groups that also train leave their GPUs to the trainers until they take
        the new weights."""
        self._trained_beside = self.fleet.version
        await self._rest()

    async def _rest(self) -> None:
        rollouts = self.fleet.instances(ROLLOUT)
        await self._sleepers.rest([i.name for i in rollouts if i.ready and i.group in self._colocated])

    async def hold(self) -> None:
        """Run as a background task. Once PPO has begun, it loads the models of scorers that need no weight version.
        Until then it keeps the rollouts that share GPUs with trainers asleep. After a restart of the coordinator these
        may hold their weights already. It wakes those when PPO has begun, and those that report later, unless the
        trainers train."""
        resting = False
        while True:
            if self.fleet.version is None:
                resting = True
                await self._rest()
            elif resting:
                resting = False
                await self._sleepers.wake_current()
            else:
                trains = self._trained_beside is not None and self._trained_beside == self.fleet.version
                if not trains and (self._found is None or self._found.done()):
                    # A server may take long to wake up.
                    self._found = asyncio.create_task(self._sleepers.wake_found())
                await self._scorers.load_all()
            await asyncio.sleep(0.5)

    # ------------------------------------------------------------ rollouts and scorers

    def stage(self, iteration: int, prompt_lengths: Sequence[int]) -> AbstractAsyncContextManager[StageFusion]:
        """The fusion of one iteration, as `Fusion.stage` gives it."""
        blocks = RESPONSE_BLOCK if any(i.abilities.get("room") for i in self.fleet.instances("scorer")) else None
        return self._fusion.stage(iteration, prompt_lengths, self.fleet.eligible(ROLLOUT), blocks)

    def give_way(self, left: int, fusion: StageFusion, generator: Generator | Episodes) -> None:
        """Call it after each flush, with the number of samples that are left. Rollouts that fusion has freed go to
        sleep. If no other rollout is left to generate, all of them are woken."""
        waking = self._waking is not None and not self._waking.done()
        if left and not waking and not self.fleet.has_current(ROLLOUT):
            self._waking = asyncio.create_task(self._sleepers.wake_all())
        elif fusion.destinations:
            self._sleepers.expect(fusion.freed)
            self._sleepers.free(name for name in fusion.freed if generator.idle(name))

    def may_score(self, scorer: Scorer, fusion: StageFusion, generator: Generator | Episodes) -> bool:
        """Whether a scorer may work now, because its rollout leaves the device to it. A freed rollout that can sleep
        must be asleep first."""
        if not fusion.may_score(scorer.name, generator.idle):
            return False
        rollout = rollout_of(scorer.name)
        return rollout not in fusion.freed or self._sleepers.out_of_the_way(rollout)

    def learn(self, done: Generated, scoring: Sequence[Span], response_lengths: Sequence[int]) -> None:
        """Learn the times and the lengths of an iteration. `scoring` has one span for each batch."""
        groups = {i.name: i.group for i in self.fleet.instances()}
        # A sample that is scored by several model sets counts once.
        sets = len(self._scorers.model_sets)
        shares = [s.model_copy(update={"args": {**s.args, "tokens": s.args["tokens"] // sets}}) for s in scoring]
        self._fusion.learn(groups, done, shares)
        self._fusion.end(response_lengths)
