"""Brings the trainers to a step and keeps them there: load the last checkpoint, replay the steps since.

A step is a function of the state before it and of its batch, and batches are kept until a checkpoint covers them, so
a replay ends in the same bits."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from dovetail.api.messages import Command, CommandResult, Evaluate, Export, Load, ModelRef, Save, Step
from dovetail.api.plan import Layout
from dovetail.api.types import Stage
from dovetail.coordinator.trainer_group import Position, TrainerGroup, TrainerLost

STEP_TIMEOUT_SECONDS = 6 * 3600.0
T = TypeVar("T")


@dataclass(frozen=True)
class StagePlan:
    """What the trainers need to run a stage: model sources, optimizer steps in all, the command of a step, where
    models are if not where the plan puts them, and which of them make activations again."""

    stage: Stage
    models: dict[str, ModelRef]
    total_optimizer_steps: int
    make_step: Callable[[int], Step]
    layouts: dict[str, Layout] = field(default_factory=dict)
    recompute: list[str] = field(default_factory=list)


class Records(Protocol):
    """The parts of the store used here."""

    def get(self, key: str) -> object: ...
    def put(self, key: str, value: object) -> None: ...


class TrainerSession:
    """All calls are serialised; each survives any number of lost generations (the launcher bounds restarts)."""

    def __init__(
        self,
        group: TrainerGroup,
        records: Records,
        run_dir: Path,
        keep: int,
        join_timeout: float,
        log: Callable[..., None],
    ) -> None:
        self._group = group
        self._records = records
        self._dir = run_dir / "checkpoints"
        self._keep = keep
        self._join_timeout = join_timeout
        self._log = log
        self._lock = asyncio.Lock()
        self._plan: StagePlan | None = None
        self._step = 0

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self, stage: Stage) -> tuple[int, str | None]:
        """Step and folder of the stage's last checkpoint; (0, None) before the first."""
        record = self._records.get(f"checkpoint/{stage.value}")
        if isinstance(record, dict):
            return int(record["step"]), str(record["path"])
        return 0, None

    async def save(self) -> None:
        """Checkpoint the current step, then drop the oldest beyond `keep`."""
        plan = self._need_plan()
        path = self._dir / f"{plan.stage.value}-{self._step:06d}"
        if self.checkpoint(plan.stage) == (self._step, str(path)):
            return
        await self.at_target(lambda: self._command(Save(id=self._id("save"), path=str(path))))
        self._records.put(f"checkpoint/{plan.stage.value}", {"step": self._step, "path": str(path)})
        self._log("checkpoint.saved", stage=plan.stage.value, step=self._step)
        folders = sorted(p for p in self._dir.glob(f"{plan.stage.value}-*") if p.is_dir() and p.suffix != ".tmp")
        for old in folders[: -self._keep]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    def forget(self, stage: Stage) -> None:
        """A finished stage needs no checkpoint: its exported model is what goes on."""
        self._records.put(f"checkpoint/{stage.value}", None)
        for old in self._dir.glob(f"{stage.value}-*"):
            shutil.rmtree(old, ignore_errors=True)

    # ------------------------------------------------------------ steps

    def begin(self, plan: StagePlan, step: int) -> None:
        """Make (plan.stage, step) the position to hold. Nothing is sent yet."""
        self._plan, self._step = plan, step

    @property
    def step(self) -> int:
        """Last finished step of the current stage."""
        return self._step

    async def run_step(self) -> CommandResult:
        """Run the next step once: if the ranks turn out to have run it already, its stored result is returned."""
        plan, step = self._need_plan(), self._step + 1
        command = plan.make_step(step)
        async with self._lock:
            while True:
                try:
                    position = await self._group.wait_position(self._join_timeout)
                    if position == Position(plan.stage, step):
                        result = self.result_of(command.id)
                    else:
                        await self._bring(plan, self._step)
                        result = await self._group.execute(command, STEP_TIMEOUT_SECONDS)
                except TrainerLost as lost:
                    self._log("trainers.recover", stage=plan.stage.value, step=step, reason=str(lost))
                    continue
                self._step = step
                return result

    async def evaluate(self, batches: list[str], demonstrations: Sequence[str] = ()) -> dict[str, float]:
        """Metrics of the current weights on whole batches; `demonstrations`: for a reward model."""
        plan = self._need_plan()
        command = Evaluate(
            id=self._id("evaluate"), stage=plan.stage, batches=batches, demonstrations=list(demonstrations)
        )
        return (await self.at_target(lambda: self._command(command))).metrics

    async def export(self, model: str, path: Path, subtract: float = 0.0) -> None:
        """Write a Hugging Face folder of the current weights; `subtract` from every value of a value head."""
        command = Export.model_validate(
            {"id": self._id(f"export-{model}"), "model": model, "path": str(path), "subtract": subtract}
        )
        await self.at_target(lambda: self._command(command))

    async def hold(self) -> None:
        """Background: whenever the ranks have formed anew, bring them back to the current step at once."""
        while True:
            position = await self._group.wait_position(float("inf"))
            if self._plan is not None and position.stage is None and not self._lock.locked():
                async with self._lock:
                    try:
                        await self._bring(self._need_plan(), self._step)
                    except TrainerLost:
                        continue
            await asyncio.sleep(0.5)

    # ------------------------------------------------------------ inner parts

    def _need_plan(self) -> StagePlan:
        if self._plan is None:
            raise RuntimeError("no stage has begun")
        return self._plan

    def _id(self, what: str) -> str:
        return f"{self._need_plan().stage.value}/{self._step}/{what}/{time.time_ns()}"

    def result_of(self, command_id: str) -> CommandResult:
        """A command's stored result; one without metrics if the coordinator died before it could store it."""
        record = self._records.get(f"result/{command_id}")
        if record is None:
            return CommandResult(id=command_id, ok=True)
        return CommandResult.model_validate(record)

    async def _command(self, command: Command) -> CommandResult:
        return await self._group.execute(command, STEP_TIMEOUT_SECONDS)

    async def at_target(self, action: Callable[[], Awaitable[T]]) -> T:
        """Run something (a publish) while the ranks hold the current step; repeated if they are lost in the middle."""
        async with self._lock:
            while True:
                try:
                    await self._bring(self._need_plan(), self._step)
                    return await action()
                except TrainerLost as lost:
                    self._log("trainers.recover", step=self._step, reason=str(lost))

    async def _bring(self, plan: StagePlan, step: int) -> None:
        """Load and replay until the ranks hold (plan.stage, step). Raises TrainerLost."""
        while True:
            position = await self._group.wait_position(self._join_timeout)
            if position == Position(plan.stage, step):
                return
            saved, path = self.checkpoint(plan.stage)
            if position.stage != plan.stage or not saved <= position.step < step:
                load = Load(
                    id=self._id("load"),
                    stage=plan.stage,
                    models=plan.models,
                    total_steps=plan.total_optimizer_steps,
                    checkpoint=path,
                    layouts=plan.layouts,
                    recompute=plan.recompute,
                )
                self._log("trainers.load", stage=plan.stage.value, checkpoint_step=saved, target_step=step)
                await self._command(load)
                continue
            self._log("trainers.replay", stage=plan.stage.value, step=position.step + 1)
            await self._command(plan.make_step(position.step + 1))
