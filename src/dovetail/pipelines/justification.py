"""Kernels: forward-backward improvement of a schedule (Valls, Ballestin and Quintanilla, 2005, for project scheduling).

Operations are listed anew by the starts they had, alternately from the front and, on the mirror image in time, from the
back: what a list scheduler decides badly at one end it decides well from the other. The starts are shaken a little, so
that the search does not end at the first schedule that neither direction improves."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.jit import kernel


@kernel
def list_by_keys(  # type: ignore[no-untyped-def]
    duration, activation, before, after, total, group, wait, step, comm, form, limit, look, keys, window, stop_at,
    finish, words,
):  # fmt: skip
    """Fill `words` (N, length) and `finish` (2, 3, N, Q); returns the makespan, or -1 where memory blocks everything or
    the time passes `stop_at`.

    A free rank takes the operation of the lowest of `keys` (2, 3, N, Q) among those ready within `look` (2, 3), and
    waits for it; none starts earlier than `window` before its key. `form`: see `Instance.form`."""
    n = words.shape[0]
    mini = wait.shape[1]
    far = 1e300
    finish[:] = far
    count = np.zeros((n, 6), np.int64)
    free = np.zeros(n)
    memory = np.zeros(n)
    running = np.full(n, -1, np.int64)
    filled = np.zeros(n, np.int64)
    closed = np.zeros((2, mini), np.int64)
    closing = np.zeros((2, mini))
    kinds = 2 if form == 0 else 3
    release = kinds - 1
    onwards = 1 if form == 2 else 0
    backwards = onwards + 1
    # A rank that had nothing to do has nothing before `quiet`, unless a neighbour starts something.
    quiet = np.zeros(n)
    expected = np.zeros(n)
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
                quiet[x] = -1.0
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
                        if memory[x] + activation[m, x, q] > limit[x]:
                            continue
                        if q % group[m] == 0:
                            for other in range(2):
                                need = wait[m, q // group[m], other]
                                if need > 0:
                                    if closed[other, need - 1] < n:
                                        ready = far
                                    else:
                                        ready = max(ready, closing[other, need - 1] + step[other])
                    elif form == 2 or after[m, x] < 0:
                        ready = finish[m, kind - 1, x, q]
                    if kind == onwards:
                        if before[m, x] >= 0:
                            ready = max(ready, finish[m, kind, before[m, x], q] + comm[m, 0, x])
                    elif kind == backwards and after[m, x] >= 0:
                        ready = max(ready, finish[m, kind, after[m, x], q] + comm[m, 1, x])
                    if ready >= far:
                        continue
                    value = keys[m, kind, x, q]
                    ready = max(ready, value - window)
                    if ready > t + look[m, kind]:
                        soon = min(soon, ready)
                        noticed = min(noticed, ready - look[m, kind] - 1e-9 * ready)
                        continue
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
            words[x, filled[x]] = choice
            filled[x] += 1
            count[x, choice] = q + 1
            running[x] = choice
            free[x] = over
            todo -= 1
            end = max(end, over)
            upcoming = min(upcoming, over)
            woken = after[m, x] if kind == onwards else before[m, x] if kind == backwards else -1
            if woken >= 0:
                quiet[woken] = -1.0
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
            # An operation of length 0 cannot occur; a barrier that opened just now can.
            upcoming = np.nextafter(t, far)
        t = upcoming
    return end


@kernel
def justify(  # type: ignore[no-untyped-def]
    duration, activation, before, after, total, group, wait, step, comm, forms, limit, start, passes, seed,
    target, unit, stop, task, best_words,
):  # fmt: skip
    """`passes` listings from `start` (2, 3, N, Q), the ends of a schedule. `duration`, `activation`, `comm` and `forms`
    have one more axis: the instance, its mirror image. Fills `best_words` and returns their makespan, 1e300 where
    nothing is faster than `start`.

    Stops early at `target`, or where stop[i] is set for some i < task or for the last i, which says that time is up."""
    np.random.seed(seed)
    n, length = best_words.shape
    last = 1 if forms[0] == 0 else 2
    look = np.zeros((2, 3))
    words = np.zeros_like(best_words)
    finish = np.zeros(start.shape)
    keys = np.zeros(start.shape)
    held = start.copy()  # of the last listing that was kept, in the time of its own direction
    side = 0  # that direction
    current = 0.0
    for m in range(2):
        for x in range(n):
            current = max(current, start[m, last, x, total[m] - 1])
    best = current
    found = 1e300
    for trial in range(passes):
        if stop[-1]:
            return found
        if trial % 16 == 0:
            for i in range(task):
                if stop[i]:
                    return found
        noise = 2.0 * unit * np.random.random() ** 3
        shaken = np.random.random() < 0.7
        for m in range(2):
            for kind in range(last + 1):
                shift = noise * np.random.normal() if np.random.random() < 0.2 else 0.0
                look[m, kind] = np.random.random() ** 2 * unit if np.random.random() < 0.3 else 0.0
                for x in range(n):
                    for q in range(total[m]):
                        # An end in one direction's time is a start in the other's.
                        key = current - held[m, last - kind, x, total[m] - 1 - q] + shift
                        keys[m, kind, x, q] = key + noise * np.random.normal() if shaken else key
        window = unit * (1.0 + 20.0 * np.random.random() ** 2)
        end = list_by_keys(
            duration[1 - side], activation[1 - side], before, after, total, group, wait, step, comm[1 - side],
            forms[1 - side], limit, look, keys, window, current, finish, words,
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
                        best_words[x, i] = words[x, i]
                    else:
                        code = words[x, length - 1 - i]
                        best_words[x, i] = 3 * (code // 3) + last - code % 3
            if best <= target:
                stop[task] = 1
                return found
    return found
