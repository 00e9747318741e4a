"""Checks whether iterations take as long as the plan predicts. If they do not, it corrects what is expected of the next
ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from dovetail.protocol.prediction import MEASURED_NAMES

# A plan is wrong when ITERATIONS iterations in a row differ from the expected time by more than the fraction TOLERANCE.
# It is right again when as many in a row do not differ.
TOLERANCE = 0.25
ITERATIONS = 3


@dataclass(frozen=True)
class Expected:
    """The expected seconds of an iteration and of each phase, by the coordinator's phase names. `measured` says whether
    they come from measurements and not from the plan."""

    seconds: float
    phases: Mapping[str, float]
    measured: bool = False

    @classmethod
    def predicted(cls, seconds: float, phases: Mapping[str, float]) -> Expected:
        """The expectation from a plan's prediction, in seconds."""
        return cls(seconds, {MEASURED_NAMES.get(name, name): value for name, value in phases.items()})


def off(expected: float, measured: float, tolerance: float = TOLERANCE) -> bool:
    """Whether an iteration of `measured` seconds differs from `expected` seconds by more than the fraction
    `tolerance`."""
    return abs(measured - expected) > tolerance * expected


class PlanCheck:
    """Compares each iteration with the expected time. After ITERATIONS wrong ones in a row, their median becomes the
    expected time. `problem` then says what was wrong, until as many iterations in a row take the expected time."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.problem: str | None = None
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=ITERATIONS)

    def observe(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Record that an iteration took `seconds` seconds. `phases` has the seconds of each phase."""
        wrong = off(self.expected.seconds, seconds)
        if self._recent and wrong != off(self.expected.seconds, self._recent[-1][0]):
            self._recent.clear()
        self._recent.append((seconds, phases))
        if len(self._recent) < ITERATIONS:
            return
        if wrong:
            found = Expected(
                median(s for s, _ in self._recent),
                {name: median(p.get(name, 0.0) for _, p in self._recent) for name in phases},
                measured=True,
            )
            self.problem = sentence(self.expected, found)
            self.expected = found
            self._recent.clear()
        else:
            self.problem = None


def sentence(expected: Expected, found: Expected) -> str:
    """One sentence that says by how much the times differ, and in which phase most."""
    change = found.seconds / expected.seconds - 1 if expected.seconds else float("inf")
    said = "measured before" if expected.measured else "predicted"
    text = (
        f"an iteration takes {found.seconds:.3g} s, {abs(change):.0%} {'more' if change > 0 else 'less'} than the "
        f"{expected.seconds:.3g} s {said}"
    )
    gaps = {name: found.phases.get(name, 0.0) - expected.phases.get(name, 0.0) for name in found.phases}
    if gaps:
        most = max(gaps, key=lambda name: abs(gaps[name]))
        before, now = expected.phases.get(most, 0.0), found.phases.get(most, 0.0)
        text += f", most of it in {most}: {now:.3g} s instead of {before:.3g} s"
    return f"{text}; the measured times are expected from now on"
