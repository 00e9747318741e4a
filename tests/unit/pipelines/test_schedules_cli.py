"""`dovetail schedule`."""

import json
import re

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from helpers.finished_runs import page_data

SMALL = [
    *("schedule", "--stages", "4", "2", "--micro-batches", "4"),
    *("--forward", "5", "2"),
]


def call(*arguments):
    return CliRunner().invoke(cli, [*SMALL, "--seconds", "1", *arguments])


def test_a_table_a_timeline_a_document_and_a_picture(tmp_path):
    result = call("-o", str(tmp_path / "s.json"), "-o", str(tmp_path / "s.html"), "--family", "fused")
    assert result.exit_code == 0, result.output
    assert re.search(r"fused \*\s", result.output)
    assert len(re.findall(r"^rank \d", result.output, re.MULTILINE)) == 4
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["ranks"] == len(written["actions"]) == 4
    # K1 M1 = K2 M2: two critic pipelines of two stages, each twice as long, with half the micro-batches.
    assert written["models"][1]["pipelines"] == written["models"][1]["stages"] == 2
    assert (written["models"][1]["micro_batches"], written["models"][1]["forward"]) == (2, 4)
    assert written["models"][1]["backward"] == 8
    assert {a["kind"] for mine in written["actions"] for a in mine} == {"F", "B"}
    shown = page_data((tmp_path / "s.html").read_text())["answers"]["plan"]
    assert [lane["label"] for lane in shown["lanes"]] == [f"rank {rank}" for rank in range(4)]
    assert sum(len(lane["bars"]) for lane in shown["lanes"]) == 4 * (2 * 4 + 2 * 2)
    assert "fused *" in [row[0] for row in shown["tables"][0]["rows"]]


@pytest.mark.slow
def test_auto_shows_every_family_and_what_the_others_lose():
    result = call("--seconds", "2")
    assert result.exit_code == 0, result.output
    for family in (
        "serial",
        "zero-bubble",
        "stitched",
        "shared",
        "fused",
        "fused-split",
        "zb-v",
        "interleaved",
        "v-half",
        "fused-v",
        "dedicated",
    ):
        assert re.search(rf"^ {family}[ *]", result.output, re.MULTILINE), family
    assert result.output.count("%") >= 5
    assert "-rolled" not in result.output, "one mini-batch has no border to roll over"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--micro-batches", "5"], "actor's 5 micro-batches cannot be divided among the critic's 2 pipelines"),
        (["--stages", "4", "3"], "critic's 3 pipeline stages do not divide the actor's 4"),
        (["--memory", "0.5"], "memory limit of 0.5 is below what any schedule needs"),
        (["--memory", "0.5"], "take 1 on a rank, which is the least limit possible"),
        (["--family", "serial", "--memory", "3"], "serial needs 4 of activation memory, the limit is 3"),
    ],
)
def test_bad_numbers_get_one_sentence(more, sentence):
    result = call(*more)
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    result = call("--family", "stitched", "-o", str(tmp_path / "absent" / "s.json"))
    assert result.exit_code == 2
    assert "cannot be written" in result.output
