"""Peak memory on the null GPU against the planner. `make bench-memory-gpu` does the same for whole models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.null_gpu import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_memory.cases import SMALL, Case
from gpu_memory.measured import scenario
from gpu_memory.predicted import predicted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: str(case.name))
def test_the_planner_knows_what_the_allocator_reserves(null_gpu: Run, case: Case) -> None:
    asked = scenario(case)
    results = null_gpu(case.name.replace(" ", "-").replace("/", "-"), asked.pop("do"), **asked).good()
    reserved = max(result["reserved"] for result in results)
    assert predicted(case) == pytest.approx(reserved, rel=0.05)


def test_little_is_lost_to_fragments(null_gpu: Run) -> None:
    asked = scenario(SMALL[0])
    (found,) = null_gpu(SMALL[0].name.replace(" ", "-"), asked.pop("do"), **asked).good()
    assert found["reserved"] < 1.02 * found["allocated"]
