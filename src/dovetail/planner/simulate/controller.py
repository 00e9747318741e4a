"""The migration threshold of each iteration: scanned, kept while it is about as good as the best, or pinned."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dovetail.planner.simulate.profile import ProfileError, StageProfile
from dovetail.planner.simulate.stage import StagePrediction, ratio, scan
from dovetail.planner.workload import Ints, Lengths

# Of the batch (RLHFuse section 4.2).
SCANNED = tuple(k / 100 for k in range(5, 100, 5))
# A new choice must beat the one in use by this share of the stage, and fusion at all must save it.
HYSTERESIS = 0.01
# Random draws of the lengths that a choice is averaged over; fewer of larger batches: at most so many samples in all.
DRAWS = 8
DRAWN_SAMPLES = 2048

# A fraction of the batch (None: off), and whether destinations take what they have room for.
Choice = tuple[float | None, bool]
OFF: Choice = (None, False)
RECENT_ITERATIONS = 5


@dataclass(frozen=True)
class Decision:
    """`threshold`: unfinished samples at which the rest migrates; 0: none does, but free instances score; None: off.

    `prediction`: of one draw of the lengths; `serial_seconds` and `fused_seconds`: means of all draws.
    `scanned`: mean seconds of the stage by threshold as a share of the batch. `roomy`: destinations take what they have
    room for (`StageProfile.roomy`), where longer steps cost less than what a freed instance saves; else BS_max."""

    threshold: int | None
    fraction: float | None
    reason: str
    prediction: StagePrediction
    serial_seconds: float
    fused_seconds: float
    scanned: dict[float, float]
    roomy: bool = False

    @property
    def predicted_speedup(self) -> float:
        return ratio(self.serial_seconds, self.fused_seconds)


class ThresholdController:
    """One per job. `setting`: `plan.interStageFusion`, Auto, Off or a fraction of the batch. `max_tokens`: most
    response tokens. Lengths are drawn of those of the last few iterations."""

    def __init__(self, setting: Literal["Auto", "Off"] | float, max_tokens: int, seed: int = 0) -> None:
        if not isinstance(setting, str) and not 0 <= setting <= 1:
            raise ProfileError(f"spec.plan.interStageFusion is {setting}; it must be Auto, Off or between 0 and 1")
        self._setting = setting
        self._max_tokens = max_tokens
        self._seed = seed
        self._recent: deque[list[int]] = deque(maxlen=RECENT_ITERATIONS)
        self._decisions = 0
        self._current: Choice = OFF
        self._chosen = False

    def observe(self, response_lengths: Sequence[int]) -> None:
        """An iteration's measured response lengths, tokens."""
        if len(response_lengths):
            self._recent.append([int(n) for n in response_lengths])

    def decide(self, prompt_lengths: Sequence[int], profiles: Sequence[StageProfile]) -> Decision:
        """For an iteration with these prompts on these instances. Deterministic given what was observed before.

        Takes 1 s for 512 samples on 16 instances, 5 s for 10,000 on 256, more where both rules for destinations are
        played: not for an event loop's own thread.
        Raises ProfileError for numbers that cannot be."""
        count = len(prompt_lengths)
        choices = self._choices(profiles)
        thresholds = {choice: None if choice[0] is None else int(choice[0] * count) for choice in choices}
        rng = np.random.default_rng([self._seed, self._decisions])
        self._decisions += 1

        def played() -> dict[Choice, StagePrediction]:
            lengths = self._draw(count, rng).tolist()
            wanted, roomy = thresholds.values(), [choice[1] for choice in choices]
            found = scan(lengths, prompt_lengths, profiles, wanted, self._max_tokens, roomy=roomy)
            return dict(zip(choices, found, strict=True))

        draws = [played() for _ in range(min(DRAWS, max(1, DRAWN_SAMPLES // max(1, count))))]
        seconds = {choice: float(np.mean([draw[choice].fused_seconds for draw in draws])) for choice in choices}
        chosen, reason = self._choose(seconds)
        self._current, self._chosen = chosen, True
        scanned: dict[float, float] = {}
        for (fraction, _), each in seconds.items():
            if fraction is not None:
                scanned[fraction] = min(each, scanned.get(fraction, each))
        fused = seconds[chosen]
        return Decision(
            thresholds[chosen], chosen[0], reason, draws[0][chosen], seconds[OFF], fused, scanned, chosen[1]
        )

    def _draw(self, count: int, rng: np.random.Generator) -> Ints:
        """`count` lengths with replacement, of those measured, or else of the prior."""
        if not self._recent:
            return Lengths.long_tailed(self._max_tokens).draw(count, rng)
        return rng.choice(np.concatenate([np.asarray(r) for r in self._recent]), count)

    def _choices(self, profiles: Sequence[StageProfile]) -> list[Choice]:
        """Off, and what the setting allows. Whoever names a fraction has weighed longer steps against freed servers."""
        if not isinstance(self._setting, str):
            return [OFF, (self._setting, True)]
        if self._setting == "Off" or not profiles:
            return [OFF]
        found: list[Choice] = [OFF, (0.0, False), *((fraction, False) for fraction in SCANNED)]
        if any(p.bs_max < p.max_samples for p in profiles):
            found += [(fraction, True) for fraction in SCANNED]
        return found

    def _choose(self, seconds: dict[Choice, float]) -> tuple[Choice, str]:
        if self._setting == "Off":
            return OFF, "plan.interStageFusion is Off"
        if self._setting != "Auto":
            return (float(self._setting), True), "pinned by plan.interStageFusion"
        # The fewest migrations among equals.
        best = min(seconds, key=lambda c: (seconds[c], c[0] is not None, c[0] or 0.0, c[1]))
        known = f"lengths of {len(self._recent)} iterations" if self._recent else "prior lengths"
        current = self._current if self._chosen and self._current in seconds else OFF
        if seconds[current] <= min(seconds[OFF], seconds[best] + HYSTERESIS * seconds[OFF]):
            best = current
            why = "no threshold saves enough" if best == OFF else "the one in use is still about the best"
        else:
            why = "the best of those scanned"
        saved = 1 - 1 / ratio(seconds[OFF], seconds[best])
        return best, f"{why}, by {known}: {100 * saved:.0f}% of generation and inference saved"

    def as_json(self) -> dict[str, Any]:
        """What a coordinator that comes back needs to go on as if it had not died."""
        return {
            "recent": list(self._recent),
            "decisions": self._decisions,
            "current": self._current[0],
            "roomy": self._current[1],
            "chosen": self._chosen,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The reverse of `as_json`."""
        self._recent.clear()
        self._recent.extend([int(n) for n in lengths] for lengths in saved["recent"])
        self._decisions, self._chosen = saved["decisions"], saved["chosen"]
        self._current = saved["current"], saved.get("roomy", False)
