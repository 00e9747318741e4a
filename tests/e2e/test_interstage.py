"""Whole jobs with inter-stage fusion: they learn from the same samples as without it, and lose none when processes die
while the tail migrates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.jobs import Reaper, events, history, run_job, same_weights, stored_samples, summary, tiny_job

pytestmark = pytest.mark.slow
ITERATIONS, SAMPLES = 4, 48
# So early that both servers still have samples, however unevenly a machine runs them.
FRACTION = 0.75


def job(fusion: float | str) -> Any:
    """After some SFT, of the likeliest tokens only, and slowly learning: a letter comes at random, so lengths have a
    tail. (The likeliest tokens are text; in random bytes, stop strings depend on where a decoder was started.)"""
    return tiny_job(
        plan={"interStageFusion": fusion},
        reward={"steps": 6},
        ppo={
            "iterations": ITERATIONS,
            "globalBatchSize": SAMPLES,
            "miniBatchSize": SAMPLES,
            "actorOptimizer": {"learningRate": 1.0e-5},
        },
        generation={"maxTokens": 80, "topK": 20, "stop": ["n"]},
        checkpoint={"everySteps": 100},
    )


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage after the other."""
    run_dir = tmp_path_factory.mktemp("serial")
    outcome, _ = run_job(job("Off"), run_dir)
    assert outcome.succeeded, outcome.reason
    assert events(run_dir, "tail.gathered") == []
    return run_dir


def check_samples(run_dir: Path, serial: Path) -> None:
    """The same tokens and the same scores, to the bit."""
    for iteration in range(1, ITERATIONS + 1):
        ours, theirs = stored_samples(run_dir, iteration), stored_samples(serial, iteration)
        assert [s.key for s in ours] == [s.key for s in theirs]
        assert len(ours) == SAMPLES
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert (a.finish_reason, a.state) == (b.finish_reason, b.state)
            for name in ("logprobs", "ref_logprobs", "values", "reward"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_fusion_changes_nothing_but_the_time(tmp_path: Path, serial: Path) -> None:
    outcome, _ = run_job(job(FRACTION), tmp_path)
    assert outcome.succeeded, outcome.reason
    gathered = events(tmp_path, "tail.gathered")
    assert gathered
    assert all(e["left"] <= FRACTION * SAMPLES and len(e["destinations"]) == 1 for e in gathered)
    check_samples(tmp_path, serial)
    assert same_weights(serial, tmp_path) == []
    migrated = [s for i in range(1, ITERATIONS + 1) for s in stored_samples(tmp_path, i) if s.attempt > 1]
    assert migrated, "a tail was on one server alone each time"

    facts = summary(tmp_path)["fusion"]
    # The summary counts those of the iterations; the held-out prompts' samples, of iteration -1, may move as well.
    moved = [e for e in events(tmp_path, "sample.moved") if e["sample"][0] >= 1]
    assert facts["samples_migrated"] == len(moved) > 0
    assert "tail" in {e["reason"] for e in moved}
    assert facts["seconds_hidden"] > 0
    assert facts["threshold"] == int(FRACTION * SAMPLES)
    assert summary(serial)["fusion"]["seconds_hidden"] == 0
    for metrics in history(tmp_path, "ppo").values():
        spent = sum(metrics[f"seconds_{name}"] for name in ("generation", "inference", "training", "weights", "other"))
        assert spent == pytest.approx(metrics["iteration_seconds"], rel=1e-3)


@pytest.mark.nightly
def test_whoever_dies_as_the_tail_migrates_no_sample_is_lost_or_doubled(tmp_path: Path, serial: Path) -> None:
    """Source and destination and the scorer of the freed server, all at once; then, of later tails, the source; then
    the destination."""
    roles = iter([("source", "destination", "scorer"), ("source",), ("destination",)])

    def victims(event: dict[str, Any]) -> list[str]:
        if event["event"] != "tail.gathered":
            return []
        (kept,) = event["destinations"]
        (freed,) = {"rollouts-0", "rollouts-1"} - {kept}
        names = {"source": freed, "destination": kept, "scorer": f"{freed}-scorer"}
        return [names[role] for role in next(roles, ())]

    reaper = Reaper(tmp_path, victims)
    outcome, told = run_job(job(FRACTION), tmp_path, reaper)
    assert outcome.succeeded, (outcome.reason, told)
    assert len(reaper.killed) >= 3, "no tail was gathered"
    check_samples(tmp_path, serial)
