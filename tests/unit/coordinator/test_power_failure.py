"""A power failure takes back what was not on the disk yet: at whichever moment it comes, the run can go on."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_coordinator_trainers import Clock, OneRank, Records, make_group, run

from dovetail.coordinator.store.database import Database
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.store import KeyValues, Store
from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import ModelRef, Step
from helpers.coordinated import job_of

STEPS, KEEP = 6, 2


class Disk:
    """What survives: the store as it was when it last said that it is on the disk, or after any transaction since; and
    the folders as they are, for a deletion may reach the disk at once. `failures` are copies of that, for each deletion
    and each state of the store that it might meet."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.failures, self._copies = folder, list[Path](), 0
        self._survivors: list[Path] = []
        sync, put_all, unlink, rmtree = Database.sync, KeyValues.put_all, os.unlink, shutil.rmtree

        def synced(database: Database) -> None:
            sync(database)
            self._survivors.clear()
            self.keep_store()

        def put(records: KeyValues, values: dict[str, object]) -> None:
            put_all(records, values)
            self.keep_store()

        def deleted(action: Any) -> Any:
            def perform(path: Any, *args: Any, **kwargs: Any) -> None:
                action(path, *args, **kwargs)
                if folder in Path(path).parents:
                    self._fail()

            return perform

        monkeypatch.setattr(Database, "sync", synced)
        monkeypatch.setattr(KeyValues, "put_all", put)
        monkeypatch.setattr(Path, "unlink", deleted(lambda path, **_: unlink(path)))
        monkeypatch.setattr(shutil, "rmtree", deleted(rmtree))

    def keep_store(self) -> None:
        self._copies += 1
        copy = self.folder.with_name(f"store-{self._copies}")
        copy.mkdir()
        # Another process: closing a file of an open database would drop its locks.
        subprocess.run(["sh", "-c", f"cp {self.folder}/store.sqlite {self.folder}/store.sqlite-wal {copy}"], check=True)
        self._survivors.append(copy)

    def _fail(self) -> None:
        for store in self._survivors:
            copy = self.folder.with_name(f"failure-{len(self.failures)}")
            shutil.copytree(store, copy)
            for name in ("checkpoints", "experience"):
                shutil.copytree(self.folder / name, copy / name)
            self.failures.append(copy)


def plan(folder: Path, store: Store) -> StagePlan:
    files = ExperienceFiles(folder)
    return StagePlan(
        stage=Stage.PPO,
        models={"actor": ModelRef(head="lm", path="x")},
        total_optimizer_steps=STEPS,
        make_step=lambda k: Step(id=f"ppo/{k}/step", stage=Stage.PPO, step=k, batch=f"ppo/{k}", actions=[[]]),
        can_replay=lambda first, last: all(
            files.has(k) and store.get(f"ppo/{k}/facts") is not None for k in range(first + 1, last + 1)
        ),
    )


async def train(folder: Path, store: Store) -> None:
    """What the PPO stage does with its files, as far as `STEPS`."""
    group, files = make_group(1), ExperienceFiles(folder)
    ranks = OneRank(group)
    session = Ranks(job_of(store, folder, keep=KEEP), group)
    apply = ranks.apply

    def on_disk(command: Any) -> None:
        apply(command)
        if command.kind == "save":
            Path(command.path).mkdir(parents=True)
            (Path(command.path) / "state.json").touch()

    ranks.apply = on_disk  # type: ignore[method-assign]
    life = asyncio.create_task(ranks.live())
    session.begin(plan(folder, store), int((store.get("ppo/progress") or {"step": 0})["step"]))
    for k in range(session.step + 1, STEPS + 1):
        digest = files.write(k, {"scores": np.zeros(2, np.float32)})
        store.put_all({f"ppo/{k}/facts": {}, f"ppo/{k}/batch": digest})
        await session.run_step()
        store.put_all({"ppo/progress": {"step": k}})
        if k % 2 == 0 or k == 3:
            await session.save()
            files.forget_through(session.oldest(Stage.PPO))
    life.cancel()


def resumable(folder: Path) -> bool:
    """The trainers can be brought to the step that the store says the run is at, from each checkpoint kept."""
    store = Store(folder)
    session = Ranks(job_of(store, folder, keep=KEEP), make_group(1, Clock()))
    step = int((store.get("ppo/progress") or {"step": 0})["step"])
    session.begin(plan(folder, store), step)
    saved, path = session.checkpoint(Stage.PPO)
    whole = path is None or Path(path).is_dir()
    again = plan(folder, store).can_replay(session.oldest(Stage.PPO) if path else 0, step)
    store.close()
    return whole and again and saved <= step


def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(folder)
    disk = Disk(folder, monkeypatch)
    disk.keep_store()
    (folder / "checkpoints").mkdir()
    run(train(folder, store))
    store.close()
    monkeypatch.undo()
    return disk.failures


def test_a_run_goes_on_after_a_power_failure_at_any_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = failures(tmp_path, monkeypatch)
    assert len(found) >= 4  # checkpoints 2 and 3 and batches 1 to 4 at least
    assert all(resumable(folder) for folder in found)


def test_the_failures_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the store not on the disk before something is deleted, runs would be lost."""
    monkeypatch.setattr(KeyValues, "sync", lambda _: None)
    assert not all(resumable(folder) for folder in failures(tmp_path, monkeypatch))


def test_the_store_is_flushed_by_a_commit_of_its_own(tmp_path: Path) -> None:
    """SQLite's log is written to the disk by a commit with synchronous=FULL; others leave it to the system."""
    store = Store(tmp_path)
    told: list[str] = []
    store._db._connection.set_trace_callback(told.append)
    store.put("a/b", 1)
    store.sync()
    store._db._connection.set_trace_callback(None)
    assert told.index("PRAGMA synchronous=FULL") < len(told) - 2 - told[::-1].index("COMMIT")
    assert told[-2:] == ["COMMIT", "PRAGMA synchronous=NORMAL"]
    assert store._db._connection.execute("PRAGMA synchronous").fetchone() == (1,)
    store.close()


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_a_step_whose_result_was_lost_is_run_again(tmp_path: Path, checkpoint: int) -> None:
    """The trainers are on other nodes and have gone on. What a step measured decides what comes next."""

    async def scenario() -> None:
        group = make_group(1)
        ranks, records = OneRank(group), Records()
        group.record_result = lambda result: records.put(f"result/{result.id}", result.model_dump(mode="json"))
        life = asyncio.create_task(ranks.live())
        steps = StagePlan(
            stage=Stage.PPO,
            models={"actor": ModelRef(head="lm", path="x")},
            total_optimizer_steps=STEPS,
            make_step=lambda k: Step(id=f"ppo/{k}/step", stage=Stage.PPO, step=k, batch=f"ppo/{k}", actions=[[]]),
        )
        before = Ranks(job_of(records, tmp_path, keep=KEEP), group)
        before.begin(steps, 0)
        first = await before.run_step()
        if checkpoint:
            await before.save()
        second = await before.run_step()
        assert first.metrics != second.metrics

        records.put("result/ppo/2/step", None)  # the store is as it was after step 1
        after = Ranks(job_of(records, tmp_path, keep=KEEP), group)
        after.begin(steps, 1)
        again = await after.run_step()
        assert (again, ranks.applied, after.step) == (second, [1, 2], 2)
        assert ranks.log[-3:] == (["step2", "load", "step2"] if checkpoint else ["load", "step1", "step2"])
        life.cancel()

    run(scenario())
