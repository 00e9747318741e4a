"""Trainers and coordinator under faults at random: each step is learnt once, from the right state, and each version is
sent as it was, whatever is lost, dies or is damaged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.coordinator.workers.trainer_group import StaleGeneration, TrainerGroup
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import (
    Command,
    CommandResult,
    Heartbeat,
    JoinRequest,
    Load,
    ModelRef,
    NextRequest,
    Publish,
    RankThread,
    Save,
    Step,
)
from helpers.coordinated import job_of
from helpers.records import Records
from helpers.warped_loop import run_warped

STEPS, EVERY, PEER_TIMEOUT = 6, 2, 30.0
# What happens to a request of the trainers: nothing, the request or the reply is lost, the trainer dies before or after
# the command, it freezes for so long that it is given up, the coordinator dies before or after it has answered, or the
# newest or the oldest checkpoint is damaged.
DAMAGE = {"damage": -1, "damage oldest": 0}
FAULTS = ["none", "request", "reply", "before", "after", "freeze", "coordinator", "coordinator after", *DAMAGE]


def state_after(step: int) -> str:
    state = "fresh"
    for number in range(1, step + 1):
        state = hashlib.sha256(f"{state}/{number}".encode()).hexdigest()
    return state


class Lost(Exception):
    """The request or its reply was lost."""


class Died(Exception):
    """The trainer dies."""


@dataclass
class World:
    """`faults`: what happens to the next requests. The disk, the store and the batches survive everything."""

    lag: int
    folder: Path
    faults: list[str]
    records: Records = field(default_factory=Records)
    batches: set[int] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    spared: bool = False
    group: TrainerGroup | None = None
    driver: asyncio.Task[None] | None = None
    lives: int = 0
    asked: int = 0
    sent: list[tuple[int, str]] = field(default_factory=list)

    # ------------------------------------------------------------ the coordinator

    async def run(self) -> None:
        """Coordinators, one after the other, until one has finished."""
        loop = asyncio.get_running_loop()
        trainer = asyncio.create_task(self.trainer())
        while True:

            def generation(number: int) -> None:
                assert self.group is not None
                self.records.put("generation", number)
                self.records.put("formed", self.group.formed)

            self.group = group = TrainerGroup(
                world_size=1,
                generation=int(self.records.values.get("generation", 1)),  # type: ignore[call-overload]
                formed=bool(self.records.values.get("formed")),
                peer_timeout=PEER_TIMEOUT,
                clock=loop.time,
                record_generation=generation,
                record_result=lambda result: self.records.put(f"result/{result.id}", result.model_dump(mode="json")),
                log=lambda *_, **__: None,
            )
            session = Ranks(job_of(self.records, self.folder, start_seconds=3600.0), group)
            self.driver = asyncio.create_task(self.drive(session, group))
            watch = asyncio.create_task(self.watch(group))
            hold = asyncio.create_task(session.hold())
            over = {self.driver, trainer, watch}
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, hold, self.driver):
                task.cancel()
            ended = await asyncio.gather(self.driver, watch, hold, return_exceptions=True)
            problems = [e for e in ended if isinstance(e, Exception)]
            if trainer.done():
                trainer.result()
            if problems:
                raise problems[0]
            if self.driver.done() and not self.driver.cancelled():
                break
            self.group = None
            await asyncio.sleep(3.0)
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)

    async def watch(self, group: TrainerGroup) -> None:
        while True:
            group.check_silence()
            await asyncio.sleep(1.0)

    def die(self) -> None:
        """The coordinator dies."""
        assert self.driver is not None
        self.driver.cancel()
        self.group = None

    async def drive(self, session: Ranks, group: TrainerGroup) -> None:
        plan = StagePlan(
            stage=Stage.PPO,
            models={"actor": ModelRef(head="lm", path="x")},
            total_optimizer_steps=STEPS,
            make_step=lambda k: Step(id=f"ppo/{k}/step", stage=Stage.PPO, step=k, batch=f"ppo/{k}", actions=[[]]),
            can_replay=lambda first, last: set(range(first + 1, last + 1)) <= self.batches,
            lag=self.lag,
        )
        session.begin(plan, int(self.records.values.get("progress", 0)))  # type: ignore[call-overload]
        await asyncio.sleep(8.0)  # `hold` may restore the trainers before it is known which versions are needed
        while session.step < STEPS:
            iteration = session.step + 1
            versions = range(max(0, iteration - 1 - self.lag), iteration)
            session.need(versions[0] if self.lag else None)
            for version in versions:
                await self.publish(session, group, version)
            self.batches.add(iteration)
            sending = asyncio.create_task(self.publish(session, group, versions[-1])) if self.lag else None
            try:
                await session.run_step()
                if sending is not None:
                    await sending
            finally:
                if sending is not None:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
            assert f"result/ppo/{iteration}/step" in self.records.values
            self.records.put("progress", session.step)
            if iteration % EVERY == 0:
                await session.save()
                self.batches -= set(range(1, session.oldest(Stage.PPO) + 1))
        for version in range(max(0, STEPS - self.lag), STEPS + 1):
            await self.publish(session, group, version)

    async def publish(self, session: Ranks, group: TrainerGroup, version: int) -> None:
        """A receiver gets the version."""

        async def action() -> CommandResult:
            number = len(self.sent)
            command = Publish(
                id=f"publish/{version}/{self.lives}/{number}/{asyncio.get_running_loop().time()}",
                version=version,
                epoch=number,
                receivers=[],
                deadline_seconds=60.0,
            )
            return await group.execute(command, 70.0, beside=self.lag > 0)

        made = await (session.at_version(version, action) if self.lag else session.at_target(action))
        assert made is not None, f"version {version} is needed and was given up"

    # ------------------------------------------------------------ the trainer

    async def ask(self, request: Any) -> Any:
        """One request. Raises Lost, Died, StaleGeneration."""
        self.asked += 1
        fault = self.faults.pop() if self.faults else "none"
        if fault == "request" or self.group is None:
            raise Lost
        if fault == "coordinator":
            self.die()
            raise Lost
        if fault == "freeze":
            await asyncio.sleep(2 * PEER_TIMEOUT)
            if self.group is None:
                raise Lost
        if fault in DAMAGE:
            folders = sorted(self.folder.glob("checkpoints/ppo-0*"))
            # One at most: as many as are kept would end the job.
            if folders and not self.spared:
                self.damaged.add(str(folders[DAMAGE[fault]]))
                self.spared = True
        group = self.group
        answering = asyncio.create_task(
            group.join(request) if isinstance(request, JoinRequest) else group.next(request)
        )
        try:
            while not answering.done() and self.group is group:
                await asyncio.wait([answering], timeout=0.5)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if answering.cancelled():
            raise Lost
        answer = answering.result()
        if fault == "reply":
            raise Lost
        if fault == "coordinator after":
            if self.group is not None:
                self.die()
            return answer
        if fault in ("before", "after"):
            self.dying = fault
        return answer

    dying: str | None = None

    async def retried(self, request: Any) -> Any:
        while True:
            try:
                return await self.ask(request)
            except Lost:
                await asyncio.sleep(1.0)

    async def trainer(self) -> None:
        """Processes of the trainer, one after the other. A process that must leave a generation joins again."""
        while True:
            self.lives += 1
            self.dying = None
            with contextlib.suppress(Died):
                while True:
                    with contextlib.suppress(StaleGeneration):
                        await self.generation(f"life-{self.lives}")

    async def generation(self, incarnation: str) -> None:
        reply = None
        while reply is None or reply.generation is None:
            reply = await self.retried(
                JoinRequest(name="trainer-0", rank=0, world_size=1, incarnation=incarnation, host="x", port=7000)
            )
        life = Life(self, reply.generation)
        tasks = [asyncio.create_task(life.beat()), asyncio.create_task(life.serve("main"))]
        if self.lag:
            tasks.append(asyncio.create_task(life.serve("weights")))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Life:
    """A trainer process in one generation. `kept`: by version, the state that it can send."""

    def __init__(self, world: World, generation: int) -> None:
        self.world, self.number = world, generation
        self.stage: Stage | None = None
        self.step, self.state = 0, ""
        self.kept: dict[int, str] = {}
        self.most = 0

    async def beat(self) -> None:
        while True:
            if (group := self.world.group) is not None:
                reply = group.heartbeat(Heartbeat(name="trainer-0", rank=0, incarnation="x", generation=self.number))
                if reply.generation is not None and reply.generation > self.number:
                    raise StaleGeneration
            await asyncio.sleep(2.0)

    async def serve(self, thread: RankThread) -> None:
        """As `dovetail.trainer.rank.life` does for the main thread, and `rank.sending` for the one that sends."""
        last: CommandResult | None = None
        result: CommandResult | None = None
        while True:
            stage, step = (self.stage, self.step) if thread == "main" else (None, 0)
            request = NextRequest(
                generation=self.number, result=result, stage=stage, step=step, versions=sorted(self.kept), thread=thread
            )
            command = (await self.world.retried(request)).command
            handed_in, result = result, None
            if command is None:
                continue
            if thread == "main" and last is not None and command.id == last.id:
                result = last
                continue
            if thread == "weights" and handed_in is not None and command.id == handed_in.id:
                continue
            if self.world.dying == "before":
                raise Died
            await asyncio.sleep(5.0)
            last = result = self.execute(command)
            if self.world.dying == "after":
                raise Died

    def execute(self, command: Command) -> CommandResult:
        if isinstance(command, Load):
            if command.checkpoint in self.world.damaged:
                self.stage, self.kept = None, {}
                return CommandResult(id=command.id, ok=False, error="it is damaged", damaged=True)
            self.stage, self.step, self.state = command.stage, 0, "fresh"
            if command.checkpoint:
                text = (Path(command.checkpoint) / "state").read_text()
                self.step, self.state = int(text.split()[0]), text.split()[1]
            self.most, self.kept = command.keep_versions, {}
            self.keep()
        elif isinstance(command, Step):
            if command.step != self.step + 1 or self.stage is not Stage.PPO:
                return CommandResult(id=command.id, ok=False, error=f"{command.step} after {self.step}")
            assert command.step in self.world.batches, "the batch was deleted"
            self.step, self.state = command.step, hashlib.sha256(f"{self.state}/{command.step}".encode()).hexdigest()
            self.keep()
        elif isinstance(command, Save):
            folder = Path(command.path)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "state").write_text(f"{self.step} {self.state}")
            self.world.damaged.discard(command.path)
        elif isinstance(command, Publish):
            found = self.kept.get(command.version) if self.world.lag else self.state
            if found is None:
                return CommandResult(id=command.id, ok=False, error=f"version {command.version} is not kept")
            self.world.sent.append((command.version, found))
        return CommandResult(id=command.id, ok=True)

    def keep(self) -> None:
        if self.most:
            self.kept[self.step] = self.state
            self.kept = dict(sorted(self.kept.items())[-self.most :])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lag=st.sampled_from([0, 1, 2]), faults=st.lists(st.sampled_from(["none"] * 6 + FAULTS), max_size=40))
def test_each_step_is_learnt_from_the_right_state_and_each_version_is_sent_as_it_was(
    lag: int, faults: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(lag, Path(folder), list(reversed(faults)))

        async def scenario() -> None:
            # An hour of virtual time for each fault is more than any deadline here.
            async with asyncio.timeout(3600.0 * (len(faults) + 1)):
                await world.run()

        run_warped(scenario())
        assert world.records.values["progress"] == STEPS
        assert {version for version, _ in world.sent} == set(range(STEPS + 1))
        assert [found for version, found in world.sent if found != state_after(version)] == []


@pytest.mark.parametrize("lag", [0, 2])
def test_nothing_is_done_twice_if_nothing_happens(lag: int, tmp_path: Path) -> None:
    world = World(lag, tmp_path, [])
    run_warped(world.run())
    assert world.lives == 1
    assert world.records.values["generation"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_the_checkpoint_that_an_older_version_needs_may_be_damaged(lag: int, tmp_path: Path) -> None:
    """The trainer dies at the last publishes, when version 6 - lag is needed again."""
    calm = World(lag, tmp_path / "calm", [])
    run_warped(calm.run())
    deaths = 0
    for death in range(calm.asked):
        world = World(lag, tmp_path / str(death), ["after", "damage oldest", *["none"] * death])
        run_warped(world.run())
        assert world.records.values["progress"] == STEPS
        deaths += world.spared
    assert deaths > 10


def test_the_only_checkpoint_may_be_damaged_while_the_job_keeps_two(tmp_path: Path) -> None:
    """Steps before the first checkpoint can be repeated until there is a second one."""
    world = World(0, tmp_path, ["before", "damage", *["none"] * 8])
    run_warped(world.run())
    assert (world.spared, world.lives) == (True, 2)
    assert world.records.values["progress"] == STEPS
