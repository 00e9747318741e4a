"""The kernel of simulated annealing by moves on the critical path, under a limit of activation memory.

A move takes one pass some places forward or back within its rank's order. Two things make a move fast. The peak memory
of a rank depends on its order alone, so a move that exceeds the limit is rejected before any time is computed. Times
are updated only where they change, and the update ends as soon as one pass's end plus the least time that must follow
it (`tail`) exceeds what would be accepted. A move that closes a cycle exceeds that too."""

from __future__ import annotations

import numpy as np

from dovetail.pipelines.compat import kernel, part
from dovetail.pipelines.simulate import order_peak, run_orders


@kernel
def anneal(  # type: ignore[no-untyped-def]
    orders, duration, before, after, total, group, wait, step, latency, split, tail, activation, limit,
    target, moves, hot, cold, reach, seed, stop, task, best_orders,
):  # fmt: skip
    """Minimise the makespan of `orders`, which keep to the memory limit `limit`. Fills `best_orders` and returns their
    makespan.

    The temperature falls from `hot` to `cold`, in units of time, over `moves` moves of up to `reach` places. The kernel
    stops at the makespan `target`, or if stop[i] is set for some i < task. The last element of `stop` says that the
    time is up."""
    np.random.seed(seed)
    n, length = orders.shape
    chunks = len(step)
    finish = np.zeros(duration.shape)
    order = orders.copy()
    index = np.zeros(order.shape, np.int64)
    where = np.zeros(duration.shape, np.int64)
    _number(order, index, where, chunks)
    makespan = run_orders(order, duration, before, after, total, group, wait, step, latency, split, finish)
    energy = max(makespan, target)
    best = makespan
    best_orders[:] = order
    tiny = 1e-9 * max(1.0, target)
    if makespan <= target + tiny:
        stop[task] = 1
        return best
    last_kind = 2 if split else 1
    first, final = _borders(total, group, np.zeros((chunks, duration.shape[3]), np.bool_))
    size = n * length
    queue = np.zeros((2, size), np.int64)
    pending = np.zeros((n, length), np.bool_)
    log = np.zeros((3, size), np.int64)
    log_t = np.zeros(size)
    seen = np.zeros(duration.shape, np.int64)
    path_x = np.zeros(size + 1, np.int64)
    path_i = np.zeros(size + 1, np.int64)
    path_length = 0
    stale = True
    save_code = np.zeros(length, np.int64)
    save_index = np.zeros(length, np.int64)
    lowest = np.zeros(3 * chunks, np.int64)
    ratio = np.log(cold / hot)
    for move in range(moves):
        if move % 64 == 0 and (stop[-1] or stop[:task].any()):
            return best
        heat = hot * np.exp(ratio * move / moves)
        if stale and makespan > target + tiny:
            path_length = _critical_path(
                order, index, where, finish, duration, before, after, group, wait, step, latency, makespan, last_kind,
                path_x, path_i,
            )  # fmt: skip
            stale = False
        x, i, to = _pick(path_x, path_i, path_length if makespan > target + tiny else -1, n, length, reach)
        if to < 0 or to >= length:
            continue
        low = min(i, to)
        high = max(i, to)
        if not _shift(order, index, x, i, to, save_code, save_index):
            continue
        peak = order_peak(order[x], x, activation, split)
        accepted = False
        if 0.0 <= peak <= limit + 1e-9:
            allowed = energy - heat * np.log(np.random.random() + 1e-300)
            if target <= allowed:
                _renumber(order, index, where, x, low, high, save_code, save_index, lowest)
                fits, logged = _update(
                    move + 1, x, low, high, allowed + tiny, order, index, where, finish, duration, before, after, group,
                    wait, step, latency, tail, first, final, last_kind, queue, pending, log, log_t, seen,
                )  # fmt: skip
                if fits:
                    new_makespan = 0.0
                    for y in range(n):
                        c = order[y, length - 1]
                        new_makespan = max(new_makespan, finish[c // 3, c % 3, y, index[y, length - 1]])
                    if max(new_makespan, target) <= allowed + tiny:
                        accepted = True
                        makespan = new_makespan
                        energy = max(makespan, target)
                        stale = True
                        if makespan < best - tiny:
                            best = makespan
                            best_orders[:] = order
                            if makespan <= target + tiny:
                                stop[task] = 1
                                return best
                if not accepted:
                    for z in range(logged - 1, -1, -1):
                        c = log[1, z]
                        finish[c // 3, c % 3, log[0, z], log[2, z]] = log_t[z]
        if not accepted:
            for z in range(low, high + 1):
                c = save_code[z]
                order[x, z] = c
                index[x, z] = save_index[z]
                where[c // 3, c % 3, x, save_index[z]] = z
    return best


@part
def _number(order, index, where, chunks):  # type: ignore[no-untyped-def]
    """Fills `index`, the micro-batch of each place of an order, and `where`, the place of each micro-batch's pass."""
    for x in range(order.shape[0]):
        count = np.zeros(3 * chunks, np.int64)
        for i in range(order.shape[1]):
            code = order[x, i]
            index[x, i] = count[code]
            where[code // 3, code % 3, x, count[code]] = i
            count[code] += 1


@part
def _borders(total, group, nothing):  # type: ignore[no-untyped-def]
    """Tables of the first and the last micro-batches of mini-batches. A look-up is faster than a division."""
    first = nothing.copy()
    final = nothing.copy()
    for m in range(nothing.shape[0]):
        for q in range(total[m]):
            first[m, q] = q % group[m] == 0
            final[m, q] = (q + 1) % group[m] == 0
    return first, final


@part
def _pick(path_x, path_i, path_length, n, length, reach):  # type: ignore[no-untyped-def]
    """A random move: rank, place and new place. Most moves begin on the critical path. `path_length` is -1 if there is
    none to shorten."""
    chance = np.random.random()
    if path_length > 0 and chance < 0.8:
        r = np.random.randint(path_length)
        x = path_x[r]
        i = path_i[r]
    else:
        x = np.random.randint(n)
        i = np.random.randint(length)
    jump = 1 + int(np.random.random() ** 2 * reach)
    if np.random.random() < 0.5:
        jump = -jump
    return x, i, i + jump


@part
def _shift(order, index, x, i, to, save_code, save_index):  # type: ignore[no-untyped-def]
    """Takes the pass at place i to the place `to`, and saves what was there. Returns False, and does nothing, if all
    passes between are alike."""
    code = order[x, i]
    changes = False
    for z in range(min(i, to), max(i, to) + 1):
        save_code[z] = order[x, z]
        save_index[z] = index[x, z]
        if order[x, z] != code:
            changes = True
    if not changes:
        return False
    if to < i:
        for z in range(i, to, -1):
            order[x, z] = order[x, z - 1]
    else:
        for z in range(i, to):
            order[x, z] = order[x, z + 1]
    order[x, to] = code
    return True


@part
def _renumber(order, index, where, x, low, high, save_code, save_index, lowest):  # type: ignore[no-untyped-def]
    """Micro-batches stay in order: number the occurrences within the range anew."""
    for c in range(lowest.size):
        lowest[c] = 1 << 60
    for z in range(low, high + 1):
        c = save_code[z]
        lowest[c] = min(lowest[c], save_index[z])
    for z in range(low, high + 1):
        c = order[x, z]
        index[x, z] = lowest[c]
        where[c // 3, c % 3, x, lowest[c]] = z
        lowest[c] += 1


@part
def _update(  # type: ignore[no-untyped-def]
    stamp, x, low, high, limit_time, order, index, where, finish, duration, before, after, group, wait, step, latency,
    tail, first, final, last_kind, queue, pending, log, log_t, seen,
):  # fmt: skip
    """Updates `finish` after a move of rank x between the places low and high. Returns whether all passes fit into
    `limit_time`, and how many former ends are in `log` and `log_t`."""
    length = order.shape[1]
    size = log_t.size
    logged = 0
    head = 0
    held = 0
    for z in range(low, min(high + 2, length)):
        held = _push(x, z, head, held, queue, pending)
    fits = True
    budget = 8 * size
    while held > 0:
        y = queue[0, head]
        j = queue[1, head]
        head += 1
        if head == size:
            head = 0
        held -= 1
        pending[y, j] = False
        budget -= 1
        c = order[y, j]
        q = index[y, j]
        m = c // 3
        kind = c % 3
        start = 0.0
        if j > 0:
            c0 = order[y, j - 1]
            start = finish[c0 // 3, c0 % 3, y, index[y, j - 1]]
        start = _earliest(m, kind, y, q, start, finish, before, after, group, wait, step, latency, first, last_kind)
        t = start + duration[m, kind, y, q]
        old = finish[m, kind, y, q]
        if t == old:
            continue
        if t + tail[m, kind, y, q] > limit_time or budget < 0:
            fits = False
            break
        if seen[m, kind, y, q] != stamp:
            seen[m, kind, y, q] = stamp
            log[0, logged] = y
            log[1, logged] = c
            log[2, logged] = q
            log_t[logged] = old
            logged += 1
        finish[m, kind, y, q] = t
        if j + 1 < length:
            held = _push(y, j + 1, head, held, queue, pending)
        held = _push_dependents(m, kind, y, q, head, held, queue, pending, where, before, after, last_kind)
        if kind == last_kind and final[m, q]:
            held = _push_opened(m, q // group[m] + 1, head, held, queue, pending, where, group, wait)
    while held > 0:
        pending[queue[0, head], queue[1, head]] = False
        head += 1
        if head == size:
            head = 0
        held -= 1
    return fits, logged


@part
def _push(y, j, head, held, queue, pending):  # type: ignore[no-untyped-def]
    """Puts the pass at place j of rank y into the ring, once. Returns the number of passes in it."""
    if pending[y, j]:
        return held
    pending[y, j] = True
    slot = head + held
    if slot >= queue.shape[1]:
        slot -= queue.shape[1]
    queue[0, slot] = y
    queue[1, slot] = j
    return held + 1


@part
def _earliest(  # type: ignore[no-untyped-def]
    m, kind, y, q, start, finish, before, after, group, wait, step, latency, first, last_kind
):
    """The earliest start of a pass whose rank is free at `start`."""
    if kind == 0:
        prior = before[m, y, 1]
        if prior >= 0:
            start = max(start, finish[before[m, y, 0], 0, prior, q] + latency[m, 0, y])
        if first[m, q]:
            for other in range(len(step)):
                need = wait[m, q // group[m], other]
                if need > 0:
                    last = need * group[other] - 1
                    for z in range(finish.shape[2]):
                        start = max(start, finish[other, last_kind, z, last] + step[other])
    elif kind == 1:
        onward = after[m, y, 1]
        if onward >= 0:
            start = max(start, finish[after[m, y, 0], 1, onward, q] + latency[m, 1, y])
        else:
            start = max(start, finish[m, 0, y, q])
    else:
        start = max(start, finish[m, 1, y, q])
    return start


@part
def _push_dependents(  # type: ignore[no-untyped-def]
    m, kind, y, q, head, held, queue, pending, where, before, after, last_kind
):
    """Puts the passes of the same micro-batch that start after this one into the ring."""
    if kind == 0:
        ny = after[m, y, 1]
        if ny >= 0:
            return _push(ny, where[after[m, y, 0], 0, ny, q], head, held, queue, pending)
        return _push(y, where[m, 1, y, q], head, held, queue, pending)
    if kind == 1:
        ny = before[m, y, 1]
        if ny >= 0:
            held = _push(ny, where[before[m, y, 0], 1, ny, q], head, held, queue, pending)
        if last_kind == 2:
            held = _push(y, where[m, 2, y, q], head, held, queue, pending)
    return held


@part
def _push_opened(m, done, head, held, queue, pending, where, group, wait):  # type: ignore[no-untyped-def]
    """Puts the first forwards that wait for `done` mini-batches of chunk m into the ring."""
    for other in range(wait.shape[0]):
        for k in range(wait.shape[1]):
            if wait[other, k, m] == done:
                for ny in range(where.shape[2]):
                    held = _push(ny, where[other, 0, ny, k * group[other]], head, held, queue, pending)
    return held


@part
def _critical_path(  # type: ignore[no-untyped-def]
    order, index, where, finish, duration, before, after, group, wait, step, latency, makespan, last_kind,
    path_x, path_i,
):  # fmt: skip
    """Fills `path_x` and `path_i` with the ranks and places of one critical path, chosen at random at each fork.
    Returns its length."""
    n, length = order.shape
    x = np.random.randint(n)
    for _ in range(n):
        c = order[x, length - 1]
        if finish[c // 3, c % 3, x, index[x, length - 1]] == makespan:
            break
        x = (x + 1) % n
    i = length - 1
    entered = 0
    while i >= 0 and entered < path_x.size:
        path_x[entered] = x
        path_i[entered] = i
        entered += 1
        c = order[x, i]
        m = c // 3
        kind = c % 3
        q = index[x, i]
        t = finish[m, kind, x, q]
        own = False
        if i > 0:
            c0 = order[x, i - 1]
            own = finish[c0 // 3, c0 % 3, x, index[x, i - 1]] + duration[m, kind, x, q] == t
        other_x = -1
        other_i = -1
        if kind == 0:
            prior = before[m, x, 1]
            p = before[m, x, 0]
            if prior >= 0 and (finish[p, 0, prior, q] + latency[m, 0, x]) + duration[m, 0, x, q] == t:
                other_x = prior
                other_i = where[p, 0, prior, q]
            elif q % group[m] == 0:
                for other in range(len(step)):
                    need = wait[m, q // group[m], other]
                    if need > 0:
                        last = need * group[other] - 1
                        for z in range(n):
                            if (finish[other, last_kind, z, last] + step[other]) + duration[m, 0, x, q] == t:
                                other_x = z
                                other_i = where[other, last_kind, z, last]
        elif kind == 1:
            onward = after[m, x, 1]
            p = after[m, x, 0]
            if onward >= 0:
                if (finish[p, 1, onward, q] + latency[m, 1, x]) + duration[m, 1, x, q] == t:
                    other_x = onward
                    other_i = where[p, 1, onward, q]
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
    return entered
