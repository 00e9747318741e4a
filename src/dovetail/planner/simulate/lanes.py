"""Many iterations whose samples are made while the trainers learn (`ppo.lag`), played event by event on two lanes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# At least so many iterations are played. The first half brings the lanes into step, and does not count.
PLAYED = 256
TAIL = "tail"


@dataclass(frozen=True)
class Parts:
    """One iteration. `samples` and `training`: seconds by name, in order, of what rollouts with their scorers do, and
    of what the trainers' lane does; each as if the other lane stood still.

    `idle`: of the seconds of `samples`, how many a rollout has nothing to do, mean over the rollouts. `cores`: what
    each lane keeps busy of a machine that both share; (0, 0) where they share none.

    `tail`: seconds at the end of `generation` in which at most half of the servers are needed, so that the others can
    begin the next iteration; `kept`: the share of all servers' time that this iteration takes then."""

    samples: Mapping[str, float]
    training: Mapping[str, float]
    idle: float = 0.0
    cores: tuple[float, float] = (0.0, 0.0)
    tail: float = 0.0
    kept: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the iteration, if its parts follow each other."""
        return sum(self.samples.values()) + sum(self.training.values())

    def in_order(self) -> Iterator[tuple[str, float]]:
        """The parts of `samples`, with the tail of generation as one of its own."""
        for name, seconds in self.samples.items():
            if name == "generation":
                yield name, seconds - min(self.tail, seconds)
                yield TAIL, min(self.tail, seconds)
            else:
                yield name, seconds


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


class _Work:
    """The parts of one iteration that one lane has still to do."""

    def __init__(self, parts: Iterable[tuple[str, float]]) -> None:
        self._parts = [part for part in reversed(list(parts)) if part[1] > 0]

    @property
    def part(self) -> str | None:
        """What is done now; None: all is done."""
        return self._parts[-1][0] if self._parts else None

    @property
    def left(self) -> float:
        """Seconds of the part under way."""
        return self._parts[-1][1]

    def advance(self, seconds: float, ended: bool) -> None:
        name, left = self._parts.pop()
        if not ended:
            self._parts.append((name, left - seconds))


class _Samples:
    """The lane of rollouts and scorers: iterations of which servers and scorers may work on several."""

    def __init__(self, iterations: Sequence[Parts], alone: bool) -> None:
        """`alone`: where all share cores, an iteration's last servers get those of the others, so nothing is gained by
        beginning the next one."""
        self._iterations, self._alone = iterations, alone
        self.done = 0
        self.begun = 0
        self._open: list[_Work] = []

    def begin(self, through: int) -> None:
        """Begin the iterations before number `through` for which servers are free."""
        after = () if self._alone else (TAIL, "inference")
        while self.begun < through and all(work.part in after for work in self._open):
            self._open.append(_Work(self._of(self.begun).in_order()))
            self.begun += 1

    def active(self) -> list[tuple[_Work, float]]:
        """Those that get on, each with its speed: the share of the servers that older iterations leave it. Scoring
        takes all devices, and iterations are scored in their order."""
        found, free = list[tuple[_Work, float]](), 1.0
        for at, work in enumerate(self._open):
            if work.part == "inference":
                free = 0.0
                if at == 0:
                    found.append((work, 1.0))
            elif work.part not in (TAIL, "generation"):
                found.append((work, 1.0))
            elif free > 0:
                found.append((work, free))
                free *= 1 - self._of(self.done + at).kept if work.part == TAIL else 0.0
        return found

    def idle(self) -> float:
        """The share of the rollouts that have nothing to do."""
        if len(self._open) != 1:
            return 0.0 if self._open else 1.0
        parts = self._of(self.done)
        return parts.idle / sum(parts.samples.values()) if parts.idle else 0.0

    @property
    def cores(self) -> float:
        return self._of(self.done).cores[0] if self._open else 0.0

    def close(self) -> None:
        """Take off what is scored."""
        while self._open and self._open[0].part is None:
            self._open.pop(0)
            self.done += 1

    def _of(self, number: int) -> Parts:
        return self._iterations[number % len(self._iterations)]


def steady(iterations: Sequence[Parts], lag: int, cores: int | None = None) -> Steady:
    """What a mean iteration takes with `lag`, when such `iterations` come again and again."""
    rounds = len(iterations) * -(-PLAYED // len(iterations))
    return play(iterations, lag, cores, rounds // 2 + 1, rounds, rounds + lag)


def play(iterations: Sequence[Parts], lag: int, cores: int | None, first: int, last: int, total: int) -> Steady:
    """A mean iteration of those from `first` to `last`, which count from 1, in a job of `total` iterations. They are
    the given ones, again and again.

    The samples of an iteration are begun once servers are free (`Parts.tail`), and once the trainers have finished the
    iteration whose weights they are drawn with, which is lag + 1 iterations before. The trainers begin once the samples
    are scored. `cores`: of the machine that both lanes share; None: they share nothing."""
    samples, learnt, training = _Samples(iterations, cores is not None), 0, _Work(())
    spent: dict[str, float] = {}
    seconds = resting = 0.0
    while learnt < last:
        samples.begin(min(total, learnt + lag + 1))
        samples.close()
        mine = iterations[learnt % len(iterations)]
        if training.part is None and learnt < samples.done:
            training = _Work(mine.training.items())
            if training.part is None:
                learnt += 1
                continue
        beside = samples.active()
        works = [*beside, *([(training, 1.0)] if training.part is not None else [])]
        wanted = samples.cores + mine.cores[1]
        slower = max(1.0, wanted / cores) if cores and beside and training.part is not None else 1.0
        step = min(work.left / speed for work, speed in works)
        taken = step * slower
        if learnt >= first - 1:
            seconds += taken
            for work, _ in works:
                name = "generation" if work.part == TAIL else str(work.part)
                spent[name] = spent.get(name, 0.0) + taken
            if training.part is None:
                spent["waiting"] = spent.get("waiting", 0.0) + taken
            resting += taken * samples.idle()
        busy = training.part is not None
        for work, speed in works:
            work.advance(step * speed, work.left / speed == step)
        samples.close()
        learnt += busy and training.part is None
    count = last - first + 1
    return Steady(
        lag,
        seconds / count,
        # Sums of the same parts in another order differ by rounding.
        max(0.0, 1 - spent.get("training", 0.0) / seconds) if seconds else 0.0,
        min(1.0, resting / seconds) if seconds else 0.0,
        {name: value / count for name, value in spent.items()},
    )
