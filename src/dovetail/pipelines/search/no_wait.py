"""Builds schedules for many ranks and scarce memory, in which the larger model's micro-batches never wait.

If memory decides how often a micro-batch may enter, one that waits on its way holds memory for longer. So all later
ones enter later. In a V each rank passes micro-batches on in both directions, and those that meet would wait. They
never meet if each pass and its message take one slot of time, as in a systolic array. A template then says on which
rank a micro-batch is in each slot after its entry. Two micro-batches share no slot if the distance of their entries is
right (no-wait flow shops: Hall and Sriskandarajah, 1996).

Micro-batches of the larger model enter as early as template and memory allow. The passes of the smaller model take the
time between. Its first micro-batches run as early as the rest of the memory allows. The others are placed backwards in
time, as late as the end allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.pipelines.bound import least_interval
from dovetail.pipelines.compat import COMPILED, kernel
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.schedule import DeadlockError, evaluate
from dovetail.pipelines.simulate import KINDS, Floats, Ints

LATE = (2, 1, 3, 4)
"""The numbers of slots from an input gradient to its weight gradient that are tried."""
SPACINGS = (1.004, 0.95, 0.955, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.94, 0.93, 0.9, 0.0)
"""The least distance between entries, as a share of the mean distance that memory allows. With 1 micro-batches enter
evenly, and with 0 in bursts."""
LONGER = (0.0, 0.001, 0.002, 0.004, 0.01, 0.03, 0.1)
"""The fractions by which the end may be later if the smaller model does not fit before it. They are tried in turn."""


def no_wait(instance: SearchInstance, left: Callable[[], float]) -> Ints | None:
    """The fastest orders in which the larger model does not wait, or None if memory is not scarce.

    It ends when no time is `left`, but tries at least once."""
    i, v, limit = instance, instance.placement.chunks, instance.problem.memory_limit
    owner = np.arange(len(i.total)) // v
    works = [float(i.duration[owner == m].sum()) for m in (0, 1)]
    big = int(works[1] > works[0])
    scarce = limit is not None and least_interval(i, big) > works[big] / int(i.total[big * v]) / i.ranks
    if limit is None or not scarce or not i.split or not COMPILED:
        return None
    listing = _Listing(i, big, limit * (1 + 1e-9))
    if listing.template is None:
        return None
    best, fastest = None, np.inf
    for number, spacing in enumerate(SPACINGS):
        if number and left() <= 0:
            break
        orders = listing.orders(spacing)
        if orders is None:
            continue
        try:
            found = evaluate(i, orders)
        except DeadlockError:
            continue
        if found.fits(limit) and found.makespan < fastest:
            best, fastest = orders, found.makespan
    return best


class _Listing:
    """`template` (chunks, 3, N): the slots of a micro-batch's passes, counted from its entry, or -1 if a rank has no
    stage. It is the template whose micro-batches enter at the least distance, or None if none fits in the memory."""

    def __init__(self, instance: SearchInstance, big: int, limit: float) -> None:
        i, v = instance, instance.placement.chunks
        self._instance, self._limit, self._small = i, limit, 1 - big
        self._mine = slice(big * v, big * v + v)
        self._count, stages = int(i.total[big * v]), int(i.stages[big * v])
        self._slot = float(i.duration[self._mine].max() + i.latency[self._mine].max())
        self._sizes = i.activation[self._mine, :, : self._count].max(axis=2)
        self.template: Ints | None = None
        self._distance = np.inf
        place = i.position[self._mine]
        for late in LATE:
            ways = np.stack([place, 2 * stages - 1 - place, 2 * stages - 1 - place + late], axis=1)
            template = np.where((place < 0)[:, None], -1, ways)
            entered = self._enter(template, 0.0)
            if entered is not None and entered[0][-1] < self._distance * max(1, self._count - 1) * (1 - 1e-9):
                self.template, self._distance = template, float(entered[0][-1]) / max(1, self._count - 1)

    def _enter(self, template: Ints, distance: float) -> tuple[Ints, Floats] | None:
        """The slots in which micro-batches enter, and the memory that each rank holds in each slot. None if they do not
        fit."""
        i, work = self._instance, 3 * len(template)
        held = np.zeros((i.ranks, 4 * self._count * work + 2 * int(template.max()) + 2))
        entries = np.zeros(self._count, np.int64)
        return (entries, held) if _enter(template, self._sizes, self._limit, work, distance, held, entries) else None

    def orders(self, spacing: float) -> Ints | None:
        """The orders of both models, or None if the smaller one does not fit."""
        assert self.template is not None
        entered = self._enter(self.template, spacing * self._distance)
        if entered is None:
            return None
        entries, held = entered
        last = int(entries[-1] + self.template.max()) + 1
        for more in LONGER:
            slots = int(last * (1 + more))
            starts = self._filled(entries, np.ascontiguousarray(held[:, :slots]))
            if starts is not None:
                return _orders(self._instance, starts)
        return None

    def _filled(self, entries: Ints, held: Floats) -> Floats | None:
        """The starts of all passes (C, 3, N, Q), or None if the smaller model does not fit before the end of `held`."""
        i, slot, template = self._instance, self._slot, self.template
        assert template is not None
        starts = np.full(i.duration.shape, np.inf)
        starts[self._mine, :, :, : self._count] = np.where(
            template[..., None] >= 0, slot * (template[..., None] + entries), np.inf
        )
        begins, ends = (np.full((i.ranks, i.length + 1), np.inf) for _ in range(2))
        _occupy(starts[self._mine], i.duration[self._mine], self._count, begins, ends)
        end, few = slot * held.shape[1], int(i.total[i.chunks(self._small).start])
        model = i.problem.models[self._small]
        for pipeline in range(model.pipelines):
            nodes = np.array([(c, x) for c, x in i.nodes(self._small) if (x - model.first) // model.stages == pipeline])
            done = _fill(
                nodes, i.duration, i.latency, i.activation, np.arange(few), False, end / 2, self._limit, slot, begins,
                ends, held, starts,
            )  # fmt: skip
            # The others are placed backwards in time.
            late = np.full_like(starts, np.inf)
            begins_late, ends_late = (np.full_like(begins, np.inf) for _ in range(2))
            for x in range(i.ranks):
                size = np.searchsorted(begins[x], np.inf)
                begins_late[x, :size], ends_late[x, :size] = (
                    end - ends[x, size - 1 :: -1],
                    end - begins[x, size - 1 :: -1],
                )
            rest = _fill(
                nodes, i.duration, i.latency, i.activation, np.arange(done, few)[::-1].copy(), True, end - slot,
                self._limit, slot, begins_late, ends_late, np.ascontiguousarray(held[:, ::-1]), late,
            )  # fmt: skip
            if done + rest < few:
                return None
            for c, x in nodes:
                starts[c, :, x, done:few] = end - late[c, :, x, done:few] - i.duration[c, :, x, done:few]
        return starts


def _orders(i: SearchInstance, starts: Floats) -> Ints:
    orders = np.zeros((i.ranks, i.length), np.int64)
    chunks, kinds = (grid.ravel() for grid in np.indices((len(i.total), i.kinds)))
    for rank in range(i.ranks):
        times = [starts[c, k, rank, : i.total[c]] for c, k in zip(chunks, kinds, strict=True)]
        codes = np.repeat(KINDS * chunks + kinds, [len(t) for t in times])
        orders[rank] = codes[np.argsort(np.concatenate(times), kind="stable")]
    return orders


@kernel
def _enter(template, sizes, limit, work, distance, held, entries):  # type: ignore[no-untyped-def]
    """Fills `entries` with the earliest slots in which no two passes meet and memory is enough. Returns whether there
    are any.

    `work`: the slots that a micro-batch needs on a rank. Entry q is not before q times `distance`. `held` (N, slots):
    is filled with the memory that each rank holds."""
    chunks, kinds, n = template.shape
    last = 0
    for c in range(chunks):
        for x in range(n):
            last = max(last, template[c, 2, x])
    meet = np.zeros(last + 2, np.bool_)
    for x in range(n):
        for c in range(chunks):
            for k in range(kinds):
                for o in range(chunks):
                    for other in range(kinds):
                        d = template[o, other, x] - template[c, k, x]
                        if template[c, k, x] >= 0 and d >= 0:
                            meet[d] = True
                            if d == 0 and (o != c or other != k):
                                return False
    at = 0
    for q in range(len(entries)):
        free = False
        at = max(at, int(distance * q))
        while not free:
            if at + last + 2 >= held.shape[1]:
                return False
            free = True
            for k in range(q):
                d = at - entries[k]
                if d <= last and meet[d]:
                    free = False
                    break
            for c in range(chunks):
                for x in range(n):
                    if not free:
                        break
                    if template[c, 0, x] < 0:
                        continue
                    for t in range(at + template[c, 0, x], at + template[c, 2, x] + 1):
                        own = 0.0  # another chunk of the same micro-batch
                        for o in range(c):
                            if template[o, 0, x] >= 0 and at + template[o, 0, x] <= t <= at + template[o, 2, x]:
                                own += sizes[o, x]
                        if held[x, t] + own + sizes[c, x] > limit:
                            free = False
                            break
            if not free:
                at += 1
        entries[q] = at
        for c in range(chunks):
            for x in range(n):
                if template[c, 0, x] >= 0:
                    for t in range(at + template[c, 0, x], at + template[c, 2, x] + 1):
                        held[x, t] += sizes[c, x]
        at += work
    return True


@kernel
def _occupy(starts, duration, count, begins, ends):  # type: ignore[no-untyped-def]
    """Fills `begins` and `ends` with each rank's busy times in ascending order."""
    chunks, _, n, _ = starts.shape
    for x in range(n):
        size = 0
        for c in range(chunks):
            if np.isinf(starts[c, 0, x, 0]):
                continue
            for q in range(count):
                for kind in range(3):
                    begins[x, size] = starts[c, kind, x, q]
                    ends[x, size] = starts[c, kind, x, q] + duration[c, kind, x, q]
                    size += 1
        by_time = np.argsort(begins[x, :size])
        begins[x, :size] = begins[x, :size][by_time]
        ends[x, :size] = ends[x, :size][by_time]


@kernel
def _insert(begins, ends, at, length):  # type: ignore[no-untyped-def]
    """Puts a pass of `length` into the first gap of a rank from `at` on. Returns its start."""
    k = np.searchsorted(ends, at, side="right")
    start = at
    while start + length > begins[k] + 1e-12:
        start = max(start, ends[k])
        k += 1
    size = np.searchsorted(begins, np.inf)
    for j in range(size, k, -1):
        begins[j] = begins[j - 1]
        ends[j] = ends[j - 1]
    begins[k] = start
    ends[k] = start + length
    return start


@kernel
def _remove(begins, ends, start):  # type: ignore[no-untyped-def]
    k = np.searchsorted(begins, start)
    size = np.searchsorted(begins, np.inf)
    for j in range(k, size):
        begins[j] = begins[j + 1]
        ends[j] = ends[j + 1]


@kernel
def _fill(  # type: ignore[no-untyped-def]
    nodes, duration, latency, activation, numbers, mirrored, until, limit, slot, begins, ends, held, starts
):
    """Put micro-batches of one pipeline of the smaller model into the gaps, each as early as memory allows.

    `nodes`: chunk and rank of each stage. `numbers`: the micro-batches, in the order in which they enter. `mirrored`:
    time runs backwards. `starts` (C, 3, N, Q): is filled. Returns how many micro-batches end before `until`."""
    stages = len(nodes)
    entry = 0.0
    before = -1
    for done in range(len(numbers)):
        q = numbers[done]
        while True:
            ready = entry
            for step in range(2 * stages):
                kind = step // stages
                if mirrored:
                    kind = 1 - kind
                k = step if step < stages else 2 * stages - 1 - step
                c, x = nodes[k]
                if step > 0 and step != stages:
                    # The message comes from the stage before, or backwards in time from the one after.
                    o = k
                    if mirrored:
                        o = k - 1 if kind == 1 else k + 1
                    ready += latency[nodes[o, 0], kind, nodes[o, 1]]
                if mirrored and kind == 1:
                    at = max(0.0, ready - duration[c, 2, x, q])
                    if before >= 0:
                        at = max(at, starts[c, 2, x, before] + duration[c, 2, x, before])
                    starts[c, 2, x, q] = _insert(begins[x], ends[x], at, duration[c, 2, x, q])
                    ready = max(ready, starts[c, 2, x, q] + duration[c, 2, x, q])
                if before >= 0:
                    ready = max(ready, starts[c, kind, x, before] + duration[c, kind, x, before])
                starts[c, kind, x, q] = _insert(begins[x], ends[x], ready, duration[c, kind, x, q])
                ready = starts[c, kind, x, q] + duration[c, kind, x, q]
            if not mirrored:
                for k in range(stages - 1, -1, -1):
                    c, x = nodes[k]
                    ready = starts[c, 1, x, q] + duration[c, 1, x, q]
                    if before >= 0:
                        ready = max(ready, starts[c, 2, x, before] + duration[c, 2, x, before])
                    starts[c, 2, x, q] = _insert(begins[x], ends[x], ready, duration[c, 2, x, q])
            first, last = (2, 0) if mirrored else (0, 2)
            later = 0.0
            over = 0.0
            for k in range(stages):
                c, x = nodes[k]
                begin = int(starts[c, first, x, q] / slot + 1e-6)
                end = int((starts[c, last, x, q] + duration[c, last, x, q]) / slot + 1 - 1e-6)
                over = max(over, starts[c, last, x, q] + duration[c, last, x, q])
                for t in range(min(end, held.shape[1]) - 1, begin - 1, -1):
                    if held[x, t] + activation[c, x, q] > limit:
                        later = max(later, (t + 1) * slot - starts[c, first, x, q])
                        break
                for t in range(begin, min(end, held.shape[1])):
                    held[x, t] += activation[c, x, q]
            if later <= 0 and over <= until:
                entry = starts[nodes[0, 0], first, nodes[0, 1], q]
                before = q
                break
            for k in range(stages):
                c, x = nodes[k]
                begin = int(starts[c, first, x, q] / slot + 1e-6)
                end = int((starts[c, last, x, q] + duration[c, last, x, q]) / slot + 1 - 1e-6)
                for t in range(begin, min(end, held.shape[1])):
                    held[x, t] -= activation[c, x, q]
                for kind in range(3):
                    _remove(begins[x], ends[x], starts[c, kind, x, q])
            if over > until:
                return done
            entry += later
    return len(numbers)
