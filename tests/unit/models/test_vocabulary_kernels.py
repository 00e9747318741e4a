"""The Triton kernels that GPUs compute log-probabilities with, beside float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """By case; see helpers.interpreted_kernels."""
    command = [sys.executable, "-m", "helpers.interpreted_kernels"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("bound", [None, 3.0])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_training_gives_what_float64_gives(
    errors: dict[str, float], dtype: str, limit: float, bound: float | None, entropy: str
) -> None:
    assert errors[f"{dtype} {entropy} {bound}"] < limit


def test_several_tokens_at_one_position(errors: dict[str, float]) -> None:
    assert errors["scoring"] < 1e-5


def test_forbidden_tokens_have_no_part_in_sums(errors: dict[str, float]) -> None:
    assert errors["forbidden"] < 1e-5
