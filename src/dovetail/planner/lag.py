"""Predicts iterations with several lags (`ppo.lag`), and chooses the lag of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.manifest.training_types import AUTO_LAG
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.simulate.lanes import Lanes
from dovetail.protocol.prediction import PredictedLag, Prediction

COLOCATED = "a group has both roles, trainer and rollout, whose processes take turns on a GPU"
# These lags are always shown.
SHOWN = (0, 1, 2)
# The smallest lag is taken whose iterations take at most this fraction longer than the shortest.
NEAR = 0.03


def excluded(spec: RLHFJobSpec) -> str | None:
    """Why the job cannot have a lag, as a sentence without a full stop. None if it can have one.

    The manifest's rules refuse a lag for the same reasons. They also choose `ppo.oldLogProbs` if `ppo.lag` is a number,
    so it is checked here only if `ppo.lag` is Auto."""
    if any(group.colocated for group in spec.groups):
        return COLOCATED
    if spec.ppo.dynamic_sampling:
        return "spec.ppo.dynamicSampling draws further rounds with the same weights, when the earlier ones are scored"
    if spec.ppo.lag == AUTO_LAG and spec.ppo.old_log_probs == "Rollout":
        return "spec.ppo.oldLogProbs is Rollout, which needs samples of the newest weights"
    return None


def with_lags(found: Prediction, why_not: str | None, lag: int, lanes: Callable[[], Lanes] | None) -> Prediction:
    """Adds the predictions of several lags to `found`, the prediction of a synchronous iteration. Seconds and phases
    become those of `lag`. If `lag` is 0 they stay as they are.

    `why_not`: why the job cannot have a lag, or None. `lanes()`: draws iterations of the job at random. It is None if
    the placement cannot be simulated."""
    if lanes is None:
        return found
    if why_not is not None:
        rows = [PredictedLag(lag=0, iteration_seconds=found.iteration_seconds)]
        rows += [PredictedLag(lag=each, problem=why_not) for each in SHOWN[1:]]
        return found.model_copy(update={"lags": rows, "best_lag_reason": f"the job cannot have a lag: {why_not}"})
    drawn = lanes()
    steady = {each: drawn.steady(each) for each in sorted({*SHOWN, lag})}
    rows = [
        PredictedLag(
            lag=each.lag,
            iteration_seconds=each.seconds if each.lag else found.synchronous_seconds,
            trainer_idle=max(0.0, each.trainer_idle),  # rounding may make it slightly negative
            rollout_idle=max(0.0, each.rollout_idle),
        )
        for each in steady.values()
    ]
    best, reason = choose(rows)
    found = found.model_copy(update={"lags": rows, "best_lag": best, "best_lag_reason": reason})
    if lag == 0:
        return found
    mine = steady[lag]
    phases = {name: mine.phases[name] for name in (*found.phases, "waiting") if name in mine.phases}
    return found.lasting(mine.seconds, lag=lag, phases=phases)


def choose(rows: Sequence[PredictedLag]) -> tuple[int, str]:
    """The smallest lag whose iterations take at most NEAR longer than the shortest, and the reason as a sentence
    without a full stop. `rows`: the predictions by lag; lag 0 comes first."""
    known = [(row.lag, row.iteration_seconds) for row in rows if row.iteration_seconds is not None]
    shortest = min(seconds for _, seconds in known)
    lag, seconds = next((lag, seconds) for lag, seconds in known if seconds <= (1 + NEAR) * shortest)
    if lag == 0:
        return 0, f"no lag makes an iteration more than {NEAR:.0%} shorter"
    saved = 1 - seconds / known[0][1]
    more = "" if lag == known[-1][0] else f"; a larger lag saves at most {NEAR:.0%} more"
    return lag, f"an iteration takes {saved:.0%} less time than without a lag{more}"


def chosen(spec: RLHFJobSpec, synchronous: Prediction | None) -> tuple[int, str]:
    """The lag of a job whose `ppo.lag` is Auto, and the reason. `synchronous`: the prediction of the job without a
    lag, as `with_lags` returns it; None if nothing is predicted."""
    if (why_not := excluded(spec)) is not None:
        return 0, f"the job cannot have a lag: {why_not}"
    if synchronous is None:
        return 0, "nothing is predicted for this job, so nothing tells what a lag would gain"
    return synchronous.best_lag, synchronous.best_lag_reason
