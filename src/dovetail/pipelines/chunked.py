"""Published schedules of one model with several stages per rank. Each is the order of one rank for one mini-batch.

Each rule takes an instance, a rank and the number of a model, and returns the rank's pass codes in order. Interleaved
1F1B is Narayanan et al. 2021, section 2.2. ZB-V is Qi et al., arXiv 2401.10241, section 6. V-Half and V-Min are Qi et
al., arXiv 2405.15362, section 3. torch ships the first two as `ScheduleInterleaved1F1B` and `ScheduleZBVZeroBubble`."""

from __future__ import annotations

import itertools
from functools import lru_cache

from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.simulate import KINDS, B, F, W


def interleaved(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """Interleaved 1F1B. A rank runs forwards of one chunk for as many micro-batches as there are ranks, and then those
    of the next chunk.

    If the number of micro-batches is not a multiple of the ranks, the rounds are longer, as in torch."""
    p, place = instance.place(rank, m)
    chunks, count = list(instance.chunks(m)), instance.problem.models[m].micro_batches
    rounds = max(1, count // p)
    size, longer = divmod(count, rounds)
    sizes = [size + 1] * longer + [size] * (rounds - longer)
    forwards = [KINDS * c + F for each in sizes for c in chunks for _ in range(each)]
    backwards = [KINDS * c + B for each in sizes for c in reversed(chunks) for _ in range(each)]
    # The last chunk's first backward follows its first forward on the last rank, and travels one rank in two passes.
    warm_up = min(len(forwards), (len(chunks) - 1) * sizes[0] + 2 * (p - 1 - place))
    order = forwards[:warm_up]
    for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
        order += [code for code in (forward, backward) if code is not None]
    return order


def zb_v(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """ZB-V. It has no bubbles after the warm-up if forward, input gradient and weight gradient take equal times. If
    backwards are whole, the weight gradients are left out."""
    p, place = instance.place(rank, m)
    down, up = (KINDS * c for c in instance.chunks(m))
    count = instance.problem.models[m].micro_batches
    many = max(2 * p - 1, count)  # the rule must fill the pipeline; surplus micro-batches are left out below
    order = [down + F] * (2 * (p - place) - 1) + [up + F, down + F] * place + [up + F, up + B, up + W] * (p - place)
    while order.count(up + F) < many:
        if order.count(down + F) < many:
            order.append(down + F)
        order += [down + B, down + W, up + F, up + B, up + W]
    order += [down + B, up + B] * place + [down + B, down + W] * (p - place)
    order += [up + W] * (many - order.count(up + W)) + [down + W] * (many - order.count(down + W))
    done = dict.fromkeys(range(down, up + KINDS), 0) | dict.fromkeys(range(up, up + KINDS), 0)
    kept = []
    for code in order:
        done[code] += 1
        if done[code] <= count and code % KINDS < instance.kinds:
            kept.append(code)
    return kept


def v_half(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """V-Half: half of the activation memory of 1F1B."""
    return _repeated(instance, rank, m, (2, 1))


def v_min(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """V-Min: a third of the activation memory of 1F1B."""
    return _repeated(instance, rank, m, (1, 1))


def one_by_one(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """One micro-batch after the other, with any number of chunks. No other schedule needs less memory. Under a limit of
    memory as many at once as fit."""
    problem, chunks = instance.problem, list(instance.chunks(m))
    count, limit = problem.models[m].micro_batches, problem.memory_limit
    together = 1 if limit is None else max(1, int(limit / (problem.least_memory_of(len(chunks)) or limit)))
    order: list[int] = []
    for begun in range(0, count, together):
        turn = [KINDS * c + F for c in chunks]
        turn += [KINDS * c + kind for kind in range(B, instance.kinds) for c in chunks[::-1]]
        order += [code for code in turn for _ in range(min(together, count - begun))]
    return order


PERIOD = 6
"""Time units between two micro-batches: a rank runs three kinds of passes in two chunks, one unit each."""


def _repeated(instance: SearchInstance, rank: int, m: int, distances: tuple[int, int]) -> list[int]:
    p, place = instance.place(rank, m)
    chunks, count = list(instance.chunks(m)), instance.problem.models[m].micro_batches
    block = _building_block(p, distances)[place]
    timed = [(start + PERIOD * q, KINDS * chunks[c] + kind) for (c, kind), start in block.items() for q in range(count)]
    return [code for _, code in sorted(timed)]


@lru_cache(maxsize=64)
def _building_block(p: int, distances: tuple[int, int]) -> list[dict[tuple[int, int], int]]:
    """The starts of the six passes of one micro-batch on each rank, by (chunk, kind), in units of time.

    `distances`: the time from one rank to the next, in the forward of the first chunk and in that of the second. The
    input gradient of the second chunk takes the first of these times, and that of the first chunk takes the second. The
    three turns are delayed as little as possible. Micro-batches with `PERIOD` units of time between them must never
    meet."""
    slow, fast = distances
    for delays in sorted(itertools.product(range(PERIOD), repeat=3), key=sum):
        block = []
        for x in range(p):
            turn = slow * (p - 1) + 1 + delays[0]
            back = turn + fast * (p - 1) + 1 + delays[1]
            last = back + slow * (p - 1) + 1 + delays[2]
            starts = {
                (0, F): slow * x,
                (1, F): turn + fast * (p - 1 - x),
                (1, B): back + slow * x,
                (0, B): last + fast * (p - 1 - x),
            }
            if len({start % PERIOD for start in starts.values()}) < len(starts):
                break
            for c in (1, 0):
                taken = {start % PERIOD for start in starts.values()}
                starts[c, W] = next(t for t in itertools.count(starts[c, B] + 1) if t % PERIOD not in taken)
            block.append(starts)
        else:
            return block
    raise AssertionError(f"no building block for {p} ranks")
