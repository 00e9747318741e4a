"""The page of figures: what benchmarks print becomes tables, and what did not run is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import report

# Of the page without figures; with them it has 2,500 at most.
MOST_WORDS = 1400
PRINTS = """
import json, os, sys
print("a table for people")
print(json.dumps({"way": "ours", "seconds": 1.2345, "more": {"share": 0.5}, "left": "out"}))
print(json.dumps({"way": "theirs", "seconds": 2.5, "more": {}}))
print(json.dumps({"way": "summary", "kind": "other"}))
sys.exit(int(os.environ["CODE"]))
"""


def section(tmp_path: Path, code: int) -> report.Section:
    (tmp_path / "bench.py").write_text(PRINTS)
    columns = {"way": ("way", ""), "s": ("seconds", ".2f"), "share": ("more.share", ".0%"), "never": ("nothing", "")}
    return report.Section(f"{tmp_path / 'bench.py'}", columns, environment={"CODE": str(code)})


@pytest.mark.parametrize("code", [0, 1])
def test_lines_of_a_benchmark_become_a_table(tmp_path: Path, code: int) -> None:
    """With 1 a benchmark says that an aim was missed."""
    mine = section(tmp_path, code)
    found = mine.measure(60.0)
    assert found is not None
    kept = json.loads(json.dumps(found))
    assert "left" not in kept["lines"][0]
    shown = mine.show(kept).splitlines()
    assert shown[:5] == [
        "| way | s | share |",
        "|---|---|---|",
        "| ours | 1.23 | 50% |",
        "| theirs | 2.50 | – |",
        "| summary | – | – |",
    ]
    assert f"`CODE={code} python {tmp_path / 'bench.py'}`" in shown[-1]


def test_a_benchmark_that_fails_or_hangs_has_no_section(tmp_path: Path) -> None:
    assert section(tmp_path, 2).measure(60.0) is None
    (tmp_path / "hangs.py").write_text("import threading; threading.Event().wait()")
    assert report.Section(f"{tmp_path / 'hangs.py'}").measure(0.5) is None


def test_the_page_has_what_ran_and_the_one_gpu_in_few_words(tmp_path: Path) -> None:
    """A section is there if its benchmark ran; the one of a GPU always."""
    facts = {"commit": "0123abcd", "date": "1 May 2030", "machine": "2 cores"}
    some = report.page(
        {**facts, "sections": {"scoring": {"command": "python scoring", "load": 0.5, "lines": [{"speedup": 7.25}]}}}
    )
    assert [line for line in some.splitlines() if line.startswith("## ")] == [
        "## Scoring: `make bench-scoring`",
        "## One GPU: `make bench-gpu`",
    ]
    assert "| times padded |\n|---|\n| 7.25 |" in some
    assert "of commit 0123abcd, 1 May 2030, on 2 cores" in some.replace("\n", " ")
    every = {
        name: {"command": each.shown, "load": 0.1, "lines": [], "text": []} for name, each in report.SECTIONS.items()
    }
    whole = report.page({**facts, "sections": every})
    assert whole.count("\n## ") == 1 + len(every)
    assert len(whole.split()) <= MOST_WORDS
