"""The migration threshold of each iteration: scanned, kept while it is about as good as the best, or pinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dovetail.planner.interstage.lengths import LengthHistory
from dovetail.planner.interstage.profile import ProfileError, StageProfile
from dovetail.planner.interstage.simulate import Prediction, ratio, scan

# Of the batch (RLHFuse section 4.2).
SCANNED = tuple(k / 100 for k in range(5, 100, 5))
# A new choice must beat the one in use by this share of the stage, and fusion at all must save it.
HYSTERESIS = 0.01
# Random draws of the lengths that a choice is averaged over; fewer of larger batches: at most so many samples in all.
DRAWS = 4
DRAWN_SAMPLES = 2048


@dataclass(frozen=True)
class Decision:
    """`threshold`: unfinished samples at which the rest migrates; 0: none does, but free instances score; None: off.

    `prediction`: of one draw of the lengths; `serial_seconds` and `fused_seconds`: means of all draws.
    `scanned`: mean seconds of the stage by threshold as a share of the batch."""

    threshold: int | None
    fraction: float | None
    reason: str
    prediction: Prediction
    serial_seconds: float
    fused_seconds: float
    scanned: dict[float, float]

    @property
    def predicted_speedup(self) -> float:
        return ratio(self.serial_seconds, self.fused_seconds)


class ThresholdController:
    """One per job. `setting`: `plan.interStageFusion`, Auto, Off or a fraction of the batch. `max_tokens`: most
    response tokens. `early`: see `simulate`."""

    def __init__(
        self, setting: Literal["Auto", "Off"] | float, max_tokens: int, seed: int = 0, early: bool = True
    ) -> None:
        if not isinstance(setting, str) and not 0 <= setting <= 1:
            raise ProfileError(f"spec.plan.interStageFusion is {setting}; it must be Auto, Off or between 0 and 1")
        self._setting = setting
        self._max_tokens = max_tokens
        self._seed = seed
        self._early = early
        self._history = LengthHistory(max_tokens)
        self._decisions = 0
        # Fraction in use; None: off.
        self._current: float | None = None
        self._chosen = False

    def observe(self, response_lengths: Sequence[int]) -> None:
        """An iteration's measured response lengths, tokens."""
        self._history.observe(response_lengths)

    def decide(self, prompt_lengths: Sequence[int], profiles: Sequence[StageProfile]) -> Decision:
        """For an iteration with these prompts on these instances. Deterministic given what was observed before.

        Takes 1 s for 512 samples on 16 instances, 5 s for 10,000 on 256: not for an event loop's own thread.
        Raises ProfileError for numbers that cannot be."""
        count = len(prompt_lengths)
        candidates: list[float | None] = [None]
        if self._setting == "Auto" and len(profiles) > 0:
            candidates += [0.0, *SCANNED] if self._early else SCANNED
        elif not isinstance(self._setting, str):
            candidates.append(self._setting)
        thresholds = [None if f is None else int(f * count) for f in candidates]
        rng = np.random.default_rng([self._seed, self._decisions])
        self._decisions += 1
        draws = [
            scan(
                self._history.draw(count, rng).tolist(),
                prompt_lengths,
                profiles,
                thresholds,
                self._max_tokens,
                self._early,
            )
            for _ in range(min(DRAWS, max(1, DRAWN_SAMPLES // max(1, count))))
        ]
        seconds = {f: float(np.mean([d[k].fused_seconds for d in draws])) for k, f in enumerate(candidates)}
        fraction, reason = self._choose(seconds)
        self._current, self._chosen = fraction, True
        k = candidates.index(fraction)
        return Decision(
            thresholds[k],
            fraction,
            reason,
            draws[0][k],
            seconds[None],
            seconds[fraction],
            {f: s for f, s in seconds.items() if f is not None},
        )

    def _choose(self, seconds: dict[float | None, float]) -> tuple[float | None, str]:
        if self._setting == "Off":
            return None, "plan.interStageFusion is Off"
        if self._setting != "Auto":
            return float(self._setting), "pinned by plan.interStageFusion"
        # The fewest migrations among equals.
        best = min(seconds, key=lambda f: (seconds[f], f is not None, f or 0.0))
        known = f"lengths of {self._history.iterations} iterations" if self._history.iterations else "prior lengths"
        current = self._current if self._chosen else None
        if seconds[current] <= min(seconds[None], seconds[best] + HYSTERESIS * seconds[None]):
            best = current
            why = "no threshold saves enough" if best is None else "the one in use is still about the best"
        else:
            why = "the best of those scanned"
        saved = 1 - 1 / ratio(seconds[None], seconds[best])
        return best, f"{why}, by {known}: {100 * saved:.0f}% of generation and inference saved"

    def as_json(self) -> dict[str, Any]:
        """What a coordinator that comes back needs to go on as if it had not died."""
        return {
            "recent": self._history.as_json(),
            "decisions": self._decisions,
            "current": self._current,
            "chosen": self._chosen,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The reverse of `as_json`."""
        self._history.restore(saved["recent"])
        self._decisions, self._current, self._chosen = saved["decisions"], saved["current"], saved["chosen"]
