"""What does not fit is refused with a remedy that works."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype, Parallelism
from dovetail.planner.memory import Training, problem, remedies, worst

GIB = 2**30
LLAMA_7B = ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000)


def job(**changes: object) -> Training:
    base = Training(LLAMA_7B, "value", Parallelism(dp=8), Dtype.BFLOAT16, 1024, micro_batches=4)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_7b_critic_on_8_v100s_is_told_what_to_do() -> None:
    v100 = 32 * GIB
    large = job(dtype=Dtype.FLOAT32)
    message = problem("critic training", "v100", large, v100)
    assert message is not None
    assert message.endswith("; set spec.plan.zero3 to Auto")
    assert problem("critic training", "v100", replace(large, fsdp=3), v100) is None
    message = problem("critic training", "v100", large, v100, zero3=False)
    assert message is not None
    assert re.fullmatch(
        r"critic training needs \d+\.\d GiB per GPU on group v100, 32\.0 GiB there \(most: .*\); "
        r"use GPUs of at least \d+ GiB, more of them, smaller micro-batches or LoRA",
        message,
    )
    assert problem("critic training", "h200", job(), 140 * GIB) is None


def test_what_nothing_helps_needs_larger_gpus() -> None:
    message = problem("actor training", "t4", job(layout=Parallelism(), head="lm"), 15 * GIB)
    assert message is not None
    assert re.search(r"; use GPUs of at least \d+ GiB, more of them, smaller micro-batches or LoRA$", message)


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 12]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
    st.booleans(),
    st.floats(1, 100),
)
def test_a_problem_is_reported_exactly_when_it_does_not_fit(
    dp: int, pp: int, micro_batches: int, offload: bool, gib: float
) -> None:
    some = job(
        layout=Parallelism(pp=pp, dp=dp),
        micro_batches=micro_batches,
        in_flight=min(pp, micro_batches),
        offload=offload,
        dtype=Dtype.BFLOAT16,
    )
    message = problem("critic training", "g", some, gib * GIB)
    assert (message is None) == (worst(some).device_bytes <= gib * GIB)
    if message is None:
        return
    promised = {name: other for name, other in remedies(some) if message.endswith(f"; {name}")}
    for other in promised.values():
        assert worst(other).device_bytes <= gib * GIB
    if not promised:
        assert "use GPUs of at least" in message
        assert all(worst(other).device_bytes > gib * GIB for _, other in remedies(some))
