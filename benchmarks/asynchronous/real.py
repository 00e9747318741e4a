"""Whole jobs with real vLLM servers on this machine, with and without a lag."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from e2e.settings import Folder, Settings

from asynchronous.json_lines import print_line
from dovetail.manifest.types import RLHFJob

SETTINGS = Settings(batch=32, mini_batches=2, max_new_tokens=64)
# The first iterations compile and fill caches; in the last one nothing is drawn beside training.
WARMUP, MEASURED, LAST = 3, 6, 1
# Both halves of an iteration sleep, so that they can overlap on a machine whose cores are busy.
SLEEP_SECONDS = 4.0
CODE = """
import time
def score(prompts, responses, **fields):
    time.sleep({seconds} / {samples})
    return [len(set(text)) / 40 for text in responses]
def advantages(experience):
    time.sleep({seconds})
    return experience.per_token(experience.scores - experience.scores.mean())
"""


def job_of(folder: Folder, lag: int, sleeps: bool) -> RLHFJob:
    """`sleeps`: reward function and advantage function sleep; else all that there is to do is computed."""
    from e2e.ours import manifest

    document = manifest(folder, SETTINGS).model_dump(mode="json", by_alias=True)
    spec = document["spec"]
    spec["ppo"] |= {"lag": lag, "iterations": WARMUP + MEASURED + LAST, "oldLogProbs": "Auto"}
    if sleeps:
        code = folder.path / "code"
        code.mkdir(exist_ok=True)
        (code / "slow_parts.py").write_text(CODE.format(seconds=SLEEP_SECONDS, samples=SETTINGS.batch))
        spec["evaluation"]["heldOut"] = 0  # the function would take its time for these answers too
        spec["models"]["reward"] = {"function": "slow_parts:score", "importPath": str(code), "workers": 1}
        spec["ppo"] |= {"advantageFunction": "slow_parts:advantages", "importPath": str(code)}
    return RLHFJob.model_validate(document)


def compare(rounds: int) -> list[dict[str, Any]]:
    """Runs of both kinds, without a lag and with lag 1 in turns; prints and returns a line for each kind: the median of
    the rounds' ratios, and the seconds of an iteration."""
    from e2e.model import make_models
    from e2e.ours import run

    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Folder(Path(temporary) / "models")
        make_models(folder, SETTINGS)
        for sleeps, turns in ((False, rounds), (True, 1)):
            seconds: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(turns):
                for lag in (0, 1):
                    run_dir = Path(temporary) / f"{'sleeps' if sleeps else 'computes'}-{lag}-{turn}"
                    rows = run(job_of(folder, lag, sleeps), run_dir)[WARMUP : WARMUP + MEASURED]
                    seconds[lag].append(statistics.fmean(row["seconds"] for row in rows))
            line = {
                "measurement": "async real",
                "sleeps": sleeps,
                "rounds": turns,
                "seconds_lag_0": statistics.median(seconds[0]),
                "seconds_lag_1": statistics.median(seconds[1]),
                "speedup": statistics.median(a / b for a, b in zip(seconds[0], seconds[1], strict=True)),
            }
            lines.append(line)
            print_line(line)
    return lines
