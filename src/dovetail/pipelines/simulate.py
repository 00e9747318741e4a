"""The simulator computes when every pass of a schedule runs, and how much memory each rank holds.

Arrays describe what is simulated. Axes: C chunks, N ranks, Q micro-batches, kinds F, B, W. A chunk is the part of a
model that ranks hold in one traversal of the pipeline, at most one stage on a rank. A model with one stage on each rank
is one chunk; a V-shaped or interleaved placement has several chunks a model. The links between stages are free, so a
placement of any shape can be simulated:

- `duration` (C, 3, N, Q): time of each pass. With whole backwards B is the backward. With split backwards B is the
  input gradient and W the weight gradient.
- `before`, `after` (C, N, 2): chunk and rank of the previous and the next stage, or -1 if there is none. `before[0, 3]`
  is the stage that sends activations to the stage of chunk 0 on rank 3.
- `latency` (C, 2, N): time of the message from the previous stage before F, and from the next stage before B.
- `total` (C,): micro-batches of all mini-batches; `group` (C,): micro-batches of one mini-batch.
- `wait` (C, n, C): `wait[c, k, o]` mini-batches of chunk o end everywhere before chunk c starts its mini-batch k.
  `step` (C,): time of the optimizer step that then follows. It may be a tuple: numba then compiles the kernels for this
  number of chunks, which makes their loops faster.

The order of a rank lists pass codes, KINDS * chunk + kind. Micro-batches pass a stage in ascending order, so the n-th
occurrence of a code is micro-batch n. Shorter orders end with -1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dovetail.pipelines.compat import light_kernel, part

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
F, B, W = 0, 1, 2
KINDS = 3


def one_f_one_b(stages: int, stage: int, micro_batches: int, backward: Sequence[int] = (B,)) -> list[int]:
    """The kinds of passes of one stage under 1F1B (PipeDream-Flush; Narayanan et al. 2021, section 2.2).

    The warm-up has `stages - stage` forwards. Then one backward and one forward run in turn, and then the remaining
    backwards. At most `stages - stage` micro-batches are in flight. `backward`: the kinds that make up a backward."""
    warm_up = min(stages - stage, micro_batches)
    back = list(backward)
    return [F] * warm_up + [*back, F] * (micro_batches - warm_up) + back * warm_up


@part
def opens(m, block, wait, step, closed, closing, n, far):  # type: ignore[no-untyped-def]
    """When the mini-batch `block` of chunk m may begin: after the optimizer steps that it waits for. `far`: not yet
    known."""
    ready = 0.0
    for other in range(len(step)):
        need = wait[m, block, other]
        if need > 0:
            ready = far if closed[other, need - 1] < n else max(ready, closing[other, need - 1] + step[other])
    return ready


@part
def _wake(x, queued, stack, top):  # type: ignore[no-untyped-def]
    """Puts a rank on the stack, once. Returns the number of ranks on it."""
    if queued[x]:
        return top
    queued[x] = True
    stack[top] = x
    return top + 1


@light_kernel
def run_orders(  # type: ignore[no-untyped-def]
    orders, duration, before, after, total, group, wait, step, latency, split, finish
):
    """Fill `finish` (C, 3, N, Q) with the ends of all passes. Returns the makespan, or -1 if the orders deadlock."""
    n, length = orders.shape
    chunks = len(step)
    place = np.zeros(n, np.int64)
    free = np.zeros(n)
    count = np.zeros((n, 3 * chunks), np.int64)
    # The ranks that have finished a mini-batch of a chunk. Those that do not hold the chunk count from the start.
    closed = np.full((chunks, wait.shape[1]), n, np.int64)
    closing = np.zeros((chunks, wait.shape[1]))
    stack = np.zeros(n, np.int64)
    queued = np.ones(n, np.bool_)
    todo = 0
    for x in range(n):
        stack[x] = x
        held = np.zeros(chunks, np.bool_)
        for i in range(length):
            if orders[x, i] >= 0:
                held[orders[x, i] // 3] = True
                todo += 1
        for c in range(chunks):
            if held[c]:
                for k in range(wait.shape[1]):
                    closed[c, k] -= 1
    top = n
    last_kind = 2 if split else 1
    end = 0.0
    while top > 0:
        top -= 1
        x = stack[top]
        queued[x] = False
        while place[x] < length:
            code = orders[x, place[x]]
            if code < 0:
                break
            c = code // 3
            kind = code % 3
            q = count[x, code]
            if q >= total[c]:
                return -1.0
            if kind > 0 and count[x, code - 1] <= q:
                break
            ready = 0.0
            wake = -1
            if kind == 0:
                prior = before[c, x, 1]
                if prior >= 0:
                    if count[prior, 3 * before[c, x, 0]] <= q:
                        break
                    ready = finish[before[c, x, 0], 0, prior, q] + latency[c, 0, x]
                if q % group[c] == 0:
                    ready = max(ready, opens(c, q // group[c], wait, step, closed, closing, n, 1e300))
                    if ready >= 1e300:
                        break
                wake = after[c, x, 1]
            elif kind == 1:
                onward = after[c, x, 1]
                if onward >= 0:
                    if count[onward, 3 * after[c, x, 0] + 1] <= q:
                        break
                    ready = finish[after[c, x, 0], 1, onward, q] + latency[c, 1, x]
                ready = max(ready, finish[c, 0, x, q])
                wake = before[c, x, 1]
            t = max(free[x], ready) + duration[c, kind, x, q]
            finish[c, kind, x, q] = t
            free[x] = t
            count[x, code] += 1
            place[x] += 1
            todo -= 1
            end = max(end, t)
            if wake >= 0:
                top = _wake(wake, queued, stack, top)
            if kind == last_kind and (q + 1) % group[c] == 0:
                k = q // group[c]
                closed[c, k] += 1
                closing[c, k] = max(closing[c, k], t)
                if closed[c, k] == n:
                    for y in range(n):
                        if y != x:
                            top = _wake(y, queued, stack, top)
    return end if todo == 0 else -1.0


@light_kernel
def order_peak(order, x, activation, split):  # type: ignore[no-untyped-def]
    """The peak activation memory of rank x, or -1 if a backward comes before its forward. `activation` (C, N, Q) is
    held from the start of F to the end of B, or of W with split backwards."""
    memory = 0.0
    peak = 0.0
    count = np.zeros(3 * activation.shape[0], np.int64)
    release = 2 if split else 1
    for code in order:
        if code < 0:
            break
        c = code // 3
        kind = code % 3
        if kind > 0 and count[code] >= count[code - 1]:
            return -1.0
        if kind == 0:
            memory += activation[c, x, count[code]]
            peak = max(peak, memory)
        elif kind == release:
            memory -= activation[c, x, count[code]]
        count[code] += 1
    return peak
