"""Kernel: simulated annealing by moves on the critical path, under a hard limit of activation memory.

A move takes one operation some places forward or back within its rank's word. Two things make it fast: the peak
memory of a rank depends on its word alone, so a move that breaks the limit is refused before any time is computed; and
times are updated only where they change, given up as soon as one operation's end plus the least that must follow it
(`tail`) exceeds what would be accepted. A move that closes a cycle grows past that bound and is refused as well."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.jit import kernel
from dovetail.pipelines.timing import run_words, word_peak


@kernel
def anneal(  # type: ignore[no-untyped-def]
    words, length, duration, tail, activation, before, after, total, group, wait, step, comm, split, limit,
    price, target, moves, hot, cold, reach, seed, stop, task, best_words,
):  # fmt: skip
    """Minimise max(makespan, target) + price * (memory above `limit`, summed over ranks); price < 0: a hard limit.

    `limit` (N,). Temperatures `hot` to `cold` in units of time over `moves` moves of up to `reach` places. Returns
    (best energy, its makespan); stops at `target` within the limit, or where stop[i] is set for some i < task or for
    the last i, which says that time is up."""
    np.random.seed(seed)
    n = words.shape[0]
    finish = np.zeros(duration.shape)
    word = words.copy()
    index = np.zeros(word.shape, np.int64)
    where = np.zeros(duration.shape, np.int64)
    for x in range(n):
        count = np.zeros(6, np.int64)
        for i in range(length):
            code = word[x, i]
            index[x, i] = count[code]
            where[code // 3, code % 3, x, count[code]] = i
            count[code] += 1
    makespan = run_words(word, length, duration, before, after, total, group, wait, step, comm, split, finish)
    peaks = np.zeros(n)
    over = 0.0
    for x in range(n):
        peaks[x] = word_peak(word[x], length, x, activation, split)
        over += max(0.0, peaks[x] - limit[x])
    hard = price < 0.0
    weight = max(price, 0.0)
    energy = max(makespan, target) + weight * over
    best = energy
    best_makespan = makespan
    best_words[:] = word
    tiny = 1e-9 * max(1.0, target)
    if makespan <= target + tiny and over <= 1e-9:
        stop[task] = 1
        return best, best_makespan
    last_kind = 2 if split else 1
    size = n * length
    queue_x = np.zeros(size, np.int64)
    queue_i = np.zeros(size, np.int64)
    pending = np.zeros((n, length), np.bool_)
    log_x = np.zeros(size, np.int64)
    log_op = np.zeros(size, np.int64)
    log_q = np.zeros(size, np.int64)
    log_t = np.zeros(size)
    seen = np.zeros(duration.shape, np.int64)
    path_x = np.zeros(size + 1, np.int64)
    path_i = np.zeros(size + 1, np.int64)
    path_length = 0
    stale = True
    save_code = np.zeros(length, np.int64)
    save_index = np.zeros(length, np.int64)
    lowest = np.zeros(6, np.int64)
    ratio = np.log(cold / hot)
    for move in range(moves):
        if move % 64 == 0:
            if stop[-1]:
                return best, best_makespan
            for i in range(task):
                if stop[i]:
                    return best, best_makespan
        heat = hot * np.exp(ratio * move / moves)
        if stale and makespan > target + tiny:
            path_length = _critical_path(
                word, index, where, finish, duration, before, after, group, wait, step, comm, length, makespan,
                last_kind, path_x, path_i,
            )  # fmt: skip
            stale = False
        chance = np.random.random()
        if makespan > target + tiny and chance < 0.8 and path_length > 0:
            r = np.random.randint(path_length)
            x = path_x[r]
            i = path_i[r]
        else:
            x = np.random.randint(n)
            if not hard and over > 1e-9 and chance < 0.9:
                for _ in range(4 * n):
                    if peaks[x] > limit[x] + 1e-9:
                        break
                    x = np.random.randint(n)
            i = np.random.randint(length)
        jump = 1 + int(np.random.random() ** 2 * reach)
        if np.random.random() < 0.5:
            jump = -jump
        to = i + jump
        if to < 0 or to >= length:
            continue
        code = word[x, i]
        low = min(i, to)
        high = max(i, to)
        changes = False
        for z in range(low, high + 1):
            save_code[z] = word[x, z]
            save_index[z] = index[x, z]
            if word[x, z] != code:
                changes = True
        if not changes:
            continue
        if jump < 0:
            for z in range(i, to, -1):
                word[x, z] = word[x, z - 1]
        else:
            for z in range(i, to):
                word[x, z] = word[x, z + 1]
        word[x, to] = code
        peak = word_peak(word[x], length, x, activation, split)
        accepted = False
        logged = 0
        if peak >= 0.0 and (not hard or peak <= limit[x] + 1e-9):
            new_over = over - max(0.0, peaks[x] - limit[x]) + max(0.0, peak - limit[x])
            allowed = energy - heat * np.log(np.random.random() + 1e-300)
            bound = allowed - weight * new_over
            if target <= bound:
                # Micro-batches stay in order: renumber the occurrences within the range.
                for c in range(6):
                    lowest[c] = 1 << 60
                for z in range(low, high + 1):
                    c = save_code[z]
                    lowest[c] = min(lowest[c], save_index[z])
                for z in range(low, high + 1):
                    c = word[x, z]
                    index[x, z] = lowest[c]
                    where[c // 3, c % 3, x, lowest[c]] = z
                    lowest[c] += 1
                head = 0
                held = 0
                for z in range(low, min(high + 2, length)):
                    queue_x[held] = x
                    queue_i[held] = z
                    pending[x, z] = True
                    held += 1
                fits = True
                budget = 8 * size
                limit_time = bound + tiny
                while held > 0:
                    y = queue_x[head]
                    j = queue_i[head]
                    head += 1
                    if head == size:
                        head = 0
                    held -= 1
                    pending[y, j] = False
                    budget -= 1
                    c = word[y, j]
                    q = index[y, j]
                    m = c // 3
                    kind = c % 3
                    start = 0.0
                    if j > 0:
                        c0 = word[y, j - 1]
                        start = finish[c0 // 3, c0 % 3, y, index[y, j - 1]]
                    if kind == 0:
                        prior = before[m, y]
                        if prior >= 0:
                            start = max(start, finish[m, 0, prior, q] + comm[m, 0, y])
                        if q % group[m] == 0:
                            for other in range(2):
                                need = wait[m, q // group[m], other]
                                if need > 0:
                                    last = need * group[other] - 1
                                    for z in range(n):
                                        start = max(start, finish[other, last_kind, z, last] + step[other])
                    elif kind == 1:
                        onward = after[m, y]
                        if onward >= 0:
                            start = max(start, finish[m, 1, onward, q] + comm[m, 1, y])
                        else:
                            start = max(start, finish[m, 0, y, q])
                    else:
                        start = max(start, finish[m, 1, y, q])
                    t = start + duration[m, kind, y, q]
                    old = finish[m, kind, y, q]
                    if t == old:
                        continue
                    if t + tail[m, kind, y, q] > limit_time or budget < 0:
                        fits = False
                        break
                    if seen[m, kind, y, q] != move + 1:
                        seen[m, kind, y, q] = move + 1
                        log_x[logged] = y
                        log_op[logged] = c
                        log_q[logged] = q
                        log_t[logged] = old
                        logged += 1
                    finish[m, kind, y, q] = t
                    # Whatever starts after this operation.
                    for way in range(3):
                        ny = -1
                        nj = -1
                        if way == 0:
                            if j + 1 < length:
                                ny = y
                                nj = j + 1
                        elif way == 1:
                            if kind == 0:
                                ny = after[m, y]
                                if ny >= 0:
                                    nj = where[m, 0, ny, q]
                                else:
                                    ny = y
                                    nj = where[m, 1, y, q]
                            elif kind == 1:
                                ny = before[m, y]
                                if ny >= 0:
                                    nj = where[m, 1, ny, q]
                        elif kind == 1 and split:
                            ny = y
                            nj = where[m, 2, y, q]
                        if ny >= 0 and not pending[ny, nj]:
                            pending[ny, nj] = True
                            slot = head + held
                            if slot >= size:
                                slot -= size
                            queue_x[slot] = ny
                            queue_i[slot] = nj
                            held += 1
                    if kind == last_kind and (q + 1) % group[m] == 0:
                        done = q // group[m] + 1
                        for other in range(2):
                            for k in range(wait.shape[1]):
                                if wait[other, k, m] == done:
                                    for ny in range(n):
                                        nj = where[other, 0, ny, k * group[other]]
                                        if not pending[ny, nj]:
                                            pending[ny, nj] = True
                                            slot = head + held
                                            if slot >= size:
                                                slot -= size
                                            queue_x[slot] = ny
                                            queue_i[slot] = nj
                                            held += 1
                while held > 0:
                    pending[queue_x[head], queue_i[head]] = False
                    head += 1
                    if head == size:
                        head = 0
                    held -= 1
                if fits:
                    new_makespan = 0.0
                    for y in range(n):
                        c = word[y, length - 1]
                        new_makespan = max(new_makespan, finish[c // 3, c % 3, y, index[y, length - 1]])
                    new_energy = max(new_makespan, target) + weight * new_over
                    if new_energy <= allowed + tiny:
                        accepted = True
                        makespan = new_makespan
                        energy = new_energy
                        over = new_over
                        peaks[x] = peak
                        stale = True
                        if energy < best - tiny or (energy <= best + tiny and makespan < best_makespan - tiny):
                            best = energy
                            best_makespan = makespan
                            best_words[:] = word
                            if makespan <= target + tiny and over <= 1e-9:
                                stop[task] = 1
                                return best, best_makespan
                if not accepted:
                    for z in range(logged - 1, -1, -1):
                        c = log_op[z]
                        finish[c // 3, c % 3, log_x[z], log_q[z]] = log_t[z]
        if not accepted:
            for z in range(low, high + 1):
                c = save_code[z]
                word[x, z] = c
                index[x, z] = save_index[z]
                where[c // 3, c % 3, x, save_index[z]] = z
    return best, best_makespan


@kernel
def _critical_path(  # type: ignore[no-untyped-def]
    word, index, where, finish, duration, before, after, group, wait, step, comm, length, makespan, last_kind,
    path_x, path_i,
):  # fmt: skip
    """Positions of one path, chosen at random at each fork, that determines the makespan; returns its length."""
    n = word.shape[0]
    x = np.random.randint(n)
    for _ in range(n):
        c = word[x, length - 1]
        if finish[c // 3, c % 3, x, index[x, length - 1]] == makespan:
            break
        x = (x + 1) % n
    i = length - 1
    found = 0
    while i >= 0 and found < path_x.size:
        path_x[found] = x
        path_i[found] = i
        found += 1
        c = word[x, i]
        m = c // 3
        kind = c % 3
        q = index[x, i]
        t = finish[m, kind, x, q]
        own = False
        if i > 0:
            c0 = word[x, i - 1]
            own = finish[c0 // 3, c0 % 3, x, index[x, i - 1]] + duration[m, kind, x, q] == t
        other_x = -1
        other_i = -1
        if kind == 0:
            prior = before[m, x]
            if prior >= 0 and (finish[m, 0, prior, q] + comm[m, 0, x]) + duration[m, 0, x, q] == t:
                other_x = prior
                other_i = where[m, 0, prior, q]
            elif q % group[m] == 0:
                for other in range(2):
                    need = wait[m, q // group[m], other]
                    if need > 0:
                        last = need * group[other] - 1
                        for z in range(n):
                            if (finish[other, last_kind, z, last] + step[other]) + duration[m, 0, x, q] == t:
                                other_x = z
                                other_i = where[other, last_kind, z, last]
        elif kind == 1:
            onward = after[m, x]
            if onward >= 0:
                if (finish[m, 1, onward, q] + comm[m, 1, x]) + duration[m, 1, x, q] == t:
                    other_x = onward
                    other_i = where[m, 1, onward, q]
            elif finish[m, 0, x, q] + duration[m, 1, x, q] == t:
                other_x = x
                other_i = where[m, 0, x, q]
        elif finish[m, 1, x, q] + duration[m, 2, x, q] == t:
            other_x = x
            other_i = where[m, 1, x, q]
        if own and other_x >= 0 and np.random.random() < 0.5:
            other_x = -1
        if other_x >= 0:
            x = other_x
            i = other_i
        elif own:
            i -= 1
        else:
            break
    return found
