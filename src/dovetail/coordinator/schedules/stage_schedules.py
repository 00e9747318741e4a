"""The schedules of the steps of an SFT, reward or DPO stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.coordinator.schedules.scheduling import ScheduleRecords, Scheduling
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import CommandResult
from dovetail.protocol.plan import Layout, Plan


class StageSchedules:
    """The store keeps from which step on each schedule runs, so a step that is run again has the same one."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        plan: Plan,
        records: ScheduleRecords,
        run_dir: Path,
        log: Callable[..., None],
        stage: Stage,
    ) -> None:
        self._scheduling = Scheduling(spec, plan, records, run_dir, log, stage)
        self._records, self._key = records, f"{stage.value}/schedules"

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of the stage's model."""
        return self._scheduling.layouts

    async def begin(self) -> None:
        """Choose the first schedule. Raises ProblemError if none fits."""
        await self._scheduling.begin()

    async def decide(self, step: int) -> None:
        """Decide the schedule of a step that has not run yet. Raises what a finished search raised."""
        known = self._known()
        current = await self._scheduling.current()
        if current is not None and (not known or known[-1][1] != current.as_json()):
            self._records.put(self._key, [*(each for each in known if each[0] < step), [step, current.as_json()]])

    def of(self, step: int) -> dict[str, Any] | None:
        """The schedule that was decided for a step, as `StoredSchedule.as_json` makes it. None: the serial one."""
        return next((schedule for first, schedule in reversed(self._known()) if first <= step), None)

    def learn(self, result: CommandResult) -> None:
        """Take a step's measurements (`Scheduling.learn`)."""
        self._scheduling.learn(result)

    async def close(self) -> None:
        """Wait for a search that is running. Raises what it raised."""
        await self._scheduling.close()

    def _known(self) -> list[tuple[int, dict[str, Any]]]:
        return [(int(first), schedule) for first, schedule in self._records.get(self._key) or []]
