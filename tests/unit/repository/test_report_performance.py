"""The page of figures: what benchmarks print becomes tables, and what did not run is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import report

MOST_WORDS = 2500
# A table and its command have about so many.
WORDS_OF_A_SECTION = 40
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


TAKEN = {"commit": "0123abcd", "date": "1 May 2030", "machine": "2 cores", "load": 0.5}


def test_the_page_has_what_ran_and_the_one_gpu() -> None:
    """A section is there if its benchmark ran; those of earlier figures and of a GPU always."""
    some = report.page({"scoring": {"command": "python scoring", **TAKEN, "lines": [{"speedup": 7.25}]}})
    assert [line for line in some.splitlines() if line.startswith("## ")] == [
        "## Scoring: `make bench-scoring`",
        "## Earlier figures",
        "## One GPU: `make bench-gpu`",
    ]
    assert "| times padded |\n|---|\n| 7.25 |" in some
    assert "`python scoring`: 0123abcd, 1 May 2030, 2 cores, load average 0.5." in some
    assert "packed with each prompt once (`make bench-scoring`)" not in some, "the earlier figure"
    assert "packed with each prompt once (`make bench-scoring`)" in report.page({})


def test_the_page_is_what_the_generator_writes_in_few_words() -> None:
    shown = report.PAGE.read_text(encoding="utf-8")
    assert shown == report.page(report.kept()), "run benchmarks/report.py --only with no name, which measures nothing"
    assert len(shown.split()) <= MOST_WORDS
    every = {name: {"command": "", **TAKEN, "lines": [], "text": []} for name in report.SECTIONS}
    whole = report.page(every)
    assert whole.count("\n## ") == 2 + len(every)
    assert len(whole.split()) <= MOST_WORDS - WORDS_OF_A_SECTION * len(every)
