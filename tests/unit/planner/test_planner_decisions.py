"""The planner decides what it decided before, for the examples and for jobs drawn at random."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "golden"))

from make_decisions import FILE, decisions


@pytest.mark.slow
def test_decisions_are_those_of_the_golden_file() -> None:
    """`python tests/golden/make_decisions.py` writes the file anew where a change is meant."""
    known, found = json.loads(FILE.read_text()), decisions()
    assert sorted(found) == sorted(known)
    assert [name for name in known if found[name]["plan"] != known[name]["plan"]] == []
    # Logarithms are summed: a float that is off by a thousandth changes the sum by a thousandth.
    assert {n: r["floats"] for n, r in found.items()} == {
        n: pytest.approx(r["floats"], abs=1e-5) for n, r in known.items()
    }
