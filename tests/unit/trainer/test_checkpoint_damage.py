"""A checkpoint that is not what was saved is refused by name, and an older one is taken: the same bits in the end."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.coordinator.workers.trainer_group import TrainerError, TrainerGroup
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import CommandResult, Export, JoinRequest, Load, NextRequest, Save
from dovetail.trainer.files.shards import digest
from helpers.coordinated import job_of
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.records import Records
from helpers.trainer_ranks import job, load_command, sft_batch


@pytest.fixture(scope="module")
def trainer() -> Iterator[LocalTrainer]:
    with LocalTrainer(job()) as made:
        yield made


def flip(path: Path, where: float = 0.5) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_damage_is_refused_and_the_file_named(
    trainer: LocalTrainer, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    trainer.metrics(load_command(Stage.SFT))
    folder = tmp_path / "checkpoint"
    trainer.metrics(Save(id="s", path=str(folder), run="a"))
    load = load_command(Stage.SFT).model_copy(update={"checkpoint": str(folder), "run": "a"})
    assert trainer.execute(load).ok
    damage(folder / name)
    result = trainer.execute(load)
    assert not result.ok
    assert result.damaged
    assert name in str(result.error)
    assert "\n" not in str(result.error)
    assert trainer.execute(load_command(Stage.SFT)).ok, "the rank can still be used"


def test_a_checkpoint_of_another_run_is_refused_but_not_called_damaged(trainer: LocalTrainer, tmp_path: Path) -> None:
    trainer.metrics(load_command(Stage.SFT))
    folder = tmp_path / "checkpoint"
    trainer.metrics(Save(id="s", path=str(folder), run="a"))
    load = load_command(Stage.SFT).model_copy(update={"checkpoint": str(folder), "run": "b"})
    result = trainer.execute(load)
    assert not result.ok
    assert not result.damaged
    assert "is of run a, but store.sqlite of run b" in str(result.error)


def test_the_digest_tells_any_bit_any_length_and_any_order(tmp_path: Path) -> None:
    path = tmp_path / "file"
    block = bytes(range(256)) * 64  # 16 KiB, a row of the checksum
    found = set()
    contents = [b"", b"\0", b"\0" * 2, b"\0" * 16, block, block + b"\0", block + block[::-1], block[::-1] + block]
    contents.append(block * 1024 + b"1")  # more than a chunk
    contents.append(block * 1024 + b"2")
    for content in contents:
        path.write_bytes(content)
        found.add(digest(path))
    assert len(found) == len(contents)


class Run:
    """A session with a real rank. `dead`: it loses what it holds before its next command."""

    def __init__(self, trainer: LocalTrainer, folder: Path, records: Records, **plan: Any) -> None:
        self.trainer, self.dead, self.events = trainer, False, list[tuple[str, dict[str, Any]]]()
        self.group = TrainerGroup(
            world_size=1,
            generation=1,
            formed=False,
            peer_timeout=60.0,
            clock=asyncio.get_event_loop().time,
            record_generation=lambda _: None,
            record_result=lambda _: None,
            log=lambda *_, **__: None,
        )
        self.session = Ranks(job_of(records, folder, self._log, run="a", start_seconds=60.0), self.group)
        base = load_command(Stage.SFT)
        for k in range(1, 8):
            trainer.client.batches[f"sft/{k}"] = sft_batch(k)
        self.plan = StagePlan(Stage.SFT, base.models, base.total_steps, self._step, **plan)
        self.life = asyncio.create_task(self._live())

    def _log(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def _step(self, k: int) -> Any:
        return self.trainer.step(Stage.SFT, k, sft_batch(k), ["actor"], 4)

    async def _live(self) -> None:
        life = 0
        while True:
            life += 1
            await self.group.join(
                JoinRequest(name="trainer-0", rank=0, world_size=1, incarnation=str(life), host="h", port=1)
            )
            self.trainer.execute(load_command(Stage.REWARD))  # it holds something else
            result: CommandResult | None = None
            while not self.dead:
                runner = self.trainer.runner
                command = (
                    await self.group.next(
                        NextRequest(generation=life, result=result, stage=runner.stage, step=runner.step)
                    )
                ).command
                result = None if command is None else self.trainer.execute(command)
            self.dead = False
            self.group.end_generation("died")

    async def until(self, last: int, *saves: int) -> None:
        for k in range(self.session.step + 1, last + 1):
            await self.session.run_step()
            if k in saves:
                await self.session.save()

    def weights(self, folder: Path) -> str:
        self.trainer.metrics(Export(id=f"export/{folder}", model="actor", path=str(folder)))
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def run(scenario: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.slow
def test_an_older_whole_checkpoint_replaces_a_damaged_one(trainer: LocalTrainer, tmp_path: Path) -> None:
    async def scenario() -> None:
        calm = Run(trainer, tmp_path / "calm", Records())
        calm.session.begin(calm.plan, 0)
        await calm.until(5, 2, 4)
        expected = calm.weights(tmp_path / "calm-model")
        calm.life.cancel()

        records = Records()
        first = Run(trainer, tmp_path / "hurt", records)
        first.session.begin(first.plan, 0)
        await first.until(4, 2, 4)
        first.life.cancel()
        flip(tmp_path / "hurt" / "checkpoints" / "sft-000004" / "__0_0.distcp")
        # Another coordinator, in the run's folder after it was moved.
        (tmp_path / "moved").mkdir()
        (tmp_path / "hurt" / "checkpoints").rename(tmp_path / "moved" / "checkpoints")
        again = Run(trainer, tmp_path / "moved", records)
        again.session.begin(again.plan, 4)
        await again.until(5)
        assert again.weights(tmp_path / "hurt-model") == expected
        fallen = [fields for event, fields in again.events if event == "checkpoint.damaged"]
        assert [(f["step"], f["going_on_from_step"]) for f in fallen] == [(4, 2)]
        assert "__0_0.distcp is damaged" in fallen[0]["reason"]
        assert again.session.checkpoint(Stage.SFT)[0] == 2
        again.life.cancel()

    run(scenario)


@pytest.mark.slow
def test_without_any_whole_checkpoint_the_stage_begins_anew_or_says_so(trainer: LocalTrainer, tmp_path: Path) -> None:
    async def scenario() -> None:
        records = Records()
        first = Run(trainer, tmp_path, records)
        first.session.begin(first.plan, 0)
        await first.until(4, 2, 4)
        first.life.cancel()
        for folder in (tmp_path / "checkpoints").iterdir():
            (folder / ".metadata").unlink()
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))

        gone = Run(trainer, tmp_path, Records(), can_replay=lambda first, last: first >= 2)
        gone._log("")
        gone.session._records = _copy(records)
        gone.session.begin(gone.plan, 4)
        with pytest.raises(TrainerError, match=r"sft-000002/\.metadata is missing; no older checkpoint of stage sft"):
            await gone.until(5)
        gone.life.cancel()

        anew = Run(trainer, tmp_path.with_name("copy"), records)
        anew.session.begin(anew.plan, 4)
        await anew.until(5, 5)
        assert [f["going_on_from_step"] for e, f in anew.events if e == "checkpoint.damaged"] == [2, 0]
        left = sorted(p.name for p in (tmp_path.with_name("copy") / "checkpoints").iterdir())
        assert left == ["sft-000005"]
        anew.life.cancel()

    run(scenario)


def _copy(records: Records) -> Records:
    made = Records()
    made.values = dict(records.values)
    return made


def test_load_without_a_run_takes_any(trainer: LocalTrainer, tmp_path: Path) -> None:
    """A checkpoint of a release before run ids."""
    trainer.metrics(load_command(Stage.SFT))
    trainer.metrics(Save(id="s", path=str(tmp_path / "c")))
    load: Load = load_command(Stage.SFT)
    assert trainer.execute(load.model_copy(update={"checkpoint": str(tmp_path / "c"), "run": "b"})).ok
