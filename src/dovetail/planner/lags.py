"""Predicts iterations with several lags (`ppo.lag`), and chooses the lag of a job. Rollouts and scorers make samples
while the trainers train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.manifest.training_types import AUTO_LAG
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.prediction import PredictedLag, Prediction

# The least number of simulated iterations. The first half does not count: samples and training are not in step yet.
PLAYED = 256
TAIL = "tail"


@dataclass(frozen=True)
class Parts:
    """The times of one iteration. `samples`: the seconds of what rollouts and scorers do, by name and in order.
    `training`: the same for the trainers. Both are measured as if the others did nothing.

    `idle`: the seconds of `samples` in which a rollout has nothing to do, as the mean over the rollouts. `cores`: the
    cores that the samples and the training keep busy if both share a machine, or (0, 0).

    `tail`: the seconds at the end of `generation` in which at most half of the servers are needed. The others can begin
    the next iteration then. `kept`: the fraction of all servers' time that this iteration takes in its tail."""

    samples: Mapping[str, float]
    training: Mapping[str, float]
    idle: float = 0.0
    cores: tuple[float, float] = (0.0, 0.0)
    tail: float = 0.0
    kept: float = 0.0

    def in_order(self) -> Iterator[tuple[str, float]]:
        """The names and seconds of the parts of `samples`. The tail of generation is a part of its own."""
        for name, seconds in self.samples.items():
            if name == "generation":
                yield name, seconds - min(self.tail, seconds)
                yield TAIL, min(self.tail, seconds)
            else:
                yield name, seconds


@dataclass(frozen=True)
class DrawnIterations:
    """Iterations of a job that were drawn at random, without a lag (`synchronous`) and with one (`lagged`). `cores`:
    the number of cores of the machine that trainers and rollouts share. None: they share no machine."""

    synchronous: Sequence[Parts]
    lagged: Sequence[Parts]
    cores: int | None = None

    def steady(self, lag: int) -> Steady:
        """The mean iteration with this lag, of a job that repeats these iterations again and again."""
        iterations = self.lagged if lag else self.synchronous
        rounds = len(iterations) * -(-PLAYED // len(iterations))
        return play(iterations, lag, self.cores, rounds // 2 + 1, rounds, rounds + lag)


@dataclass(frozen=True)
class Steady:
    """The mean iteration of a job that runs for long. `trainer_idle`: the fraction of the time in which the trainers do
    not train. `rollout_idle`: the fraction in which a rollout neither takes weights nor generates nor scores, as the
    mean over the rollouts. `phases`: seconds by name; they overlap. In `waiting` the trainers have no samples."""

    lag: int
    seconds: float
    trainer_idle: float
    rollout_idle: float
    phases: Mapping[str, float]


Left = list[tuple[str, float]]
"""The parts that are left of an iteration's samples or of its training: names and seconds, in order."""


def play(iterations: Sequence[Parts], lag: int, cores: int | None, first: int, last: int, total: int) -> Steady:
    """Simulates a job of `total` iterations, which repeats the given ones. Returns the mean of the iterations `first`
    to `last`, which count from 1.

    The samples of an iteration begin when servers are free (`Parts.tail`) and the trainers have finished the iteration
    whose weights the samples are drawn with. That is the one lag + 1 iterations before. The trainers begin when the
    samples are scored. `cores`: see `DrawnIterations`. If all processes share cores, an iteration's last servers get
    the cores of the others, so only one iteration is drawn at a time."""
    after = (TAIL, "inference") if cores is None else ()
    drawn, training = list[Left](), Left()  # `drawn`: of the iterations `done`, `done` + 1, ...
    begun = done = learnt = 0
    spent: dict[str, float] = {}
    seconds = resting = 0.0
    while learnt < last:
        while drawn and not drawn[0]:
            drawn.pop(0)
            done += 1
        while begun < min(total, learnt + lag + 1) and all(left and left[0][0] in after for left in drawn):
            drawn.append([part for part in iterations[begun % len(iterations)].in_order() if part[1] > 0])
            begun += 1
        mine, oldest = (iterations[number % len(iterations)] for number in (learnt, done))
        if not training and learnt < done:
            training = [part for part in mine.training.items() if part[1] > 0]
            if not training:
                learnt += 1
                continue
        kept = [iterations[(done + at) % len(iterations)].kept for at in range(len(drawn))]
        beside = _speeds(drawn, kept)
        works = [*beside, *([(training, 1.0)] if training else [])]
        slower = 1.0
        if cores and beside and training:
            slower = max(1.0, (oldest.cores[0] + mine.cores[1]) / cores)
        step = min(left[0][1] / speed for left, speed in works)
        if learnt >= first - 1:
            taken = step * slower
            seconds += taken
            for name in [left[0][0] for left, _ in works] + ([] if training else ["waiting"]):
                name = "generation" if name == TAIL else name
                spent[name] = spent.get(name, 0.0) + taken
            idle = oldest.idle / sum(oldest.samples.values()) if oldest.idle else 0.0
            resting += taken * (idle if len(drawn) == 1 else float(not drawn))
        busy = bool(training)
        for left, speed in works:
            (name, alone), *rest = left
            left[:] = rest if alone / speed == step else [(name, alone - step * speed), *rest]
        learnt += busy and not training
    count = last - first + 1
    return Steady(
        lag,
        seconds / count,
        # Sums of the same numbers in another order differ by rounding, so the difference may be below 0.
        max(0.0, 1 - spent.get("training", 0.0) / seconds) if seconds else 0.0,
        min(1.0, resting / seconds) if seconds else 0.0,
        {name: value / count for name, value in spent.items()},
    )


def _speeds(drawn: Sequence[Left], kept: Sequence[float]) -> list[tuple[Left, float]]:
    """The iterations whose samples make progress, each with its speed: the fraction of the servers that older ones
    leave to it. Scoring takes all devices, and iterations are scored in their order. `kept`: `Parts.kept` of each."""
    found, free = list[tuple[Left, float]](), 1.0
    for at, left in enumerate(drawn):
        part = left[0][0] if left else None
        if part == "inference":
            free = 0.0
            if at == 0:
                found.append((left, 1.0))
        elif part in (TAIL, "generation"):
            if free > 0:
                found.append((left, free))
                free *= 1 - kept[at] if part == TAIL else 0.0
        elif part is not None:
            found.append((left, 1.0))
    return found


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


def with_lags(
    found: Prediction, why_not: str | None, lag: int, draw: Callable[[], DrawnIterations] | None
) -> Prediction:
    """Adds the predictions of several lags to `found`, the prediction of a synchronous iteration. Seconds and phases
    become those of `lag`. If `lag` is 0 they stay as they are.

    `why_not`: why the job cannot have a lag, or None. `draw()`: draws iterations of the job at random. It is None if
    the placement cannot be simulated."""
    if draw is None:
        return found
    if why_not is not None:
        rows = [PredictedLag(lag=0, iteration_seconds=found.iteration_seconds)]
        rows += [PredictedLag(lag=each, problem=why_not) for each in SHOWN[1:]]
        return found.model_copy(update={"lags": rows, "best_lag_reason": f"the job cannot have a lag: {why_not}"})
    drawn = draw()
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
