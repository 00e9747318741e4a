"""Jobs whose processes are frozen, paused and killed at random for ten minutes: tests/helpers/drill.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.drill import drill

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize(("seed", "lag"), [(1, 0), (2, 1)])
def test_every_disturbed_run_ends_with_the_weights_of_the_first(tmp_path: Path, seed: int, lag: int) -> None:
    """DOVETAIL_DRILL_SECONDS says for how long, for each seed."""
    seconds = float(os.environ.get("DOVETAIL_DRILL_SECONDS", "600"))
    facts = drill(tmp_path, seconds, seed, lambda line: print(line, flush=True), lag)
    assert facts["disturbances"]
    assert (facts["failures"], facts["different"]) == ([], [])
