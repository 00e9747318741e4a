"""The schedules of the steps of an SFT, reward or DPO stage."""

from __future__ import annotations

from typing import Any

from dovetail.coordinator.schedules.scheduling import Scheduling


class StageSchedules(Scheduling):
    """The schedules of a stage's steps. The store keeps the first step of each schedule, so a step that is run again
    has the same one."""

    async def decide(self, step: int) -> None:
        """Decide the schedule of a step that has not run yet. Raises what a finished search raised."""
        known = self._known()
        current = await self.current()
        if current is not None and (not known or known[-1][1] != current.as_json()):
            self._records.put(self._key, [*(each for each in known if each[0] < step), [step, current.as_json()]])

    def of(self, step: int) -> dict[str, Any] | None:
        """The schedule that was decided for a step, as `StoredSchedule.as_json` makes it. None stands for the serial
        one."""
        return next((schedule for first, schedule in reversed(self._known()) if first <= step), None)

    @property
    def _key(self) -> str:
        return f"{self._stage.value}/schedules"

    def _known(self) -> list[tuple[int, dict[str, Any]]]:
        return [(int(first), schedule) for first, schedule in self._records.get(self._key) or []]
