"""Whatever a coordinator answers, the operator and the status API go on, within bounded time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
REFUSED = {
    "endless": "more than 1048576 bytes",
    "long": "more than 1048576 bytes",
    "gzip": "is compressed ('gzip')",
    "br": "is compressed ('br')",
    "redirect": "answers 307",
    "headers": "does not answer",
    "informational": "did not finish its answer within 1 s",
    "drip": "did not finish its answer within 1 s",
    "silent": "did not finish its answer within 1 s",
    "values": "more than 20000 values",
    "deep": "more than 20000 values",
}


OTHERS = ["numbers", "words", "history"]


@pytest.fixture(scope="module")
def made():
    """What both made of each way, in a process of its own, whose memory is measured."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hostile_coordinator", *REFUSED, *OTHERS],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", [*REFUSED, *OTHERS])
def test_whatever_it_answers_the_asker_goes_on_in_little_memory(made, way):
    assert made[way]["alive"], "the operator asks on"
    assert made[way]["elsewhere"] == [], "the job's token goes to its own coordinator alone"
    assert made[way]["bytes"] < 64 << 20


@pytest.mark.parametrize("way", REFUSED)
def test_a_hostile_answer_is_no_answer(made, way):
    assert made[way]["reported"] is None
    assert made[way]["reachable"] is False
    assert REFUSED[way] in made[way]["message"]


@pytest.mark.parametrize("way", ["numbers", "words"])
def test_a_status_that_makes_no_sense_is_not_believed(made, way):
    assert made[way]["reported"] is None


def test_a_history_without_end_is_cut_off(made):
    assert made["history"]["reported"] is not None
    assert made["history"]["rows"] == 0, "rows of 1,000 metrics are none of ours"
