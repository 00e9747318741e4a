"""Computes the progress of a job, and estimates the remaining time from its last steps. It does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import mean, median
from typing import Any

from dovetail.manifest.types import Stage

# The estimate uses the mean time of this many last steps.
STEPS = 20
# Steps that took this many times the median do not count.
RARELY = 10.0
# These phases are between two iterations.
_BETWEEN = (None, "export", "checkpoint", "evaluation")


def position(status: Mapping[str, Any]) -> tuple[Stage, int, int] | None:
    """The stage of a status document, the number of its finished steps (iterations in PPO), and their total. None
    before the first stage and for unknown stages."""
    try:
        stage = Stage(status.get("stage") or "")
    except ValueError:
        return None
    if stage is not Stage.PPO:
        return stage, int(status.get("step") or 0), int(status.get("total_steps") or 0)
    iteration, total = int(status.get("iteration") or 0), int(status.get("total_iterations") or 0)
    # The status names an iteration from its first phase on, but it is not finished then. After its training, `phase` is
    # null.
    done = iteration if status.get("phase") in _BETWEEN else max(0, iteration - 1)
    return stage, done, total


class TimeLeft:
    """Estimates from finished steps how long the rest of the stage will take."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._total = 0
        self._seen: deque[tuple[int, float]] = deque(maxlen=STEPS + 1)

    def see(self, stage: Stage, done: int, total: int, now: float) -> None:
        """Record that `done` steps of `total` are finished at `now`, in monotonic seconds."""
        if stage is not self._stage or (self._seen and done < self._seen[-1][0]):
            self._stage = stage
            self._seen.clear()
        self._total = total
        if not self._seen or done > self._seen[-1][0]:
            self._seen.append((done, now))

    def left(self, now: float) -> float | None:
        """The seconds until the stage's last step is finished. None until two steps have been finished after the first
        entry."""
        # The time until the end of the first step includes work that is done only once, such as compiling.
        steps = list(pairwise(list(self._seen)[1:]))
        if not steps:
            return None
        times = [(ended - begun) / (last - first) for (first, begun), (last, ended) in steps]
        # A step that took far longer than the others includes something else, such as the time until a resume.
        usual = RARELY * median(times)
        each = mean(seconds for seconds in times if seconds <= usual)
        last, ended = self._seen[-1]
        return max(0.0, (self._total - last) * each - max(0.0, now - ended))
