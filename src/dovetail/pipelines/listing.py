"""Kernel: list scheduling under linear priorities, and the random search over them.

A rank that is free takes the ready operation of the lowest priority value, or waits for one that becomes ready within
a look-ahead. The value: `base` (N, 6) by rank and code, plus `slope` (N, 6) times the progress within the mini-batch,
plus `patience` times the wait, plus `lateness` times the mini-batch. `room` (N, 2): micro-batches of each model that a
rank may hold in flight; `limit` (N,): activations it may hold; `look` (2, 3): look-ahead, in time."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.jit import kernel


@kernel
def list_schedule(  # type: ignore[no-untyped-def]
    duration, activation, before, after, position, stages, total, group, wait, step, comm, split, limit,
    base, slope, room, look, patience, lateness, stop_at, words,
):  # fmt: skip
    """Fill `words` (N, length); returns the makespan, or -1 where memory or in-flight limits block everything.

    Gives up with -1 as soon as the time passes `stop_at`."""
    n = words.shape[0]
    mini = wait.shape[1]
    far = 1e300
    finish = np.full(duration.shape, far)
    count = np.zeros((n, 6), np.int64)
    free = np.zeros(n)
    memory = np.zeros(n)
    running = np.full(n, -1, np.int64)
    filled = np.zeros(n, np.int64)
    closed = np.zeros((2, mini), np.int64)
    closing = np.zeros((2, mini))
    kinds = 3 if split else 2
    release = kinds - 1
    todo = n * kinds * (total[0] + total[1])
    t = 0.0
    end = 0.0
    while todo > 0:
        for x in range(n):
            if running[x] >= 0 and free[x] <= t:
                code = running[x]
                if code % 3 == release:
                    memory[x] -= activation[code // 3, x, count[x, code] - 1]
                running[x] = -1
        upcoming = far
        for x in range(n):
            if running[x] >= 0:
                upcoming = min(upcoming, free[x])
                continue
            best = far
            choice = -1
            choice_ready = 0.0
            for m in range(2):
                for kind in range(kinds):
                    code = 3 * m + kind
                    q = count[x, code]
                    if q >= total[m]:
                        continue
                    if kind > 0 and q >= count[x, code - 1]:
                        continue
                    ready = 0.0
                    if kind == 0:
                        alive = q - count[x, 3 * m + release]
                        if alive >= max(1, room[x, m]):
                            continue
                        if memory[x] + activation[m, x, q] > limit[x]:
                            continue
                        prior = before[m, x]
                        if prior >= 0:
                            ready = finish[m, 0, prior, q] + comm[m, 0, x]
                        if q % group[m] == 0:
                            for other in range(2):
                                need = wait[m, q // group[m], other]
                                if need > 0:
                                    if closed[other, need - 1] < n:
                                        ready = far
                                    else:
                                        ready = max(ready, closing[other, need - 1] + step[other])
                    elif kind == 1:
                        onward = after[m, x]
                        ready = finish[m, 0, x, q]
                        if onward >= 0:
                            ready = finish[m, 1, onward, q] + comm[m, 1, x]
                    if ready >= far:
                        continue
                    if ready > t + look[m, kind]:
                        upcoming = min(upcoming, ready)
                        continue
                    k = q // group[m]
                    value = (
                        base[x, code]
                        + slope[x, code] * (q - k * group[m] + 0.5) / group[m]
                        + patience * max(ready - t, 0.0)
                        + lateness * k
                    )
                    if value < best:
                        best = value
                        choice = code
                        choice_ready = ready
            if choice < 0:
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
            words[x, filled[x]] = choice
            filled[x] += 1
            count[x, choice] = q + 1
            running[x] = choice
            free[x] = over
            todo -= 1
            end = max(end, over)
            upcoming = min(upcoming, over)
            if kind == release and (q + 1) % group[m] == 0:
                k = q // group[m]
                closed[m, k] += 1
                closing[m, k] = max(closing[m, k], over)
                if closed[m, k] == n:
                    upcoming = min(upcoming, closing[m, k] + step[m])
        if todo > 0 and upcoming >= far:
            return -1.0
        if todo > 0 and end > stop_at:
            return -1.0
        if upcoming <= t and todo > 0:
            # An operation of length 0 cannot occur; a barrier that opened just now can.
            upcoming = np.nextafter(t, far)
        t = upcoming
    return end


@kernel
def search_rules(  # type: ignore[no-untyped-def]
    duration, activation, before, after, position, stages, total, group, wait, step, comm, split, limit,
    tries, seed, target, unit, stop, task, best_words,
):  # fmt: skip
    """`tries` random and mutated rules; the best schedule's words and makespan (1e300 where none fits).

    Stops early at `target`, or where stop[i] is set for some i < task or for the last i, which says that time is up."""
    np.random.seed(seed)
    n = best_words.shape[0]
    words = np.zeros_like(best_words)
    best = 1e300
    base = np.zeros((n, 6))
    slope = np.zeros((n, 6))
    room = np.zeros((n, 2), np.int64)
    look = np.zeros((2, 3))
    kept_base = base.copy()
    kept_slope = slope.copy()
    kept_room = room.copy()
    kept_look = look.copy()
    patience = 0.0
    lateness = 0.0
    kept_patience = 0.0
    kept_lateness = 0.0
    span = 8 if n > 4 else 2 * n
    for trial in range(tries):
        if stop[-1]:
            return best
        if trial % 16 == 0:
            for i in range(task):
                if stop[i]:
                    return best
        early = trial < 0.7 * tries
        if best > 1e299 or np.random.random() < (0.3 if early else 0.02):
            for code in range(6):
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
                for code in range(6):
                    look[code // 3, code % 3] = np.random.random() * unit
            for m in range(2):
                extra = np.random.randint(-1, span)
                for x in range(n):
                    room[x, m] = max(1, stages[m] - position[m, x] + extra)
            patience = np.random.random() * 0.5 / unit
            lateness = 3.0 * abs(np.random.normal())
        else:
            base[:] = kept_base
            slope[:] = kept_slope
            room[:] = kept_room
            look[:] = kept_look
            patience = kept_patience
            lateness = kept_lateness
            if early or np.random.random() < 0.3:
                # A change to all ranks.
                for code in range(6):
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
                for m in range(2):
                    if np.random.random() < 0.1:
                        shift = np.random.randint(-1, 2)
                        for x in range(n):
                            room[x, m] = max(1, room[x, m] + shift)
                if np.random.random() < 0.1:
                    patience = abs(patience + 0.1 * np.random.normal() / unit)
                if np.random.random() < 0.1:
                    lateness = abs(lateness + np.random.normal())
            else:
                # A change to a few ranks: blocks of pipelines and bottlenecks want rules of their own.
                for _ in range(1 + np.random.randint(4)):
                    x = np.random.randint(n)
                    code = np.random.randint(6)
                    chance = np.random.random()
                    if chance < 0.4:
                        base[x, code] += np.random.normal()
                    elif chance < 0.7:
                        slope[x, code] += np.random.normal()
                    else:
                        room[x, code // 3] = max(1, room[x, code // 3] + np.random.randint(-1, 2))
        end = list_schedule(
            duration, activation, before, after, position, stages, total, group, wait, step, comm, split, limit,
            base, slope, room, look, patience, lateness, best, words,
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
                best_words[:] = words
                if best <= target:
                    stop[task] = 1
                    return best
    return best
