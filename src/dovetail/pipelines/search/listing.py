"""The kernels of a list scheduler and of two searches on top of it, by random priority rules and by justification."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.compat import kernel, part
from dovetail.pipelines.simulate import opens


@part
def _comes(m, kind, x, q, form, before, after, finish, latency, ready):  # type: ignore[no-untyped-def]
    """When the pass has all that it needs of other passes. `ready`: when its mini-batch opens."""
    onwards = 1 if form == 2 else 0
    if kind > 0 and (form == 2 or after[m, x, 1] < 0):
        ready = finish[m, kind - 1, x, q]
    if kind == onwards:
        prior = before[m, x, 1]
        if prior >= 0:
            ready = max(ready, finish[before[m, x, 0], kind, prior, q] + latency[m, 0, x])
    elif kind == onwards + 1 and after[m, x, 1] >= 0:
        ready = max(ready, finish[after[m, x, 0], kind, after[m, x, 1], q] + latency[m, 1, x])
    return ready


@part
def _end_passes(t, running, free, memory, quiet, count, activation, release):  # type: ignore[no-untyped-def]
    """Frees the ranks whose pass has ended at `t`."""
    for x in range(len(running)):
        if running[x] >= 0 and free[x] <= t:
            code = running[x]
            if code % 3 == release:
                memory[x] -= activation[code // 3, x, count[x, code] - 1]
            running[x] = -1
            quiet[x] = -1.0


@kernel
def list_schedule(  # type: ignore[no-untyped-def]
    duration, before, after, total, group, wait, step, latency, activation, form, limit, room, keys, patience, window,
    look, stop_at, finish, orders,
):  # fmt: skip
    """Fill `orders` (N, length) and `finish` (C, 3, N, Q). Returns the makespan, or -1 if the limits block all ranks or
    a pass ends after `stop_at`.

    A free rank takes the pass of the lowest priority among those that are ready within `look` (C, 3), and waits for it.
    The priority is `keys` (C, 3, N, Q) plus `patience` times the wait. No pass starts earlier than `window` before its
    key. A rank holds at most `limit` of activations and `room` (N, C) micro-batches of each chunk. `form`: see
    `SearchInstance.form`."""
    n = orders.shape[0]
    chunks = len(step)
    mini = wait.shape[1]
    far = 1e300
    finish[:] = far
    count = np.zeros((n, 3 * chunks), np.int64)
    free = np.zeros(n)
    memory = np.zeros(n)
    held = np.zeros((n, chunks), np.int64)  # micro-batches in flight
    running = np.full(n, -1, np.int64)
    filled = np.zeros(n, np.int64)
    block = np.zeros((n, chunks), np.int64)  # the mini-batch whose first forward comes next
    opening = np.zeros((n, chunks), np.int64)  # the micro-batch of that forward
    closed = np.zeros((chunks, mini), np.int64)
    closing = np.zeros((chunks, mini))
    kinds = 2 if form == 0 else 3
    release = kinds - 1
    onwards = 1 if form == 2 else 0
    backwards = onwards + 1
    # A rank that has nothing to do stays so until `quiet`, unless a neighbour starts a pass or a barrier opens.
    quiet = np.zeros(n)
    expected = np.zeros(n)
    todo = n * kinds * total.sum()
    t = 0.0
    end = 0.0
    while todo > 0:
        _end_passes(t, running, free, memory, quiet, count, activation, release)
        upcoming = far
        for x in range(n):
            if running[x] >= 0:
                upcoming = min(upcoming, free[x])
                continue
            if t < quiet[x]:
                upcoming = min(upcoming, expected[x])
                continue
            soon = far
            noticed = far
            best = far
            choice = -1
            choice_ready = 0.0
            for m in range(chunks):
                for kind in range(kinds):
                    code = 3 * m + kind
                    q = count[x, code]
                    if q >= total[m]:
                        continue
                    if kind > 0 and q >= count[x, code - 1]:
                        continue
                    if kind == 0 and (held[x, m] >= room[x, m] or memory[x] + activation[m, x, q] > limit):
                        continue
                    ready = 0.0
                    if kind == 0 and q == opening[x, m]:
                        ready = opens(m, block[x, m], wait, step, closed, closing, n, far)
                    ready = _comes(m, kind, x, q, form, before, after, finish, latency, ready)
                    if ready >= far:
                        continue
                    value = keys[m, kind, x, q]
                    ready = max(ready, value - window)
                    if ready > t + look[m, kind]:
                        soon = min(soon, ready)
                        noticed = min(noticed, ready - look[m, kind] - 1e-9 * ready)
                        continue
                    value += patience * max(ready - t, 0.0)
                    if value < best:
                        best = value
                        choice = code
                        choice_ready = ready
            upcoming = min(upcoming, soon)
            if choice < 0:
                quiet[x] = noticed
                expected[x] = soon
                continue
            if choice_ready > t:
                upcoming = min(upcoming, choice_ready)
                continue
            m = choice // 3
            kind = choice % 3
            q = count[x, choice]
            over = t + duration[m, kind, x, q]
            finish[m, kind, x, q] = over
            if kind == 0:
                memory[x] += activation[m, x, q]
                held[x, m] += 1
                if q == opening[x, m]:
                    opening[x, m] += group[m]
                    block[x, m] += 1
            orders[x, filled[x]] = choice
            filled[x] += 1
            count[x, choice] = q + 1
            running[x] = choice
            free[x] = over
            todo -= 1
            end = max(end, over)
            upcoming = min(upcoming, over)
            woken = after[m, x, 1] if kind == onwards else before[m, x, 1] if kind == backwards else -1
            if woken >= 0:
                quiet[woken] = -1.0
            if kind == release:
                held[x, m] -= 1
            if kind == release and (q + 1) % group[m] == 0:
                k = q // group[m]
                closed[m, k] += 1
                closing[m, k] = max(closing[m, k], over)
                if closed[m, k] == n:
                    upcoming = min(upcoming, closing[m, k] + step[m])
                    quiet[:] = -1.0
        if todo > 0 and upcoming >= far:
            return -1.0
        if todo > 0 and end > stop_at:
            return -1.0
        if upcoming <= t and todo > 0:
            # Every pass takes time, but a barrier may open at this very moment.
            upcoming = np.nextafter(t, far)
        t = upcoming
    return end


@part
def _random_rule(base, slope, room, look, position, stages, unit):  # type: ignore[no-untyped-def]
    """Fills a rule of `search_rules` with random numbers. Returns its patience and its lateness."""
    n, codes = base.shape
    span = 8 if n > 4 else 2 * n
    for code in range(codes):
        m = code // 3
        constant = np.random.normal()
        if code % 3 == 1 and np.random.random() < 0.5:
            constant -= 3.0
        if code % 3 == 2 and np.random.random() < 0.7:
            constant += 3.0
        by_progress = 3.0 * np.random.normal()
        by_stage = np.random.normal()
        for x in range(n):
            base[x, code] = constant + by_stage * position[m, x] / stages[m]
            slope[x, code] = by_progress
        look[m, code % 3] = 0.0
    if np.random.random() < 0.5:
        for code in range(codes):
            look[code // 3, code % 3] = np.random.random() * unit
    for m in range(room.shape[1]):
        extra = np.random.randint(-1, span)
        for x in range(n):
            room[x, m] = max(1, stages[m] - position[m, x] + extra)
    patience = np.random.random() * 0.5 / unit
    return patience, 3.0 * abs(np.random.normal())


@part
def _change_all(base, slope, room, look, position, stages, unit, patience, lateness):  # type: ignore[no-untyped-def]
    """A change to all ranks. Returns the patience and the lateness."""
    n, codes = base.shape
    for code in range(codes):
        m = code // 3
        if np.random.random() < 0.3:
            change = 0.3 * np.random.normal()
            for x in range(n):
                base[x, code] += change
        if np.random.random() < 0.3:
            change = 0.3 * np.random.normal()
            for x in range(n):
                slope[x, code] += change
        if np.random.random() < 0.3:
            change = 0.3 * np.random.normal()
            for x in range(n):
                base[x, code] += change * position[m, x] / stages[m]
        if np.random.random() < 0.1:
            look[m, code % 3] = max(0.0, look[m, code % 3] + (np.random.random() - 0.5) * unit)
    for m in range(room.shape[1]):
        if np.random.random() < 0.1:
            shift = np.random.randint(-1, 2)
            for x in range(n):
                room[x, m] = max(1, room[x, m] + shift)
    if np.random.random() < 0.1:
        patience = abs(patience + 0.1 * np.random.normal() / unit)
    if np.random.random() < 0.1:
        lateness = abs(lateness + np.random.normal())
    return patience, lateness


@part
def _change_some(base, slope, room):  # type: ignore[no-untyped-def]
    """A change to a few ranks, because blocks of pipelines and bottlenecks need rules of their own."""
    n, codes = base.shape
    for _ in range(1 + np.random.randint(4)):
        x = np.random.randint(n)
        code = np.random.randint(codes)
        chance = np.random.random()
        if chance < 0.4:
            base[x, code] += np.random.normal()
        elif chance < 0.7:
            slope[x, code] += np.random.normal()
        else:
            room[x, code // 3] = max(1, room[x, code // 3] + np.random.randint(-1, 2))


@kernel
def search_rules(  # type: ignore[no-untyped-def]
    duration, before, after, total, group, wait, step, latency, split, position, stages, activation, limit,
    tries, seed, target, unit, stop, task, best_orders,
):  # fmt: skip
    """Try `tries` random and mutated rules. Fills `best_orders` and returns their makespan, or 1e300 if none fits.

    A rule gives each pass the priority `base` + `slope` times the progress within the mini-batch + `patience` times the
    wait + `lateness` times the number of the mini-batch. It also sets `room` and `look` of `list_schedule`. The kernel
    stops at the makespan `target`, or if stop[i] is set for some i < task. The last element of `stop` says that the
    time is up."""
    np.random.seed(seed)
    n = best_orders.shape[0]
    chunks = len(step)
    codes = 3 * chunks
    form = 1 if split else 0
    orders = np.zeros_like(best_orders)
    finish = np.zeros(duration.shape)
    keys = np.zeros(duration.shape)
    best = 1e300
    base = np.zeros((n, codes))
    slope = np.zeros((n, codes))
    room = np.zeros((n, chunks), np.int64)
    look = np.zeros((chunks, 3))
    kept_base = base.copy()
    kept_slope = slope.copy()
    kept_room = room.copy()
    kept_look = look.copy()
    patience = 0.0
    lateness = 0.0
    kept_patience = 0.0
    kept_lateness = 0.0
    for trial in range(tries):
        if stop[-1]:
            return best
        if trial % 16 == 0:
            for i in range(task):
                if stop[i]:
                    return best
        early = trial < 0.7 * tries
        if best > 1e299 or np.random.random() < (0.3 if early else 0.02):
            patience, lateness = _random_rule(base, slope, room, look, position, stages, unit)
        else:
            base[:] = kept_base
            slope[:] = kept_slope
            room[:] = kept_room
            look[:] = kept_look
            patience = kept_patience
            lateness = kept_lateness
            if early or np.random.random() < 0.3:
                patience, lateness = _change_all(base, slope, room, look, position, stages, unit, patience, lateness)
            else:
                _change_some(base, slope, room)
        for m in range(chunks):
            for kind in range(3 if split else 2):
                code = 3 * m + kind
                for x in range(n):
                    for k in range(total[m] // group[m]):
                        for i in range(group[m]):
                            progress = slope[x, code] * (i + 0.5) / group[m]
                            keys[m, kind, x, k * group[m] + i] = base[x, code] + progress + lateness * k
        end = list_schedule(
            duration, before, after, total, group, wait, step, latency, activation, form, limit, room, keys, patience,
            1e300, look, best, finish, orders,
        )  # fmt: skip
        if 0.0 <= end <= best:
            kept_base[:] = base
            kept_slope[:] = slope
            kept_room[:] = room
            kept_look[:] = look
            kept_patience = patience
            kept_lateness = lateness
            if end < best:
                best = end
                best_orders[:] = orders
                if best <= target:
                    stop[task] = 1
                    return best
    return best


@kernel
def justify(  # type: ignore[no-untyped-def]
    duration, before, after, total, group, wait, step, latency, activation, forms, limit, start, tries, seed, target,
    unit, stop, task, best_orders,
):  # fmt: skip
    """Improve a schedule forward and backward (Valls, Ballestin and Quintanilla, 2005, for project scheduling). There
    are `tries` listings from `start` (C, 3, N, Q), the ends of a schedule.

    Passes are listed in the order of their starts, alternately from the front and, on the mirror image in time, from
    the back. What a list scheduler decides badly at one end, it decides well from the other. The starts are perturbed a
    little, so that the search goes on if neither direction improves the schedule.

    `duration`, `activation`, `latency` and `forms` have one more axis in front, for the instance and its mirror image.
    Fills `best_orders` and returns their makespan, or 1e300 if nothing is faster than `start`. The kernel stops at the
    makespan `target`, or if stop[i] is set for some i < task. The last element of `stop` says that the time is up."""
    np.random.seed(seed)
    n, length = best_orders.shape
    chunks = len(step)
    last = 1 if forms[0] == 0 else 2
    look = np.zeros((chunks, 3))
    room = np.full((n, chunks), total.max())
    orders = np.zeros_like(best_orders)
    finish = np.zeros(start.shape)
    keys = np.zeros(start.shape)
    held = start.copy()  # ends of the last listing that was kept, in its own direction of time
    side = 0  # that direction: 0 forwards, 1 backwards
    current = 0.0
    for m in range(chunks):
        for x in range(n):
            current = max(current, start[m, last, x, total[m] - 1])
    best = current
    found = 1e300
    for trial in range(tries):
        if stop[-1]:
            return found
        if trial % 16 == 0:
            for i in range(task):
                if stop[i]:
                    return found
        noise = 2.0 * unit * np.random.random() ** 3
        shaken = np.random.random() < 0.7
        for m in range(chunks):
            for kind in range(last + 1):
                shift = noise * np.random.normal() if np.random.random() < 0.2 else 0.0
                look[m, kind] = np.random.random() ** 2 * unit if np.random.random() < 0.3 else 0.0
                for x in range(n):
                    for q in range(total[m]):
                        # An end in one direction's time is a start in the other's.
                        key = current - held[m, last - kind, x, total[m] - 1 - q] + shift
                        keys[m, kind, x, q] = key + noise * np.random.normal() if shaken else key
        window = unit * (1.0 + 20.0 * np.random.random() ** 2)
        end = list_schedule(
            duration[1 - side], before, after, total, group, wait, step, latency[1 - side], activation[1 - side],
            forms[1 - side], limit, room, keys, 0.0, window, look, current, finish, orders,
        )  # fmt: skip
        if end < 0.0 or end > current:
            continue
        side = 1 - side
        current = end
        held[:] = finish
        if end < best:
            best = end
            found = end
            for x in range(n):
                for i in range(length):
                    if side == 0:
                        best_orders[x, i] = orders[x, i]
                    else:
                        code = orders[x, length - 1 - i]
                        best_orders[x, i] = 3 * (code // 3) + last - code % 3
            if best <= target:
                stop[task] = 1
                return found
    return found
