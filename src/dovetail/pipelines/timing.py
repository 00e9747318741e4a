"""Kernel: the times of a schedule given as one word per rank.

Micro-batches of a pipeline pass every stage in order, so a rank's schedule is a word of operation codes; the n-th
occurrence of a code is micro-batch n. Times are the longest paths through the operations."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.jit import kernel


@kernel
def run_words(  # type: ignore[no-untyped-def]
    words, length, duration, before, after, total, group, wait, step, comm, split, finish
):
    """Fill `finish` (2, 3, N, Q) with ends; returns the makespan, or -1 where the words deadlock.

    `comm` (2, 2, N): latency before rank x's forward and before its backward."""
    n = words.shape[0]
    mini = wait.shape[1]
    place = np.zeros(n, np.int64)
    free = np.zeros(n)
    count = np.zeros((n, 6), np.int64)
    closed = np.zeros((2, mini), np.int64)
    closing = np.zeros((2, mini))
    stack = np.zeros(n, np.int64)
    queued = np.ones(n, np.bool_)
    for x in range(n):
        stack[x] = x
    top = n
    last_kind = 2 if split else 1
    end = 0.0
    done = 0
    while top > 0:
        top -= 1
        x = stack[top]
        queued[x] = False
        while place[x] < length:
            code = words[x, place[x]]
            m = code // 3
            kind = code % 3
            q = count[x, code]
            if q >= total[m]:
                return -1.0
            ready = 0.0
            wake = -1
            if kind == 0:
                prior = before[m, x]
                if prior >= 0:
                    if count[prior, code] <= q:
                        break
                    ready = finish[m, 0, prior, q] + comm[m, 0, x]
                if q % group[m] == 0:
                    blocked = False
                    for other in range(2):
                        need = wait[m, q // group[m], other]
                        if need > 0:
                            if closed[other, need - 1] < n:
                                blocked = True
                                break
                            ready = max(ready, closing[other, need - 1] + step[other])
                    if blocked:
                        break
                wake = after[m, x]
            elif kind == 1:
                onward = after[m, x]
                if onward >= 0:
                    if count[onward, code] <= q:
                        break
                    ready = finish[m, 1, onward, q] + comm[m, 1, x]
                if count[x, code - 1] <= q:
                    break
                ready = max(ready, finish[m, 0, x, q])
                wake = before[m, x]
            elif count[x, code - 1] <= q:
                break
            t = max(free[x], ready) + duration[m, kind, x, q]
            finish[m, kind, x, q] = t
            free[x] = t
            count[x, code] += 1
            place[x] += 1
            done += 1
            end = max(end, t)
            if wake >= 0 and not queued[wake]:
                queued[wake] = True
                stack[top] = wake
                top += 1
            if kind == last_kind and (q + 1) % group[m] == 0:
                k = q // group[m]
                closed[m, k] += 1
                closing[m, k] = max(closing[m, k], t)
                if closed[m, k] == n:
                    for y in range(n):
                        if not queued[y] and y != x:
                            queued[y] = True
                            stack[top] = y
                            top += 1
    return end if done == n * length else -1.0


@kernel
def word_peak(word, length, x, activation, split):  # type: ignore[no-untyped-def]
    """Peak activation of rank x; -1 where a backward comes before its forward."""
    memory = 0.0
    peak = 0.0
    count = np.zeros(6, np.int64)
    release = 2 if split else 1
    for i in range(length):
        code = word[i]
        m = code // 3
        kind = code % 3
        if kind > 0 and count[code] >= count[code - 1]:
            return -1.0
        if kind == 0:
            memory += activation[m, x, count[code]]
            peak = max(peak, memory)
        elif kind == release:
            memory -= activation[m, x, count[code]]
        count[code] += 1
    return peak
