"""The simulator of pipeline schedules: stages in any placement, against a slow computation of the same times."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    COMPILED,
    ModelPipelines,
    ScheduleProblem,
    SearchEffort,
    evaluate,
    family_instance,
    family_of,
    find,
    fixed_orders,
    one_f_one_b,
)
from dovetail.pipelines.compat import kernel
from dovetail.pipelines.schedule import timing_arguments
from dovetail.pipelines.simulate import order_peak, run_orders
from helpers.patience import PATIENCE


def relaxed(orders, duration, before, after, latency):
    """Ends of all passes by repeated relaxation."""
    end = np.zeros_like(duration)
    for _ in range(duration.size):
        old = end.copy()
        for x, order in enumerate(orders):
            count, free = {}, 0.0
            for code in order:
                c, kind, q = code // 3, code % 3, count.get(code, 0)
                count[code] = q + 1
                start = free
                if kind:
                    start = max(start, end[c, kind - 1, x, q])
                if kind < 2 and (link := (before, after)[kind][c, x])[1] >= 0:
                    start = max(start, end[link[0], kind, link[1], q] + latency[c, kind, x])
                free = end[c, kind, x, q] = start + duration[c, kind, x, q]
        if (old == end).all():
            return end
    raise AssertionError("the orders have a cycle")


def one_model(forward, backward, latency=0.0):
    """The ends of one model's passes under 1F1B, (2, stages, micro-batches)."""
    model = ModelPipelines("actor", *forward.shape, forward[None], backward[None])
    instance = family_instance(ScheduleProblem((model,), latency), family_of("serial"))
    ends = np.zeros((2, *forward.shape))
    for p in evaluate(instance, fixed_orders(instance, family_of("serial"))).passes():
        ends["FB".index(p.kind), p.rank, p.micro_batch] = p.end
    return ends


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 12), st.floats(0, 2), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_1f1b_of_unequal_micro_batches(stages, count, latency, seed):
    rng = np.random.default_rng(seed)
    forward, backward = rng.uniform(1, 3, (2, stages, count))
    ends = one_model(forward, backward, latency)
    orders = [one_f_one_b(stages, stage, count) for stage in range(stages)]
    before = np.array([[(0, stage - 1) for stage in range(stages)]])
    after = np.array([[(0, stage + 1 if stage + 1 < stages else -1) for stage in range(stages)]])
    duration = np.zeros((1, 3, stages, count))
    duration[0, 0], duration[0, 1] = forward, backward
    slow = relaxed(orders, duration, before, after, np.full((1, 2, stages), latency))
    assert ends == pytest.approx(slow[0, :2])


def test_1f1b_of_equal_stages_is_its_formula():
    ends = one_model(np.full((4, 8), 1.0), np.full((4, 8), 2.0))
    assert ends.max() == (8 + 4 - 1) * 3


@pytest.mark.parametrize("split", [False, True])
def test_a_v_shaped_placement_of_one_model(split):
    """Two chunks on each rank: stage s of 2 N is on rank min(s, 2 N - 1 - s)."""
    ranks, count, rng = 3, 4, np.random.default_rng(0)
    place = [(0, r) for r in range(ranks)] + [(1, r) for r in reversed(range(ranks))]
    before, after = np.full((2, 2, ranks, 2), -1)
    for (c, x), (d, y) in itertools.pairwise(place):
        after[c, x], before[d, y] = (d, y), (c, x)
    duration = rng.uniform(1, 3, (2, 3, ranks, count))
    latency = rng.uniform(0, 1, (2, 2, ranks))
    latency[1, 0, -1] = latency[0, 1, -1] = 0  # the turn stays on its rank
    last = 2 if split else 1
    # All forwards, then all backwards, of the last chunk first.
    row = [0] * count + [3] * count
    for c in (1, 0):
        row += [3 * c + kind for _ in range(count) for kind in range(1, last + 1)]
    orders = np.array([row] * ranks)
    number, finish = np.full(2, count), np.zeros_like(duration)
    wait = np.zeros((2, 1, 2), dtype=np.int64)
    makespan = run_orders(orders, duration, before, after, number, number, wait, (0.0, 0.0), latency, split, finish)
    slow = relaxed(orders, duration, before, after, latency)
    assert finish[:, : last + 1] == pytest.approx(slow[:, : last + 1])
    assert makespan == pytest.approx(slow.max())


def test_orders_that_wait_for_each_other_deadlock():
    orders = np.array([[0, 1, 0, 1], [0, 0, 1, 1]])
    before = np.array([[(-1, -1), (0, 0)]])
    after = np.array([[(0, 1), (-1, -1)]])
    duration, number = np.ones((1, 3, 2, 2)), np.array([2])
    never = np.zeros((1, 1, 1), dtype=np.int64)
    finish = np.zeros_like(duration)
    arguments = (duration, before, after, number, number, never, (0.0,), np.zeros((1, 2, 2)), False, finish)
    assert run_orders(orders, *arguments) == -1
    assert run_orders(orders[::-1].copy(), *arguments) > 0


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_numba_still_asks_kernels_for_what_compat_gives_it():
    import numba

    @kernel
    def one():
        return 1

    @kernel
    def two():
        return one() + 1

    try:
        assert two() == 2
    except numba.TypingError as error:
        pytest.fail(f"numba {numba.__version__} does not read `_numba_type_`; mend pipelines.compat: {error}")


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
@pytest.mark.parametrize("family", ["serial", "fused", "fused-split", "fused-v", "zb-v"])
def test_a_kernel_gives_the_same_bits_uncompiled(family):
    rng = np.random.default_rng(1)
    models = [
        ModelPipelines(name, 4, 6, *(rng.uniform(1, 3, (1, 4, 12)) for _ in range(3))) for name in ("actor", "critic")
    ]
    problem = ScheduleProblem((models[0], models[1]), 0.3, 2)
    found = find(problem, family_of(family), SearchEffort(scale=0.001, memory=False, exact=False))
    i = found.instance
    ends = []
    for run in (run_orders.plain, run_orders.compiled):
        finish = np.zeros_like(i.duration)
        ends.append((run(found.orders, *timing_arguments(i), finish), finish))
    assert ends[0][0] == ends[1][0] == found.makespan
    assert np.array_equal(ends[0][1], ends[1][1])
    for x in range(i.ranks):
        arguments = (found.orders[x], x, i.activation, i.split)
        assert order_peak.plain(*arguments) == order_peak.compiled(*arguments) == found.peaks[x]


@pytest.mark.slow
def test_few_passes_are_simulated_without_numba():
    """As those of a job without pipelines, whose coordinator then starts in less time."""
    code = (
        "import sys\n"
        "from dovetail.pipelines import *\n"
        "serial = family_of('serial')\n"
        "i = family_instance(ScheduleProblem((ModelPipelines('actor', 2, 4, 1.0, 1.0),)), serial)\n"
        "print(evaluate(i, fixed_orders(i, serial)).makespan, 'numba' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.split() == ["10.0", "False"]
