"""The coordinator's end of the trainers: generations, commands, replay after a loss; the test plays the ranks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.job import Job
from dovetail.coordinator.loop import supervised
from dovetail.coordinator.loop.supervised import SupervisedStages
from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.coordinator.workers.trainer_group import StaleGeneration, TrainerError, TrainerGroup, TrainerLost
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import (
    CommandResult,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Load,
    ModelRef,
    NextRequest,
    Step,
)
from helpers.coordinated import job_of
from helpers.patience import PATIENCE
from helpers.records import Records


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_group(world: int = 2, clock: Clock | None = None, generation: int = 1, formed: bool = False) -> TrainerGroup:
    return TrainerGroup(
        world_size=world,
        generation=generation,
        formed=formed,
        peer_timeout=30.0,
        clock=clock or asyncio.get_running_loop().time,
        record_generation=lambda _: None,
        record_result=lambda _: None,
        log=lambda *_, **__: None,
    )


def join(rank: int, incarnation: str, world: int = 2) -> JoinRequest:
    return JoinRequest(
        name=f"trainer-{rank}", rank=rank, world_size=world, incarnation=incarnation, host="127.0.0.1", port=7000 + rank
    )


async def form(group: TrainerGroup, *incarnations: str) -> list[JoinReply]:
    return list(await asyncio.gather(*(group.join(join(r, i, len(incarnations))) for r, i in enumerate(incarnations))))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def test_all_ranks_get_rank_zeros_address_once_the_world_is_complete() -> None:
    async def scenario() -> None:
        replies = await form(make_group(), "a", "b")
        assert [(r.generation, r.master_port, r.world_size) for r in replies] == [(1, 7000, 2)] * 2

    run(scenario())


def test_a_rank_of_another_world_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="was started for 3 ranks, the plan has 2"):
            await make_group().join(join(0, "a", world=3))

    run(scenario())


def test_ranks_with_unlike_versions_of_nccl_are_refused() -> None:
    async def scenario() -> None:
        group = make_group()
        first = asyncio.create_task(group.join(join(0, "a").model_copy(update={"nccl_version": "2.29.7"})))
        await asyncio.sleep(0)
        for other in ("2.26.5", None):
            with pytest.raises(ValueError, match=f"trainer-1 has NCCL {other}, and trainer-0 has 2.29.7; give all"):
                await group.join(join(1, "b").model_copy(update={"nccl_version": other}))
        first.cancel()

    run(scenario())


def test_a_restarted_rank_ends_the_generation_and_its_command() -> None:
    async def scenario() -> None:
        group = make_group()
        await form(group, "a", "b")
        running = asyncio.create_task(group.execute(Load(id="x", stage=Stage.SFT, models={}, total_steps=1), 10))
        reply = await group.next(NextRequest(generation=1))
        assert reply.command is not None
        assert reply.command.id == "x"
        group.heartbeat(Heartbeat(name="trainer-0", rank=0, incarnation="a", generation=1, at="main:1 in step"))
        assert group.heard()["trainer-0"][2] == ("main:1 in step", "")
        again = asyncio.create_task(group.join(join(1, "b2")))
        with pytest.raises(TrainerLost, match="trainer-1 joined again"):
            await running
        beat = group.heartbeat(Heartbeat(name="trainer-0", rank=0, incarnation="a", generation=1, at="main:1 in wait"))
        assert (beat.generation, beat.reason) == (2, "trainer-1 joined again")
        assert group.heard()["trainer-0"][2] == ("", ""), "it has nothing to do, so it stands nowhere"
        with pytest.raises(StaleGeneration):
            await group.next(NextRequest(generation=1))
        survivor = await group.join(join(0, "a"))
        assert (await again).generation == survivor.generation == 2

    run(scenario())


@pytest.mark.slow
def test_a_command_that_turns_out_to_be_longer_gets_more_time() -> None:
    """A transfer of weights, whose bytes the trainers know."""

    async def scenario() -> None:
        group = make_group(1)
        await form(group, "a")
        running = asyncio.create_task(group.execute(Load(id="x", stage=Stage.SFT, models={}, total_steps=1), 0.5))
        await group.next(NextRequest(generation=1))
        group.extend("another", 0.0)
        group.extend("x", 60.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 1.0)
        group.extend("x", 0.0)
        with pytest.raises(TrainerLost, match="x took longer than"):
            await running

    run(scenario())


def test_a_survivor_that_joins_first_also_ends_the_generation() -> None:
    async def scenario() -> None:
        group = make_group()
        await form(group, "a", "b")
        survivor = asyncio.create_task(group.join(join(0, "a")))
        await asyncio.sleep(0)
        assert not group.formed
        assert (await group.join(join(1, "b2"))).generation == 2
        assert (await survivor).generation == 2

    run(scenario())


def test_silence_ends_the_generation_and_names_the_rank() -> None:
    async def scenario() -> None:
        clock = Clock()
        events: list[dict[str, Any]] = []
        group = make_group(clock=clock)
        group.log = lambda event, **fields: events.append({"event": event, **fields})
        await form(group, "a", "b")
        clock.now += 20
        group.heartbeat(Heartbeat(name="trainer-0", rank=0, incarnation="a"))
        clock.now += 20
        group.check_silence()
        assert not group.formed
        assert "trainer-1 was silent" in events[-1]["reason"]

    run(scenario())


def test_a_refused_command_raises_its_sentence_and_the_group_stays() -> None:
    async def scenario() -> None:
        group = make_group(1)
        await form(group, "a")
        running = asyncio.create_task(group.execute(Load(id="x", stage=Stage.SFT, models={}, total_steps=1), 10))
        await group.next(NextRequest(generation=1))
        poll = asyncio.create_task(
            group.next(NextRequest(generation=1, result=CommandResult(id="x", ok=False, error="no such folder")))
        )
        with pytest.raises(TrainerError, match="no such folder"):
            await running
        assert group.formed
        poll.cancel()

    run(scenario())


def test_a_command_that_takes_too_long_ends_the_generation() -> None:
    async def scenario() -> None:
        group = make_group(1)
        await form(group, "a")
        with pytest.raises(TrainerLost, match="took longer"):
            await group.execute(Load(id="x", stage=Stage.SFT, models={}, total_steps=1), 0.01)
        assert not group.formed

    run(scenario())


def test_a_command_whose_reply_was_lost_is_sent_again() -> None:
    async def scenario() -> None:
        group = make_group(1)
        await form(group, "a")
        running = asyncio.create_task(group.execute(Load(id="x", stage=Stage.SFT, models={}, total_steps=1), 10))
        lost = await group.next(NextRequest(generation=1))
        again = await group.next(NextRequest(generation=1))
        assert lost.command == again.command
        poll = asyncio.create_task(group.next(NextRequest(generation=1, result=CommandResult(id="x", ok=True))))
        assert (await running).ok
        poll.cancel()

    run(scenario())


class OneRank:
    """A one-rank world whose state is the list of applied steps; `die_before` kills it once before that step."""

    def __init__(self, group: TrainerGroup) -> None:
        self.group = group
        self.applied: list[int] = []
        self.log: list[str] = []
        self.saved: dict[str, list[int]] = {}
        self.die_before: set[int] = set()
        self.stage: Stage | None = None

    async def live(self) -> None:
        life = 0
        while True:
            life += 1
            self.stage, self.applied = None, []
            reply = await self.group.join(join(0, f"life-{life}", 1))
            assert reply.generation is not None
            result: CommandResult | None = None
            while True:
                request = NextRequest(
                    generation=reply.generation, result=result, stage=self.stage, step=len(self.applied)
                )
                command = (await self.group.next(request)).command
                if command is None:
                    result = None
                    continue
                if isinstance(command, Step) and command.step in self.die_before:
                    self.die_before.discard(command.step)
                    break
                self.apply(command)
                result = CommandResult(id=command.id, ok=True, metrics={"step": float(len(self.applied))})

    def apply(self, command: Any) -> None:
        self.log.append(f"{command.kind}{getattr(command, 'step', '')}")
        if command.kind == "load":
            self.stage = command.stage
            self.applied = list(self.saved[command.checkpoint]) if command.checkpoint else []
        elif command.kind == "step":
            assert command.step == len(self.applied) + 1
            self.applied.append(command.step)
        elif command.kind == "save":
            self.saved[command.path] = list(self.applied)


def plan() -> StagePlan:
    return StagePlan(
        stage=Stage.SFT,
        models={"actor": ModelRef(head="lm", path="x")},
        total_optimizer_steps=9,
        make_step=lambda k: Step(id=f"sft/{k}", stage=Stage.SFT, step=k, batch=f"sft/{k}", actions=[[]]),
    )


def test_a_lost_step_is_replayed_from_the_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        group = make_group(1)
        ranks = OneRank(group)
        session = Ranks(job_of(Records(), tmp_path), group)
        life = asyncio.create_task(ranks.live())
        session.begin(plan(), 0)
        for _ in range(3):
            await session.run_step()
        await session.save()
        await session.run_step()
        ranks.die_before = {5}
        result = await session.run_step()
        assert result.metrics == {"step": 5.0}
        assert ranks.applied == [1, 2, 3, 4, 5]
        assert ranks.log == ["load", "step1", "step2", "step3", "save", "step4", "load", "step4", "step5"]
        life.cancel()

    run(scenario())


def test_the_steps_of_a_rank_that_will_end_are_saved_before_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        group = make_group(1)
        ranks = OneRank(group)
        session = Ranks(job_of(Records(), tmp_path), group)
        assert session.saved, "nothing can be lost yet"
        session.save_soon()
        life = asyncio.create_task(ranks.live())
        session.begin(plan(), 0)
        for _ in range(2):
            await session.run_step()
        assert not session.saved
        session.save_soon()
        await session.run_step()
        assert not session.saved, "the new step is not"
        await session.save()
        assert session.saved
        session.save_soon()
        ranks.die_before = {4}
        await session.run_step()
        assert ranks.log == ["load", "step1", "step2", "save", "step3", "save", "load", "step4"]
        life.cancel()

    run(scenario())


def test_a_commands_deadline_follows_what_such_commands_took(tmp_path: Path) -> None:
    """A rank in a loop that polls looks alive. A first step, which compiles, and a slow machine's steps have time."""

    async def scenario() -> None:
        group = make_group(1)
        session = Ranks(job_of(Records(), tmp_path), group)
        life = asyncio.create_task(OneRank(group).live())
        plain, limits, took = group.execute, dict[str, list[float]](), {1: 3000.0, 2: 40.0, 3: 0.5, 4: 0.5}

        async def execute(command: Any, timeout: float) -> CommandResult:
            limits.setdefault(command.kind, []).append(timeout)
            result = await plain(command, timeout)
            return result.model_copy(update={"metrics": {"seconds": took.get(getattr(command, "step", 0), 0.0)}})

        group.execute = execute  # type: ignore[method-assign,assignment]
        session.begin(plan(), 0)
        for _ in range(2):
            await session.run_step()
        await session.save()
        await session.run_step()
        assert limits["step"] == [6 * 3600, 30_000, 30_000]
        assert limits["save"] == [6 * 3600]
        await session.save()
        assert limits["save"][-1] == 1800
        group.peer_timeout = 86_400.0  # somebody has a debugger attached
        await session.run_step()
        assert limits["step"][-1] == 864_000
        life.cancel()

    run(scenario())


def test_ranks_that_come_back_get_no_model_that_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")

    async def scenario() -> None:
        group = make_group(1)
        ranks = OneRank(group)
        session = Ranks(job_of(Records(), tmp_path), group)
        session.folders = ModelFolders(tmp_path / "run", {"actor": folder}, Records())
        life = asyncio.create_task(ranks.live())
        session.begin(replace(plan(), models={"actor": ModelRef(head="lm", path=str(folder))}), 0)
        await session.run_step()
        (folder / "model.safetensors").write_text("trained")
        ranks.die_before = {2}
        with pytest.raises(DataError, match=r"spec\.models\.actor: .*/model\.safetensors has changed since the run"):
            await session.run_step()
        assert ranks.log == ["load", "step1"]
        life.cancel()

    run(scenario())


def test_a_stage_that_ended_just_before_the_coordinator_can_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator was killed after it recorded the end of SFT, and before it deleted SFT's checkpoints. The model
    before SFT, which is step 0 of SFT, is then loaded for the evaluation."""
    monkeypatch.setattr(supervised, "check_model", lambda *_: None)

    loads: list[int] = []

    def log(event: str, **fields: Any) -> None:
        if event == "trainers.load":
            loads.append(fields["checkpoint_step"])
            assert len(loads) < 3, "it loads again and again"

    async def scenario() -> None:
        group, records = make_group(1), Records()
        ranks = OneRank(group)
        session = Ranks(job_of(records, tmp_path, log), group)
        life = asyncio.create_task(ranks.live())
        session.begin(plan(), 0)
        await session.run_step()
        await session.save()
        (tmp_path / "checkpoints" / "sft-000001").mkdir(parents=True)
        records.put("sft/done", True)

        given: Any = SimpleNamespace(store=records)
        stages = SupervisedStages(Job(given, given, tmp_path, "run", given, given), session, given, given)
        finished: Any = SimpleNamespace(stage=Stage.SFT, export_to=tmp_path)
        await stages._run(finished)
        session.begin(plan(), 0)
        await session.at_target(lambda: asyncio.sleep(0))
        assert (loads, ranks.applied) == ([0, 0], [])
        assert list((tmp_path / "checkpoints").iterdir()) == []
        life.cancel()

    run(scenario())


def test_only_the_runs_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Someone keeps notes in the folder, and in a checkpoint."""
    folder, events = tmp_path / "checkpoints", []
    for name in (
        "sft-000001",
        "sft-000002",
        "sft-000003.tmp",
        "sft-000004",
        "sft-notes",
        "sft-000002.old.txt",
        "ppo-000001",
    ):
        (folder / name).mkdir(parents=True)
    for name, owner in (("sft-000001", "a"), ("sft-000002", "a"), ("sft-000004", "b")):
        (folder / name / "state.json").write_text(json.dumps({"run": owner}))
    (folder / "sft-000002" / "notes.md").write_text("mine")
    (folder / "sft-notes" / "x").write_text("mine")

    def log(event: str, **fields: Any) -> None:
        events.append((event, Path(fields["folder"]).name))

    async def scenario() -> None:
        Ranks(job_of(Records(), tmp_path, log, run="a"), make_group(1)).forget(Stage.SFT)

    run(scenario())
    left = ["ppo-000001", "sft-000002", "sft-000002.old.txt", "sft-000004", "sft-notes"]
    assert sorted(path.name for path in folder.iterdir()) == left
    assert (folder / "sft-000002" / "notes.md").read_text() == (folder / "sft-notes" / "x").read_text() == "mine"
    assert sorted(events) == [("folder.kept", "sft-000002"), ("folder.kept", "sft-000004")]


@pytest.mark.parametrize("stage", [Stage.DPO, Stage.REWARD, Stage.SFT])
def test_equal_replies_are_told_when_a_stage_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    told: list[str] = []

    async def run_nothing(*_: Any) -> None:
        told.append("learns")

    monkeypatch.setattr(supervised, "run_supervised", run_nothing)
    progress = SimpleNamespace(update=lambda **fields: told.append(fields.get("message", "")))
    results = SimpleNamespace(fact=None, wall_seconds=None)
    events: list[str] = []
    records: Any = SimpleNamespace(
        store=Records(), progress=progress, results=results, log=lambda event, **_: events.append(event)
    )
    batches: Any = SimpleNamespace(equal_pairs=lambda: "2 of 9 pairs have equal replies")
    given: Any = None
    stages = SupervisedStages(Job(given, given, tmp_path, "run", records, given), given, batches, given)
    run(stages._run(SimpleNamespace(stage=stage, steps=1)))  # type: ignore[arg-type]
    pairs = stage is not Stage.SFT
    assert told == ["2 of 9 pairs have equal replies" if pairs else "", "learns"]
    assert events == ["data.equal_pairs"] * pairs + ["stage.finished"]


def test_trainers_can_send_what_they_hold_until_they_are_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        group = make_group(1)
        session = Ranks(job_of(Records(), tmp_path), group)
        assert not session.can_send(0)
        life = asyncio.create_task(OneRank(group).live())
        session.begin(plan(), 0)
        await session.run_step()
        await session.save()  # they have said since what they hold
        assert [session.can_send(version) for version in (0, 1, 2)] == [False, True, False]
        group.end_generation("trainer-0 was silent")
        assert not session.can_send(1)
        life.cancel()

    run(scenario())


@pytest.mark.parametrize("lag", [0, 1])
def test_a_frozen_trainer_cannot_send_long_before_it_is_given_up(tmp_path: Path, lag: int) -> None:
    """Meanwhile servers send to those that come late."""
    clock = Clock()

    async def scenario() -> None:
        group = make_group(2, clock)
        session = Ranks(job_of(Records(), tmp_path), group)
        session.begin(replace(plan(), lag=lag), 0)
        await form(group, "a", "b")
        asking = asyncio.create_task(
            group.next(NextRequest(generation=1, result=None, stage=Stage.SFT, step=0, versions=[0]))
        )
        await group.wait_position(5)
        found = []
        for seconds in (0.0, 6.0, 8.0, 15.0):
            clock.now += seconds
            group.heartbeat(Heartbeat(name="trainer-0", rank=0, incarnation="a", generation=1))
            group.check_silence()
            found.append(session.can_send(0))
        assert found == [True, True, False, False]
        assert group.formed
        group.heartbeat(Heartbeat(name="trainer-1", rank=1, incarnation="b", generation=1))
        assert session.can_send(0)
        asking.cancel()

    run(scenario())


def test_a_step_that_the_ranks_already_ran_is_not_run_twice(tmp_path: Path) -> None:
    """The coordinator died after sending step 1: the new one finds the ranks at step 1 and takes the stored result."""

    async def scenario() -> None:
        group = make_group(1)
        ranks = OneRank(group)
        records = Records()
        group.record_result = lambda r: records.put(f"result/{r.id}", r.model_dump())
        first = Ranks(job_of(records, tmp_path), group)
        life = asyncio.create_task(ranks.live())
        first.begin(plan(), 0)
        await first.run_step()
        second = Ranks(job_of(records, tmp_path), group)
        second.begin(plan(), 0)
        result = await second.run_step()
        assert ranks.log == ["load", "step1"]
        assert result.metrics == {"step": 1.0}
        life.cancel()

    run(scenario())


def test_a_trainer_that_never_joins_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        session = Ranks(job_of(Records(), tmp_path, start_seconds=0.05), make_group(2))
        session.begin(plan(), 0)
        with pytest.raises(TimeoutError, match=r"trainer ranks \[0, 1\] did not join within"):
            await session.run_step()

    run(scenario())


def test_what_a_lost_checkpoint_left_half_written_is_deleted_with_the_next_one(tmp_path: Path) -> None:
    """The trainers and the coordinator died while they wrote it, and the run went on with another interval."""

    async def scenario() -> None:
        group = make_group(1)
        session = Ranks(job_of(Records(), tmp_path), group)
        life = asyncio.create_task(OneRank(group).live())
        session.begin(plan(), 0)
        left = [tmp_path / "checkpoints" / name for name in ("sft-000007.tmp", "sft-000003.old", "reward-000007.tmp")]
        for folder in left:
            folder.mkdir(parents=True)
        await session.run_step()
        await session.save()
        assert [folder.exists() for folder in left] == [False, False, True]
        life.cancel()

    run(scenario())


def test_long_polls_are_answered_when_the_coordinator_closes() -> None:
    """The HTTP server waits for them. This clock stands still, so they do not end by themselves."""

    async def scenario() -> None:
        group = make_group(clock=Clock())
        joining = asyncio.create_task(group.join(join(0, "a")))
        await asyncio.sleep(0)
        group.close()
        assert (await joining).generation is None
        formed = make_group(world=1, clock=Clock())
        await form(formed, "a")
        asking = asyncio.create_task(formed.next(NextRequest(generation=1)))
        await asyncio.sleep(0)
        formed.close()
        assert (await asking).command is None

    run(scenario())
