"""Iterations that are open at the same time, and the versions of weights that trainers keep for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_coordinator_trainers import Records, form, make_group, run

from dovetail.coordinator.samples.lineup import OpenIterations
from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import CommandResult, ModelRef, NextRequest, Publish, Step
from helpers.coordinated import job_of


@pytest.mark.parametrize(
    ("lag", "versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2]), (9, [0, 0, 0, 0, 0])]
)
def test_an_iteration_is_drawn_with_the_weights_before_the_lag(lag: int, versions: list[int]) -> None:
    assert [PPO(lag=lag).weight_version(i) for i in range(1, 6)] == versions


def test_iterations_are_open_up_to_the_lag(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun: list[int] = []
        free = {i: asyncio.Event() for i in range(1, 5)}

        async def make(iteration: int) -> str:
            begun.append(iteration)
            await free[iteration].wait()
            return f"experience {iteration}"

        open_ = OpenIterations(make, 1, 4)
        first = asyncio.create_task(open_.take(1))
        for _ in range(5):
            await asyncio.sleep(0)
        # Iteration 3 is drawn with the weights after step 1, which do not exist yet.
        assert (begun, open_.numbers) == ([1, 2], [1, 2])
        free[2].set()
        free[1].set()
        assert await first == "experience 1"
        assert (begun, open_.numbers) == ([1, 2], [2])
        for event in free.values():
            event.set()
        assert [await open_.take(i) for i in (2, 3, 4)] == [f"experience {i}" for i in (2, 3, 4)]
        assert (begun, open_.numbers) == ([1, 2, 3, 4], [])

    run(scenario())


def test_an_iteration_that_fails_fails_those_that_wait_for_it() -> None:
    async def scenario() -> None:
        async def make(iteration: int) -> int:
            if iteration == 2:
                raise RuntimeError("no rollout came")
            return iteration

        open_ = OpenIterations(make, 2, 9)
        assert await open_.take(1) == 1
        with pytest.raises(RuntimeError, match="no rollout came"):
            await open_.take(2)
        await open_.close()

    run(scenario())


def test_without_a_lag_each_iteration_gets_its_prompts_and_one_that_failed_is_made_anew() -> None:
    async def scenario() -> None:
        made: list[tuple[int, str]] = []

        async def make(iteration: int, prompts: str) -> str:
            made.append((iteration, prompts))
            if len(made) == 1:
                raise RuntimeError("the reward function failed")
            return prompts

        open_ = OpenIterations(make, 0, 4)
        open_.open_through(1, "mine")
        with pytest.raises(RuntimeError, match="the reward function failed"):
            await open_.take(1)
        assert open_.numbers == []
        open_.open_through(1, "others")
        assert await open_.take(1) == "others"
        assert made == [(1, "mine"), (1, "others")], "nothing is drawn beside"

    run(scenario())


class KeepingRanks:
    """One rank whose state is the steps that it has applied. It keeps as many versions as `load` says."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.stage: Stage | None = None
        self.step = self.most = 0
        self.versions: list[int] = []
        self.log: list[str] = []
        self.hold, self.stepping = asyncio.Event(), asyncio.Event()
        self.hold.set()

    async def live(self, incarnation: str) -> None:
        self.stage, self.step, self.versions = None, 0, []
        (reply,) = await form(self.group, incarnation)
        await asyncio.gather(self._main(reply.generation), self._beside(reply.generation))

    async def _main(self, generation: int) -> None:
        result = None
        while True:
            ask = NextRequest(
                generation=generation, result=result, stage=self.stage, step=self.step, versions=self.versions
            )
            command = (await self.group.next(ask)).command
            if command.kind == "load":
                saved = int(Path(command.checkpoint).name.split("-")[1]) if command.checkpoint else 0
                self.stage, self.step, self.most, self.versions = command.stage, saved, command.keep_versions, [saved]
                self.log.append(f"load {saved}")
            elif command.kind == "step":
                self.stepping.set()
                await self.hold.wait()
                self.step = command.step
                self.versions = [*self.versions, self.step][-self.most :]
                self.log.append(f"step {self.step}")
            elif command.kind == "save":
                Path(command.path).mkdir(parents=True)
            result = CommandResult(id=command.id, ok=True)

    async def _beside(self, generation: int) -> None:
        result = None
        while True:
            ask = NextRequest(generation=generation, result=result, versions=self.versions, thread="weights")
            command = (await self.group.next(ask)).command
            assert isinstance(command, Publish)
            assert command.version in self.versions
            self.log.append(f"publish {command.version}")
            result = CommandResult(id=command.id, ok=True)


def lagging(lag: int) -> StagePlan:
    return StagePlan(
        stage=Stage.PPO,
        models={"actor": ModelRef(head="lm", path="x")},
        total_optimizer_steps=9,
        make_step=lambda k: Step(id=f"ppo/{k}", stage=Stage.PPO, step=k, batch=f"ppo/{k}", actions=[[]]),
        lag=lag,
    )


def test_a_kept_version_is_sent_while_the_trainers_train(tmp_path: Path) -> None:
    async def scenario() -> None:
        group = make_group(1)
        ranks = KeepingRanks(group)
        session = Ranks(job_of(Records(), tmp_path, keep=2), group)
        life = asyncio.create_task(ranks.live("a"))
        session.begin(lagging(1), 0)

        async def send(version: int) -> None:
            async def publish() -> CommandResult:
                command = Publish(id=f"publish/{version}", version=version, epoch=1, receivers=[])
                return await group.execute(command, 5, beside=True)

            await session.at_version(version, publish)

        assert not session.can_send(0), "they have not said what they hold"
        await send(0)
        await session.run_step()
        assert [session.can_send(version) for version in (0, 1, 2)] == [True, True, False]
        ranks.hold.clear()
        ranks.stepping.clear()
        training = asyncio.create_task(session.run_step())
        await ranks.stepping.wait()
        await send(1)
        assert not training.done()
        ranks.hold.set()
        await training
        assert ranks.log == ["load 0", "publish 0", "step 1", "publish 1", "step 2"]
        assert not session.can_send(0), "they keep two versions"
        group.end_generation("rank 0 died")
        assert not session.can_send(2)
        life.cancel()

    run(scenario())


def test_ranks_that_come_back_make_the_version_that_is_needed(tmp_path: Path) -> None:
    """The last checkpoint is of a later step than the version; the one before is kept for that."""

    async def scenario() -> None:
        group = make_group(1)
        ranks = KeepingRanks(group)
        session = Ranks(job_of(Records(), tmp_path, keep=1), group)
        life = asyncio.create_task(ranks.live("a"))
        session.begin(lagging(1), 0)
        for _ in range(4):
            await session.run_step()
            if session.step % 2 == 0:
                await session.save()
        assert session.oldest(Stage.PPO) == 2, "batches since step 2 are still needed"
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        group.end_generation("the rank died")
        ranks.log.clear()
        life = asyncio.create_task(ranks.live("b"))

        async def nothing() -> None: ...

        await session.at_version(3, nothing)
        assert ranks.log == ["load 2", "step 3", "step 4"]
        assert ranks.versions == [3, 4]
        await session.run_step()
        await session.run_step()
        await session.save()
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["ppo-000004", "ppo-000006"]
        life.cancel()

    run(scenario())
