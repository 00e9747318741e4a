"""Searches schedules of many passes by dispatch rules. Each rule lists a whole schedule at once.

`listing.list_schedule` looks at all ranks whenever one of them becomes free. If memory is scarce, most of its schedules
of several chunks a rank end in a deadlock. This list scheduler looks only at the rank that becomes free or gets a
message. It keeps memory for micro-batches that are on their way, and it fills a wait with passes that end in time. A
rule is a few numbers, so good rules of large problems are found in a few hundred listings.

Passes that are nearer to the end of their micro-batch go first (last buffer first served: Kumar, Re-entrant lines,
1993). So activations stay in memory for a shorter time. Weight gradients and the smaller model fill the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from dovetail.pipelines.bound import least_interval, lower_bound
from dovetail.pipelines.compat import kernel
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.simulate import KINDS, F, Floats, Ints, W

ROUND = 8
"""The number of rules that are listed at once."""
KEPT = 6
"""The number of rules that the search goes on from."""
UNLIMITED = 1e300


@kernel
def dispatch(  # type: ignore[no-untyped-def]
    duration, before, after, total, latency, activation, split, each, limit, keys, slope, release, room, spare, look,
    stop_at, finish, orders,
):  # fmt: skip
    """Fill `orders` (N, length) and `finish` (C, 3, N, Q). Returns the makespan, or -1 if all ranks wait or the
    schedule would end after `stop_at`. There is one mini-batch, in which no model waits for the other.

    A free rank takes the pass of the lowest priority among those that are ready within `look` (C, 3), and waits for it.
    A pass that ends before that is run first. The priority is `keys` (N, C, 3) plus `slope` (C, 3) times the progress
    through the micro-batches. Each model has `each` chunks. A micro-batch does not enter the first stage before
    `release` (C, Q). A forward starts only if the rank holds fewer than `room` (C) micro-batches in this chunk. The
    memory must also leave `spare` (C), and room for one micro-batch in each chunk that some are on their way to. So
    some micro-batch can always end if the limit is enough for one of each model."""
    n, length = orders.shape
    chunks = keys.shape[1]
    far = 1e300
    kinds = 3 if split else 2
    last = kinds - 1
    count = np.zeros((n, chunks, 3), np.int64)
    held = np.zeros((n, chunks), np.int64)
    memory = np.zeros(n)
    running = np.full(n, -1, np.int64)
    filled = np.zeros(n, np.int64)
    left = np.zeros(n)  # work of each rank
    wake = np.zeros(n)
    todo = n * length
    entry = np.zeros((n, chunks // each), np.int64)  # the rank of the first stage of each model's pipeline
    for x in range(n):
        for m in range(chunks // each):
            c = m * each
            y = x
            while before[c, y, 0] >= 0:
                a = before[c, y, 0]
                y = before[c, y, 1]
                c = a
            entry[x, m] = y
    for x in range(n):
        for c in range(chunks):
            for kind in range(kinds):
                for q in range(total[c]):
                    left[x] += duration[c, kind, x, q]
    end = 0.0
    while todo > 0:
        x = 0
        t = wake[0]
        for y in range(1, n):
            if wake[y] < t:
                t = wake[y]
                x = y
        if t >= far:
            return -1.0
        wake[x] = far
        if running[x] >= 0:
            c = running[x] // 3
            if running[x] % 3 == last:
                memory[x] -= activation[c, x, count[x, c, last] - 1]
                held[x, c] -= 1
            running[x] = -1
        soon = far
        best = far
        choice = -1
        choice_ready = 0.0
        spare_best = far  # the best of those that are ready now
        spare_choice = -1
        for attempt in range(2):
            # The first attempt takes the best pass. If that is not ready yet, the second one takes the best that ends
            # before.
            if attempt == 1 and (choice < 0 or choice_ready <= t):
                break
            for c in range(chunks):
                for kind in range(kinds):
                    q = count[x, c, kind]
                    if q >= total[c] or (kind > 0 and q >= count[x, c, kind - 1]):
                        continue
                    ready = 0.0
                    if kind == 0:
                        a = before[c, x, 0]
                        if a >= 0:
                            y = before[c, x, 1]
                            if q >= count[y, a, 0]:
                                continue
                            ready = finish[a, 0, y, q] + latency[c, 0, x]
                        else:
                            ready = release[c, q]
                        if held[x, c] >= room[c]:
                            continue
                        need = memory[x] + activation[c, x, q] + spare[c]
                        if need > limit:
                            continue
                        for o in range(chunks):
                            # Keep room for what is on its way here. Otherwise two models wait for each other.
                            m = o // each
                            if o == c or held[x, o] > 0 or count[x, o, 0] >= total[o]:
                                continue
                            if count[entry[x, m], m * each, 0] > count[x, o, 0] or (m == c // each and o > c):
                                need += activation[o, x, count[x, o, 0]]
                        if need > limit:
                            continue
                    elif kind == 1:
                        a = after[c, x, 0]
                        if a >= 0:
                            y = after[c, x, 1]
                            if q >= count[y, a, 1]:
                                continue
                            ready = finish[a, 1, y, q] + latency[c, 1, x]
                    if ready > t + look[c, kind]:
                        soon = min(soon, ready)
                        continue
                    value = keys[x, c, kind] + slope[c, kind] * q / total[c]
                    if attempt == 0:
                        if value < best:
                            best = value
                            choice = 3 * c + kind
                            choice_ready = ready
                    elif ready <= t and t + duration[c, kind, x, q] <= choice_ready and value < spare_best:
                        spare_best = value
                        spare_choice = 3 * c + kind
        if choice < 0:
            wake[x] = soon
            continue
        if choice_ready > t:
            if spare_choice < 0:
                wake[x] = min(choice_ready, soon)
                continue
            choice = spare_choice
        c = choice // 3
        kind = choice % 3
        q = count[x, c, kind]
        if t + left[x] >= stop_at:
            return -1.0
        over = t + duration[c, kind, x, q]
        left[x] -= duration[c, kind, x, q]
        finish[c, kind, x, q] = over
        if kind == 0:
            memory[x] += activation[c, x, q]
            held[x, c] += 1
        orders[x, filled[x]] = choice
        filled[x] += 1
        count[x, c, kind] = q + 1
        running[x] = choice
        wake[x] = over
        todo -= 1
        end = max(end, over)
        if kind == 0 and after[c, x, 0] >= 0:
            y = after[c, x, 1]
            if y != x and running[y] < 0:
                wake[y] = min(wake[y], over + latency[after[c, x, 0], 0, y])
        elif kind == 1 and before[c, x, 0] >= 0:
            y = before[c, x, 1]
            if y != x and running[y] < 0:
                wake[y] = min(wake[y], over + latency[before[c, x, 0], 1, y])
    return end if end < stop_at else -1.0


@dataclass(frozen=True, eq=False)
class DispatchRule:
    """The priorities and limits of one listing (see `dispatch`).

    `base`, `place`, `slope` (C, 3): the priority of a kind of passes, how it changes along the pipeline, and how it
    changes through the micro-batches. `look` (C, 3), `room` (C), `spare` (C): as in `dispatch`, but `look` is a
    multiple of the model's longest forward. `stream` (2, 4): for each model a share, a distance, a time and a second
    distance. The share of its micro-batches enters from the beginning on, at the first distance in time. The others
    enter from that time on, at the second distance."""

    base: Floats
    place: Floats
    slope: Floats
    look: Floats
    room: Floats
    spare: Floats
    stream: Floats


class DispatchSearch:
    """Searches rules for an instance. It first tries some that are good for many problems, and then changes the best.

    A round lists a fixed number of rules, each on a thread, and the best few are kept. So the answer depends on the
    seed and on the number of rounds, not on the number of threads."""

    def __init__(self, instance: SearchInstance, seed: int) -> None:
        self.instance = instance
        self._random = np.random.default_rng(seed)
        self._limit = UNLIMITED if instance.problem.memory_limit is None else instance.problem.memory_limit
        self._bound = lower_bound(instance)
        self._each = instance.placement.chunks
        self._owner = np.arange(len(instance.total)) // self._each
        self._unit = np.array([float(instance.duration[self._owner == m, F].max()) for m in (0, 1)])
        self._work = np.array([float(instance.duration[self._owner == m].sum()) for m in (0, 1)])
        self._first = iter(self._first_rules())
        self._kept: list[tuple[float, int, DispatchRule, Ints]] = []
        self._tried = 0

    @property
    def best(self) -> Ints | None:
        """The fastest orders so far, or None if none fits."""
        return self._kept[0][3] if self._kept else None

    @property
    def makespan(self) -> float:
        return self._kept[0][0] if self._kept else UNLIMITED

    def round(self, pool: ThreadPoolExecutor) -> None:
        """List a few more rules."""
        rules = list(itertools.islice(self._first, ROUND))
        while len(rules) < ROUND and self._kept:
            chosen = int(self._random.integers(len(self._kept)) * self._random.random())
            rules.append(self._changed(self._kept[chosen][2]))
        stop_at = self._kept[-1][0] if len(self._kept) == KEPT else UNLIMITED
        for rule, (end, orders) in zip(rules, pool.map(lambda rule: self._list(rule, stop_at), rules), strict=True):
            self._tried += 1
            if end >= 0:
                self._kept.append((end, self._tried, rule, orders))
        self._kept = sorted(self._kept, key=lambda kept: kept[:2])[:KEPT]

    def _list(self, rule: DispatchRule, stop_at: float) -> tuple[float, Ints]:
        i = self.instance
        place = (i.position / i.stages[:, None]).T
        release = np.zeros(i.activation.shape[::2])
        for m, (share, distance, time, later) in enumerate(rule.stream):
            count = int(i.total[m * self._each])
            number = np.arange(count)
            first = round(share * count)
            release[m * self._each, :count] = np.where(
                number < first, distance * number, np.maximum(time, distance * first) + later * (number - first)
            )
        orders = np.zeros((i.ranks, i.length), np.int64)
        end = dispatch(
            i.duration, i.before, i.after, i.total, i.latency, i.activation, i.split, self._each,
            self._limit * (1 + 1e-9), rule.base[None] + rule.place[None] * place[:, :, None], rule.slope, release,
            rule.room.astype(np.int64), rule.spare, rule.look * self._unit[self._owner][:, None], stop_at,
            np.zeros_like(i.duration), orders,
        )  # fmt: skip
        return float(end), orders

    def _first_rules(self) -> Iterator[DispatchRule]:
        i, v, chunks = self.instance, self._each, len(self._owner)
        small = int(self._work[1] <= self._work[0])
        big = 1 - small
        stages, count = i.problem.models[big].stages, int(i.total[big * v])
        # The least time that memory allows between the entries of two micro-batches of the larger model.
        limited = self._limit < UNLIMITED
        interval = least_interval(i, big) if limited else 0.0
        busy = self._work[big] / count / i.ranks
        tight = interval > busy
        distances = [interval * x for x in (1.0, 0.98, 1.03, 1.08)] if tight else [0.0, 0.0, 0.0, interval]
        rooms = [4.0] * 4 if tight else [1.25, 1.0, 0.75, 2.0]
        weights = 0.5 if tight else 20.0  # a weight gradient that waits keeps memory
        if tight:
            yield from self._ramps(small, interval)
        for (late, share), look, (distance, room), ahead in itertools.product(
            ((0.92, 0.5), (1.0, 1.0), (0.87, 0.7), (0.95, 0.35)),
            (1.0, 0.4),
            zip(distances, rooms, strict=True),
            (-10.0, 10.0),
        ):
            base, stream = np.zeros((chunks, KINDS)), np.zeros((2, 4))
            spare = np.zeros(chunks)
            for c in range(chunks):
                k, more = c % v, ahead if self._owner[c] == small else 0.0
                base[c] = more - k, more - (2 * v - 1 - k), more + weights
            if tight:
                spare[small * v] = 0.1 * self._limit
            stream[:, 0] = 1.0
            stream[big, 1] = distance
            stream[small] = share, 0.0, late * self._bound, 0.0
            rooms_of = i.total.astype(float)
            rooms_of[big * v] = max(1.0, round(room * stages))
            looks = np.where(np.arange(KINDS) < W, look, 0.0) * np.ones_like(base)
            yield DispatchRule(base, np.zeros_like(base), np.zeros_like(base), looks, rooms_of, spare, stream)

    def _ramps(self, small: int, interval: float) -> Iterator[DispatchRule]:
        """Rules for scarce memory. In the steady state the larger model fills it, and each micro-batch of the smaller
        model would take the place of one of the larger. So the smaller model runs while the memory fills and empties. A
        part of its micro-batches enters from the beginning on, no faster than a rank can run them. The others enter
        near the end. Its passes only fill gaps. `interval`: the time between micro-batches of the larger model that
        memory allows."""
        i, v, chunks = self.instance, self._each, len(self._owner)
        busy = self._work[small] / int(i.total[small * v]) / i.ranks
        for (late, share), look, factor, spare, later in itertools.product(
            ((0.88, 0.41), (0.83, 0.39), (0.9, 0.43), (0.8, 0.36)),
            (0.95, 0.8),
            (1.02, 1.005),
            (0.05, 0.075),
            (1.6, 0.0),
        ):
            base, stream = np.zeros((chunks, KINDS)), np.zeros((2, 4))
            for c in range(chunks):
                k, more = c % v, 10.0 if self._owner[c] == small else 0.0
                base[c] = more - k, more - (2 * v - 1 - k), more + 20.0
            stream[1 - small] = 1.0, factor * interval, 0.0, 0.0
            stream[small] = share, 1.03 * busy, late * self._bound, later * busy
            spares = np.zeros(chunks)
            spares[small * v] = spare * self._limit
            looks = np.where(np.arange(KINDS) < W, look, 0.0) * np.ones_like(base)
            yield DispatchRule(
                base, np.zeros_like(base), np.zeros_like(base), looks, i.total.astype(float), spares, stream
            )

    def _changed(self, rule: DispatchRule) -> DispatchRule:
        rng, v = self._random, self._each
        much = 1.0 if rng.random() < 0.3 else 0.3

        def some(values: Floats, spread: float, part: float) -> Floats:
            return values + (rng.random(values.shape) < part) * rng.normal(size=values.shape) * spread * much

        new = rule
        if rng.random() < 0.5:
            new = replace(new, base=some(new.base, 3.0, 0.3))
        if rng.random() < 0.25:
            new = replace(new, place=some(new.place, 3.0, 0.2))
        if rng.random() < 0.4:
            new = replace(new, slope=some(new.slope, 10.0, 0.2))
        if rng.random() < 0.4:
            new = replace(new, look=np.clip(some(new.look, 0.4, 0.3), 0.0, 2.0))
        if rng.random() < 0.4:
            c, room = int(rng.choice([0, v, int(rng.integers(len(new.room)))])), new.room.copy()
            room[c] = np.clip(np.round(room[c] * np.exp(rng.normal() * 0.2 * much) + rng.integers(-1, 2)), 1, 1e6)
            new = replace(new, room=room)
        if rng.random() < 0.3 and self._limit < UNLIMITED:
            c, spare = int(rng.choice([0, v])), new.spare.copy()
            spare[c] = np.clip(spare[c] + rng.normal() * 0.1 * much * self._limit, 0.0, 0.9 * self._limit)
            new = replace(new, spare=spare)
        if rng.random() < 0.5:
            m, stream = int(rng.integers(2)), new.stream.copy()
            share, distance, time, later = stream[m]
            what = rng.random()
            if what < 0.3:
                share = np.clip(share + 0.15 * much * rng.normal(), 0.0, 1.0)
            elif what < 0.5:
                distance = abs(
                    distance * (1 + 0.1 * much * rng.normal()) + (rng.random() < 0.3) * rng.normal() * self._unit[m]
                )
            elif what < 0.8:
                time = abs(time + 0.03 * much * rng.normal() * self._bound)
            else:
                later = abs(
                    later * (1 + 0.2 * much * rng.normal()) + (rng.random() < 0.5) * rng.normal() * self._unit[m]
                )
            stream[m] = share, distance, time, later
            new = replace(new, stream=stream)
        return new
