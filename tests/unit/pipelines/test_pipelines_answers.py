"""Answers of the search that must not get worse. The efforts are small, and the same seed gives the same answer."""

import re
from pathlib import Path

import pytest

from dovetail.pipelines import COMPILED, FAMILIES, ScheduleProblem, SearchEffort, find, fused_problem, serial_memory

ROWS = {
    "8/4 MB8": (8, 4, 8, 5, 2),
    "8/8 MB16": (8, 8, 16, 5, 2),
    "4/2 MB48": (4, 2, 48, 5, 2),
}
# Makespan, and peak memory in units of serial 1F1B's; at serial memory.
ANSWERS = {
    ("8/4 MB8", "fused"): (225, 1.0),
    ("8/4 MB8", "fused-split"): (180, 1.0),
    ("8/8 MB16", "fused"): (375, 1.0),
    ("4/2 MB48", "fused"): (1020, 1.0),
    ("4/2 MB48", "fused-split"): (1012, 1.0),
}


@pytest.mark.skipif(not COMPILED, reason="without numba the search is weaker")
@pytest.mark.parametrize(
    ("row", "family"),
    [pytest.param(*each, marks=() if each[0] == "8/4 MB8" else pytest.mark.slow) for each in sorted(ANSWERS)],
)
def test_the_search_finds_no_less_than_before(row, family):
    problem = fused_problem(*ROWS[row], critic_activation=0.5)
    serial = serial_memory(problem)
    limited = ScheduleProblem(problem.models, memory_limit=serial * 1.0045)
    found = find(limited, FAMILIES[family], SearchEffort(scale=0.02, exact=False, memory=False))
    makespan, peak = ANSWERS[row, family]
    assert found.makespan <= makespan * (1 + 1e-9)
    assert found.peak / serial <= peak + 5e-4


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "docs/schedules.md", "exec"), {})
    assert (tmp_path / "schedule.json").is_file()
