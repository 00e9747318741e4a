"""Brings the trainers to a step and keeps them there. It loads the last complete checkpoint and repeats the steps since
then.

A step depends only on the state before it and on its batch. Batches are kept until a checkpoint covers them. So
repeated steps give the same bits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.job import Job
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.identity import check_own, delete_folder
from dovetail.coordinator.workers.trainer_group import (
    CheckpointDamaged,
    TrainerError,
    TrainerGroup,
    TrainerLost,
    TrainerPosition,
)
from dovetail.manifest.training_types import kept_versions
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import Command, CommandResult, Evaluate, Export, Load, ModelRef, Save, Step
from dovetail.protocol.plan import Layout

# A command's first deadline, and the least and the factor of those that follow from what such commands took. The least
# leaves time to compile again. Longer responses and larger files take a few times longer, but not ten times.
FIRST_SECONDS = 6 * 3600.0
LEAST_SECONDS = 1800.0
TIMES_LONGEST = 10.0
# The interval at which it checks whether ranks that do not keep a version must be restored.
BACK_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True)
class StagePlan:
    """The facts that the trainers need to run a stage. `models` has the source of each model. `total_optimizer_steps`
    is the number of optimizer steps. `make_step(step)` returns the command of a step. `layouts` has layouts that
    replace the plan's. `recompute` names the models with activation checkpointing, and `zero3` those under ZeRO-3.
    `can_replay(i, k)` says whether the batches of steps i + 1 to k still exist. The weights that are sent may be up to
    `lag` steps behind the newest. Above 0, the ranks keep lag + 1 versions and send them while they train."""

    stage: Stage
    models: dict[str, ModelRef]
    total_optimizer_steps: int
    make_step: Callable[[int], Step]
    layouts: dict[str, Layout] = field(default_factory=dict)
    recompute: list[str] = field(default_factory=list)
    can_replay: Callable[[int, int], bool] = lambda first, last: True
    lag: int = 0
    zero3: list[str] = field(default_factory=list)


class Ranks:
    """The commands of one job to its trainers. Calls run one after another. Each survives any number of lost
    generations. The launcher limits restarts."""

    def __init__(
        self,
        job: Job,
        group: TrainerGroup,
    ) -> None:
        """`group` has the trainer ranks. The run's id is written into its checkpoints and exports."""
        self._run = job.run
        # It is set once the job's models are known. It says before each load whether they are what they were.
        self.folders: ModelFolders | None = None
        self._group = group
        self._records = job.store
        self._dir = job.folder / "checkpoints"
        self._keep = job.spec.checkpoint.keep
        self._join_timeout = job.start_seconds
        self._log = job.log
        self._lock = asyncio.Lock()
        self._plan: StagePlan | None = None
        self._step = 0
        # The oldest version that may be requested. Restored ranks must compute it again. If it is None, only the newest
        # version may be requested.
        self._needed: int | None = None
        # Whether a checkpoint shall be written before the next step.
        self._soon = False
        # The seconds of the longest command of each stage and kind. Those for the reference are a kind of their own.
        self._longest: dict[tuple[Stage, str, bool], float] = {}

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self, stage: Stage) -> tuple[int, str | None]:
        """The step and folder of the stage's last checkpoint. (0, None) before the first one."""
        record = self._records.get(f"checkpoint/{stage.value}")
        if isinstance(record, dict):
            # The path is stored relative to the run directory, which may have been moved. Older releases stored it
            # absolute.
            return int(record["step"]), str(self._dir / Path(str(record["path"])).name)
        return 0, None

    def oldest(self, stage: Stage) -> int:
        """The step of the oldest checkpoint that is kept. 0 if none is kept. No step before it is ever repeated.

        It is also 0 while at most one checkpoint allows the ranks to compute the oldest version that may be requested,
        because that checkpoint may be damaged. If the job keeps only one checkpoint, it is 0 while there is no such
        checkpoint."""
        last = self.checkpoint(stage)[0]
        kept = [step for step in self._kept(stage) if step <= last]
        starts = [step for step in kept if step <= self._step - self._lag]
        return kept[0] if len(starts) >= min(2, self._keep) else 0

    def save_soon(self) -> None:
        """Have a checkpoint written before the next step, because a rank will end soon."""
        self._soon = not self.saved

    @property
    def due(self) -> bool:
        """Whether a checkpoint was asked for (`save_soon`) and is not written yet."""
        return self._soon and not self.saved

    @property
    def saved(self) -> bool:
        """Whether no finished step would be lost with the ranks. It is also true while they hold nothing, because
        nothing can be saved then."""
        plan = self._plan
        return plan is None or not self._group.formed or self._step in (0, self.checkpoint(plan.stage)[0])

    async def save(self) -> None:
        """Write a checkpoint of the current step. Then delete the oldest ones beyond `keep`. Raises TrainerError."""
        plan = self._need_plan()
        self._soon = False
        path = self._path(plan.stage, self._step)
        if self.checkpoint(plan.stage) == (self._step, str(path)):
            return
        await self.at_target(lambda: self._execute(Save(id=self._id("save"), path=str(path), run=self._run)))
        self._record(plan.stage, self._step)
        self._log("checkpoint.saved", stage=plan.stage.value, step=self._step)
        kept = self._kept(plan.stage)
        # There can be checkpoints of later steps than the store knows, if a power failure lost the store's last
        # transactions.
        ours = [step for step in kept if step <= self._step]
        # The oldest version that may be sent can be computed again from any of these. One of them may be damaged.
        before = [step for step in ours if step <= self._step - self._lag][-min(2, self._keep) :]
        doomed = [step for step in ours[: -self._keep] if step not in before]
        for step in [*doomed, *(s for s in kept if s > self._step)]:
            await asyncio.to_thread(self.prune, self._path(plan.stage, step))
        # No rank writes now. A temporary folder was left by ranks that died while they wrote a checkpoint.
        for rest in self._folders(plan.stage, r"\.(?:old|damaged|tmp)"):
            await asyncio.to_thread(self.prune, rest)

    def forget(self, stage: Stage) -> None:
        """Delete the checkpoints of a finished stage. The next stages start from its exported model."""
        self._records.put(f"checkpoint/{stage.value}", None)
        self._records.sync()
        for old in self._folders(stage, r"(?:\.(?:old|damaged|tmp))?"):
            self.prune(old)

    def _path(self, stage: Stage, step: int) -> Path:
        return self._dir / f"{stage.value}-{step:06d}"

    def _kept(self, stage: Stage) -> list[int]:
        """The steps of the stage's checkpoint folders, in ascending order."""
        return sorted(int(path.name.removeprefix(f"{stage.value}-")) for path in self._folders(stage))

    def _folders(self, stage: Stage, ending: str = "") -> list[Path]:
        """The stage's folders in checkpoints/ whose names end so (a pattern)."""
        name = re.compile(rf"{stage.value}-\d{{6,}}{ending}")
        return [path for path in self._dir.glob(f"{stage.value}-*") if name.fullmatch(path.name)]

    def _record(self, stage: Stage, step: int) -> None:
        """Record this as the stage's last checkpoint, and flush the store, because other checkpoints are deleted
        next."""
        where = {"step": step, "path": f"{self._dir.name}/{self._path(stage, step).name}"}
        self._records.put(f"checkpoint/{stage.value}", where if step else None)
        self._records.sync()

    def prune(self, folder: Path) -> None:
        """Delete a checkpoint or an exported model, unless something in it is not the run's."""
        try:
            self.delete(folder)
        except (OSError, StoreError) as error:
            self._log("folder.kept", folder=str(folder), reason=str(error))

    def delete(self, folder: Path) -> None:
        """Delete a checkpoint or an exported model. Raises StoreError if something in it is not the run's."""
        delete_folder(folder, self._dir.parent, self._run)

    def _fall_back(self, plan: StagePlan, step: int, damaged: int, reason: str) -> None:
        """Continue from an older checkpoint, or from the beginning of the stage. The damaged one is renamed, and
        deleted after the next one is saved. Raises TrainerError if no other starting point exists."""
        older = [s for s in reversed(self._kept(plan.stage)) if s < damaged and plan.can_replay(s, step)]
        if not older and not plan.can_replay(0, step):
            raise TrainerError(
                f"{reason}; no older checkpoint of stage {plan.stage.value} is kept to go on from (checkpoint.keep): "
                "put a copy of the folder back, or start a new run"
            )
        step_back = older[0] if older else 0
        self._log(
            "checkpoint.damaged", stage=plan.stage.value, step=damaged, reason=reason, going_on_from_step=step_back
        )
        folder = self._path(plan.stage, damaged)
        aside = folder.with_name(folder.name + ".damaged")
        if aside.exists():
            self.prune(aside)
        if aside.exists():
            raise TrainerError(f"{reason}; {aside} holds what is not the run's: move it away, and resume the run")
        if folder.exists():
            folder.rename(aside)
        self._record(plan.stage, step_back)

    # ------------------------------------------------------------ steps

    def begin(self, plan: StagePlan, step: int) -> None:
        """Make (plan.stage, step) the position that the trainers must hold. This sends nothing yet."""
        self._plan, self._step = plan, step

    @property
    def step(self) -> int:
        """The last finished step of the current stage."""
        return self._step

    async def run_step(self) -> CommandResult:
        """Run the next step once. If the ranks have run it already, its stored result is returned. If a power failure
        lost that result, the ranks go back to the last checkpoint, because later steps depend on the result. An example
        is the coefficient of the KL penalty. Raises TrainerError."""
        if self.due:
            await self.save()
        plan, step = self._need_plan(), self._step + 1
        command = plan.make_step(step)
        async with self._lock:
            while True:
                try:
                    position = await self._group.wait_position(self._join_timeout)
                    known = self._stored(command.id) if position == TrainerPosition(plan.stage, step) else None
                    if known is not None:
                        result = known
                    else:
                        await self._bring(plan, self._step)
                        result = await self._execute(command)
                except TrainerLost as lost:
                    self._log("trainers.recover", stage=plan.stage.value, step=step, reason=str(lost))
                    continue
                self._step = step
                return result

    async def evaluate(self, batches: list[str], demonstrations: Sequence[str] = ()) -> dict[str, float]:
        """The metrics of the current weights on whole batches. A reward model is centred with the batches
        `demonstrations`."""
        plan = self._need_plan()
        command = Evaluate(
            id=self._id("evaluate"), stage=plan.stage, batches=batches, demonstrations=list(demonstrations)
        )
        return (await self.at_target(lambda: self._execute(command))).metrics

    async def logprobs(self, batch: str) -> list[float]:
        """The log-probabilities, in nats, of the batch's responses under the weights with which the stage begins. There
        is one for each response."""
        plan = self._need_plan()
        command = Evaluate(id=self._id("reference"), stage=plan.stage, batches=[batch], reference=True)
        return (await self.at_target(lambda: self._execute(command), 0)).logprobs

    async def export(self, model: str, path: Path, subtract: float = 0.0) -> None:
        """Write the current weights as a Hugging Face folder in the run directory. Each output of a value head is
        lowered by `subtract`. Raises StoreError if something is there that is not the run's."""
        check_own(path, path.relative_to(self._dir.parent).as_posix(), self._run)
        where = {"path": str(path), "subtract": subtract, "run": self._run}
        command = Export.model_validate({"id": self._id(f"export-{model}"), "model": model, **where})
        await self.at_target(lambda: self._execute(command))

    async def hold(self) -> None:
        """Run as a background task. When the ranks have formed new process groups, it brings them back to the current
        step at once."""
        while True:
            position = await self._group.wait_position(float("inf"))
            lost = position.stage is None or self._lacks(position)
            if self._plan is not None and lost and not self._lock.locked():
                async with self._lock:
                    try:
                        await self._bring(self._need_plan(), self._step)
                    except TrainerLost:
                        continue
            await asyncio.sleep(0.5)

    async def at_version(self, version: int, action: Callable[[], Awaitable[T]]) -> T | None:
        """Run `action`, a publish of a version that the ranks keep. They may train meanwhile. It is repeated if the
        ranks are lost. Returns None once no iteration needs the version any more."""
        if self._needed is None or version < self._needed or self._is_over(self._needed):
            self._needed = version
        while not self._is_over(version):
            try:
                if version not in self._group.versions and not self._lock.locked():
                    async with self._lock:
                        await self._bring(self._need_plan(), self._step)
                try:
                    # If the ranks are lost while they train, the caller that gave the command restores them.
                    async with asyncio.timeout(BACK_SECONDS):
                        await self._group.wait_version(version)
                except TimeoutError:
                    continue
                return await action()
            except TrainerLost as lost:
                self._log("trainers.recover", version=version, reason=str(lost))
        return None

    @property
    def keeps_versions(self) -> bool:
        """Whether the ranks keep older versions, and send them while they train (`at_version`)."""
        return self._lag > 0

    def can_send(self, version: int) -> bool:
        """Whether the ranks can send this version of the weights now. It is False if they must be restored first, or if
        one of them seems to be frozen."""
        if self._group.quiet:
            return False
        if self.keeps_versions:
            return version in self._group.versions
        return self._plan is not None and self._group.position == TrainerPosition(self._plan.stage, version)

    def need(self, version: int | None) -> None:
        """Set the oldest version that instances may ask for from now on. With None they may ask only for the newest."""
        self._needed = version

    # ------------------------------------------------------------ inner parts

    @property
    def _lag(self) -> int:
        return 0 if self._plan is None else self._plan.lag

    def _need_plan(self) -> StagePlan:
        if self._plan is None:
            raise RuntimeError("no stage has begun")
        return self._plan

    def _id(self, what: str) -> str:
        return f"{self._need_plan().stage.value}/{self._step}/{what}/{time.time_ns()}"

    def result_of(self, command_id: str) -> CommandResult:
        """The stored result of a command. It has no metrics if none is stored."""
        return self._stored(command_id) or CommandResult(id=command_id, ok=True)

    def _stored(self, command_id: str) -> CommandResult | None:
        record = self._records.get(f"result/{command_id}")
        return None if record is None else CommandResult.model_validate(record)

    async def _execute(self, command: Command) -> CommandResult:
        """Run a command. Raises TrainerLost if it takes much longer than such commands took so far, because a rank may
        wait for ever and use its CPU meanwhile."""
        kind = (self._need_plan().stage, command.kind, isinstance(command, Evaluate) and command.reference)
        longest, began = self._longest.get(kind), time.monotonic()
        limit = FIRST_SECONDS if longest is None else max(TIMES_LONGEST * longest, LEAST_SECONDS)
        result = await self._group.execute(command, max(limit, 10 * self._group.peer_timeout))
        # A command that was run before this coordinator started is answered at once.
        taken = max(time.monotonic() - began, result.metrics.get("seconds", 0.0))
        self._longest[kind] = max(longest or 0.0, taken)
        return result

    async def at_target(self, action: Callable[[], Awaitable[T]], step: int | None = None) -> T:
        """Run `action` (a publish) while the ranks hold the current step, or `step`. It is repeated if the ranks are
        lost."""
        step = self._step if step is None else step
        async with self._lock:
            while True:
                try:
                    await self._bring(self._need_plan(), step)
                    return await action()
                except TrainerLost as lost:
                    self._log("trainers.recover", step=step, reason=str(lost))

    def _is_over(self, version: int) -> bool:
        """Whether no remaining iteration is drawn with the version. The ranks may then have dropped it."""
        return version < self._step - self._lag

    def _lacks(self, position: TrainerPosition) -> bool:
        """Whether ranks that hold a step cannot provide the needed version, because they do not keep it and will not
        compute it."""
        plan, version = self._plan, self._needed
        if plan is None or position.stage is not plan.stage or not plan.lag:
            return False
        if version is None or self._is_over(version):
            return False
        return version <= position.step and version not in self._group.versions

    def _start(self, plan: StagePlan, step: int) -> tuple[int, str | None]:
        """The checkpoint from which to continue. It is the last one, or an older one if an older version is needed."""
        if not step:
            return 0, None
        saved, path = self.checkpoint(plan.stage)
        if not plan.lag or self._needed is None or self._is_over(self._needed) or saved <= self._needed:
            return saved, path
        older = [s for s in reversed(self._kept(plan.stage)) if s <= self._needed and plan.can_replay(s, step)]
        if older:
            return older[0], str(self._path(plan.stage, older[0]))
        if plan.can_replay(0, step):
            return 0, None
        raise TrainerError(
            f"version {self._needed} of the weights is needed, but the oldest checkpoint of stage {plan.stage.value} "
            f"is of a later step: put a copy of checkpoint {self._path(plan.stage, self._needed).name} back, or start "
            "a new run"
        )

    async def _bring(self, plan: StagePlan, step: int) -> None:
        """Load a checkpoint and repeat steps until the ranks hold (plan.stage, step). Raises TrainerLost."""
        while True:
            position = await self._group.wait_position(self._join_timeout)
            lacks = self._lacks(position)
            if position == TrainerPosition(plan.stage, step) and not lacks:
                return
            saved, path = self._start(plan, step)
            if position.stage != plan.stage or lacks or not saved <= position.step < step:
                load = Load(
                    id=self._id("load"),
                    stage=plan.stage,
                    models=plan.models,
                    total_steps=plan.total_optimizer_steps,
                    checkpoint=path,
                    run=self._run,
                    layouts=plan.layouts,
                    recompute=plan.recompute,
                    zero3=plan.zero3,
                    keep_versions=kept_versions(plan.lag),
                )
                self._log("trainers.load", stage=plan.stage.value, checkpoint_step=saved, target_step=step)
                if self.folders is not None:
                    await self.folders.check(ref.folder for ref in plan.models.values())
                try:
                    await self._execute(load)
                except CheckpointDamaged as damaged:
                    self._fall_back(plan, step, saved, str(damaged))
                continue
            self._log("trainers.replay", stage=plan.stage.value, step=position.step + 1)
            await self._execute(plan.make_step(position.step + 1))
