"""Many iterations whose samples are made while the trainers learn (`ppo.lag`), played event by event on two lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# At least so many iterations are played. The first half brings the lanes into step, and does not count.
PLAYED = 256


@dataclass(frozen=True)
class Parts:
    """One iteration. `samples` and `training`: seconds by name, in order, of what rollouts with their scorers do, and
    of what the trainers' lane does; each as if the other lane stood still.

    `idle`: of the seconds of `samples`, how many a rollout has nothing to do, mean over the rollouts. `cores`: what
    each lane keeps busy of a machine that both share; (0, 0) where they share none."""

    samples: Mapping[str, float]
    training: Mapping[str, float]
    idle: float = 0.0
    cores: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Of the iteration, if its parts follow each other."""
        return sum(self.samples.values()) + sum(self.training.values())


@dataclass(frozen=True)
class Lanes:
    """Iterations of a job, drawn at random: `synchronous` as they are without a lag, `lagged` with one. `cores`: of the
    machine that trainers and rollouts share; None: they share nothing."""

    synchronous: Sequence[Parts]
    lagged: Sequence[Parts]
    cores: int | None = None

    def steady(self, lag: int) -> Steady:
        """A mean iteration with the lag."""
        return steady(self.lagged if lag else self.synchronous, lag, self.cores)


@dataclass(frozen=True)
class Steady:
    """A mean iteration of a job that runs for long. `trainer_idle`: share of the time in which the trainers do not
    train; `rollout_idle`: in which a rollout neither takes weights nor generates nor scores, mean over the rollouts.
    `phases`: seconds by name, which overlap; `waiting`: the trainers have no samples to learn from."""

    lag: int
    seconds: float
    trainer_idle: float
    rollout_idle: float
    phases: Mapping[str, float]


class _Lane:
    """Works off the parts of one iteration after another."""

    def __init__(self, iterations: Sequence[tuple[Mapping[str, float], float]]) -> None:
        """`iterations`: their parts, and the cores they keep busy."""
        self._iterations = iterations
        self.done = 0
        self.cores = 0.0
        self._parts: list[tuple[str, float]] = []

    @property
    def working(self) -> bool:
        return bool(self._parts)

    def begin(self) -> None:
        """The next iteration."""
        parts, self.cores = self._iterations[self.done % len(self._iterations)]
        # Without any part an iteration could not end.
        self._parts = [part for part in reversed(list(parts.items())) if part[1] > 0] or [("nothing", 0.0)]

    @property
    def part(self) -> str:
        return self._parts[-1][0]

    @property
    def left(self) -> float:
        """Seconds of the part under way."""
        return self._parts[-1][1]

    def advance(self, seconds: float, ended: bool) -> None:
        name, left = self._parts.pop()
        if not ended:
            self._parts.append((name, left - seconds))
        elif not self._parts:
            self.done += 1


def steady(iterations: Sequence[Parts], lag: int, cores: int | None = None) -> Steady:
    """What a mean iteration takes with `lag`, when such `iterations` come again and again."""
    rounds = len(iterations) * -(-PLAYED // len(iterations))
    return play(iterations, lag, cores, rounds // 2 + 1, rounds, rounds + lag)


def play(iterations: Sequence[Parts], lag: int, cores: int | None, first: int, last: int, total: int) -> Steady:
    """A mean iteration of those from `first` to `last`, which count from 1, in a job of `total` iterations. They are
    the given ones, again and again.

    The samples of an iteration are made once those of the iteration before are scored, and once the trainers have
    finished the iteration whose weights they are drawn with, which is lag + 1 iterations before. The trainers begin
    once the samples are scored. `cores`: of the machine that both lanes share; None: they share nothing."""
    samples = _Lane([(each.samples, each.cores[0]) for each in iterations])
    training = _Lane([(each.training, each.cores[1]) for each in iterations])
    idle = [each.idle / sum(each.samples.values()) if each.idle else 0.0 for each in iterations]
    spent: dict[str, float] = {}
    seconds = resting = 0.0
    while training.done < last:
        if not samples.working and samples.done < total and samples.done <= training.done + lag:
            samples.begin()
        if not training.working and training.done < samples.done:
            training.begin()
        lanes = [lane for lane in (samples, training) if lane.working]
        slower = max(1.0, sum(lane.cores for lane in lanes) / cores) if cores and len(lanes) > 1 else 1.0
        step = min(lane.left for lane in lanes)
        taken = step * slower
        if training.done >= first - 1:
            seconds += taken
            for lane in lanes:
                spent[lane.part] = spent.get(lane.part, 0.0) + taken
            if not training.working:
                spent["waiting"] = spent.get("waiting", 0.0) + taken
            resting += taken * (idle[samples.done % len(idle)] if samples.working else 1.0)
        for lane in lanes:
            lane.advance(step, lane.left == step)
    count = last - first + 1
    phases = {name: value / count for name, value in spent.items() if name != "nothing"}
    return Steady(
        lag,
        seconds / count,
        # Sums of the same parts in another order differ by rounding.
        max(0.0, 1 - spent.get("training", 0.0) / seconds) if seconds else 0.0,
        min(1.0, resting / seconds) if seconds else 0.0,
        phases,
    )
