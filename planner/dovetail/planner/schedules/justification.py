"""Kernel: forward-backward improvement of a schedule (Valls, Ballestin and Quintanilla, 2005, for project scheduling).

Operations are listed anew by the starts they had, alternately from the front and, on the mirror image in time, from the
back: what a list scheduler decides badly at one end it decides well from the other. The starts are shaken a little, so
that the search does not end at the first schedule that neither direction improves."""

from __future__ import annotations

import numpy as np

from dovetail.planner.schedules.jit import kernel
from dovetail.planner.schedules.listing import list_schedule


@kernel
def justify(  # type: ignore[no-untyped-def]
    duration, activation, before, after, position, stages, total, group, wait, step, comm, forms, limit,
    start, passes, seed, target, unit, stop, task, best_words,
):  # fmt: skip
    """`passes` listings from `start` (2, 3, N, Q), the ends of a schedule. `duration`, `activation`, `comm` and `forms`
    have one more axis: the instance, its mirror image. Fills `best_words` and returns their makespan, 1e300 where
    nothing is faster than `start`.

    Stops early at `target`, or where stop[i] is set for some i < task or for the last i, which says that time is up."""
    np.random.seed(seed)
    n, length = best_words.shape
    last = 1 if forms[0] == 0 else 2
    base = np.zeros((n, 6))
    slope = np.zeros((n, 6))
    look = np.zeros((2, 3))
    room = np.full((n, 2), 1 << 60)
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
        end = list_schedule(
            duration[1 - side], activation[1 - side], before, after, position, stages, total, group, wait, step,
            comm[1 - side], forms[1 - side], limit, base, slope, room, look, 0.0, 0.0, keys, window, current, finish,
            words,
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
