"""Peak memory on the null GPU against the planner. `make bench-memory-gpu` does the same for whole models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.null_gpu import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_memory.cases import LLAMA3_8B, SMALL, UNLIKE, Case
from gpu_memory.measured import scenario
from gpu_memory.predicted import predicted

from dovetail.manifest.model_shape import ModelShape
from dovetail.planner.memory import logit_bytes

pytestmark = pytest.mark.slow

# Two iterations have an optimizer step each; these have two each, as `make bench-memory-gpu` has.
TWO_STEPS = (SMALL[0], SMALL[1])


def run(null_gpu: Run, case: Case) -> list[Any]:
    """What each rank of the case found."""
    asked = scenario(case)
    if not case.scores:
        asked["mini_batches"] = 2 if case in TWO_STEPS else 1
    found: list[Any] = null_gpu(case.name.replace(" ", "-").replace("/", "-"), asked.pop("do"), **asked).good()
    return found


@pytest.mark.parametrize("case", SMALL, ids=lambda case: str(case.name))
def test_the_planner_knows_what_the_allocator_reserves(null_gpu: Run, case: Case) -> None:
    reserved = max(result["reserved"] for result in run(null_gpu, case))
    assert predicted(case) == pytest.approx(reserved, rel=0.05)


def test_nothing_is_shared_over_pipelines_side_by_side(null_gpu: Run) -> None:
    """Each of the two ranks holds the whole critic. Shared over both ranks it would need 27.4 GB. NCCL drops gradients
    as soon as they are added up: it would keep them until the next ones are there, which needed up to 37.2 GB."""
    reserved = max(result["reserved"] for result in run(null_gpu, UNLIKE))
    assert predicted(UNLIKE) == pytest.approx(reserved, rel=0.04)
    assert reserved < 30e9


def test_the_sum_of_gradients_in_float32_is_there_while_micro_batches_follow(null_gpu: Run) -> None:
    """Of four micro-batches on two data-parallel ranks. With one it would not be, and the planner says so."""
    case = next(case for case in SMALL if case.dp > 1)
    reserved = max(result["reserved"] for result in run(null_gpu, case))
    assert case.micro_batches > 1
    assert predicted(replace(case, micro_batches=1)) < 0.9 * reserved


def test_logits_are_never_there_as_a_whole(null_gpu: Run) -> None:
    """Of a 7B model with 128k words, for 4 responses of 2,048 tokens."""
    rows, shape = 4 * 2048, ModelShape.of(LLAMA3_8B)
    sizes = {"rows": rows, "hidden": shape.hidden, "vocabulary": shape.vocabulary}
    (found,) = null_gpu("words", "memory.words", **sizes).good()
    logits = 2 * rows * shape.vocabulary
    assert found["whole"] > 1.9 * logits
    assert found["chunks"] < 0.4 * logits
    assert logit_bytes(shape, rows, itemsize=2) == pytest.approx(found["chunks"], rel=0.05)


def test_little_is_lost_to_fragments(null_gpu: Run) -> None:
    (found,) = run(null_gpu, SMALL[0])
    assert found["reserved"] < 1.02 * found["allocated"]
