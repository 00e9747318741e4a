"""Chooses the migration threshold of each iteration (RLHFuse section 4). A threshold stays in use while it is about as
good as the best.

    controller = ThresholdController(setting, max_tokens)       # one per job; setting as in plan.interStageFusion
    decision = controller.decide(prompt_lengths, profiles)      # before an iteration; profiles: one per rollout
    ...                                                         # at decision.threshold remaining samples:
    plan = plan_migration(unfinished, profiles_by_name, kv_per_sample)
    controller.observe(response_lengths)                        # after the iteration

`decision.prediction` is the prediction of `dovetail.fusion.stage.scan`. Times are seconds and lengths are
tokens. Everything is deterministic."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dovetail.fusion.lengths import Lengths
from dovetail.fusion.profile import ProfileError, StageProfile
from dovetail.fusion.stage import StagePrediction, ratio, scan

# The thresholds that are tried, as fractions of the batch (RLHFuse section 4.2).
SCANNED = tuple(k / 100 for k in range(5, 100, 5))
# A new choice must save this fraction of the stage over the one in use. Any choice must save it over no fusion.
HYSTERESIS = 0.01
# A choice is averaged over this many random draws of the lengths. For large batches there are fewer draws, so that they
# have no more than DRAWN_SAMPLES samples in all.
DRAWS = 8
DRAWN_SAMPLES = 2048

# A threshold as a fraction of the batch, or None if fusion is off, and `Decision.roomy`.
Choice = tuple[float | None, bool]
OFF: Choice = (None, False)
RECENT_ITERATIONS = 5


@dataclass(frozen=True)
class Decision:
    """The decision for one iteration. When `threshold` unfinished samples are left, they migrate. If it is 0, none
    migrates, but free instances score. If it is None, fusion is off. `fraction` is the threshold as a fraction of the
    batch.

    `prediction` is the stage with one draw of the lengths. `serial_seconds` and `fused_seconds` are means of all draws.
    `scanned` has the mean seconds of the stage, by threshold as a fraction of the batch. If `roomy` is True, a
    destination takes as many samples as it has room for (`StageProfile.roomy`), because longer decode steps cost less
    than a freed instance saves. Otherwise it takes at most BS_max."""

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
    """A job has one controller. `setting` is `plan.interStageFusion`, which is Auto, Off or a fraction of the batch. A
    response has at most `max_tokens` tokens. Lengths are drawn from those of the last RECENT_ITERATIONS iterations.

    Raises ProfileError for a fraction that is not between 0 and 1."""

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
        """Remember the measured response lengths of an iteration, in tokens. A discarded episode, which has 0, is no
        measure."""
        if known := [int(n) for n in response_lengths if n > 0]:
            self._recent.append(known)

    def decide(self, prompt_lengths: Sequence[int], profiles: Sequence[StageProfile]) -> Decision:
        """The decision for an iteration with these prompts on these instances. It is deterministic, given what was
        observed before. `prompt_lengths` has the tokens of each sample's prompt. `profiles` has one profile for each
        instance.

        It takes 1 s for 512 samples on 16 instances and 5 s for 10,000 on 256. It takes longer if both rules for
        destinations are simulated. So it must not run in an event loop's own thread. Raises ProfileError for numbers
        that are impossible."""
        count = len(prompt_lengths)
        choices = self._choices(profiles)
        thresholds = {choice: None if choice[0] is None else int(choice[0] * count) for choice in choices}
        rng = np.random.default_rng([self._seed, self._decisions])
        self._decisions += 1

        def played() -> dict[Choice, StagePrediction]:
            lengths = self._draw(count, rng)
            wanted, roomy = thresholds.values(), [choice[1] for choice in choices]
            found = scan(
                lengths,
                prompt_lengths,
                profiles,
                wanted,
                self._max_tokens,
                roomy=roomy,
            )
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

    def _draw(self, count: int, rng: np.random.Generator) -> Sequence[int]:
        """Draw `count` lengths in tokens. They are drawn with replacement from the measured ones, or from the prior if
        none were measured."""
        if not self._recent:
            return Lengths.long_tailed(self._max_tokens).at(rng.standard_normal(count).tolist())
        drawn: list[int] = rng.choice(np.concatenate([np.asarray(r) for r in self._recent]), count).tolist()
        return drawn

    def _choices(self, profiles: Sequence[StageProfile]) -> list[Choice]:
        """Off, and the choices that the setting allows. A user who names a fraction accepts longer decode steps, so the
        destinations are roomy then."""
        if not isinstance(self._setting, str):
            return [OFF, (self._setting, True)]
        if self._setting == "Off" or not profiles:
            return [OFF]
        found: list[Choice] = [OFF, (0.0, False)]
        if len(profiles) == 1:  # nothing can migrate
            return found
        found += [(fraction, False) for fraction in SCANNED]
        if any(p.bs_max < p.max_samples for p in profiles):
            found += [(fraction, True) for fraction in SCANNED]
        return found

    def _choose(self, seconds: dict[Choice, float]) -> tuple[Choice, str]:
        if self._setting == "Off":
            return OFF, "plan.interStageFusion is Off"
        if self._setting != "Auto":
            return (float(self._setting), True), "pinned by plan.interStageFusion"
        # Of equal choices, the one with the fewest migrations is taken.
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
        """The state that a restarted coordinator needs to go on as before."""
        return {
            "recent": list(self._recent),
            "decisions": self._decisions,
            "current": self._current[0],
            "roomy": self._current[1],
            "chosen": self._chosen,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `as_json` returned."""
        self._recent.clear()
        self._recent.extend([int(n) for n in lengths] for lengths in saved["recent"])
        self._decisions, self._chosen = saved["decisions"], saved["chosen"]
        self._current = saved["current"], saved.get("roomy", False)
