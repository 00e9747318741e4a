"""Whole jobs whose trainers learn from the first samples of an iteration while others are still made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.local.pipeline import Pipeline
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import RLHFJob
from helpers.jobs import Fault, Injector, history, run_job, same_weights, summary, tiny_job
from helpers.nursery import forked_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# One iteration more than is disturbed: a phase may be over before anybody looks.
ITERATIONS, SAMPLES, SECONDS = 6, 16, 1.6
# Rewards come one after another, so that the trainers have something to learn long before the last one is there.
CODE = """
import time
def score(prompts, responses, **fields):
    time.sleep({seconds} * len(responses) / {samples})
    return [len(set(text)) / 40 for text in responses]
"""


def job(code: Path) -> RLHFJob:
    """GRPO from random weights, with one optimizer step an iteration."""
    (code / "slow_rewards.py").write_text(CODE.format(seconds=SECONDS, samples=SAMPLES))
    ppo = {
        "iterations": ITERATIONS,
        "globalBatchSize": SAMPLES,
        "miniBatchSize": SAMPLES,
        "microBatchSize": 2,
        "samplesPerPrompt": 2,
        "advantage": "grpo",
        "streaming": "Auto",
        "actorOptimizer": {"learningRate": 1e-3, "schedule": "Constant", "warmupFraction": 0.0},
    }
    made = tiny_job(
        stages=["ppo"],
        ppo=ppo,
        models={"reward": {"function": "slow_rewards:score", "importPath": str(code), "workers": 1}},
        data={"preferences": [], "demonstrations": [{"synthetic": {"size": 200}}]},
        checkpoint={"everySteps": 2},
        evaluation={"heldOut": 0},
        generation={"maxTokens": 48, "temperature": 0.7},
    )
    return made.model_copy(update={"spec": resolve(made.spec)})


def scoring(iteration: int) -> Any:
    """Whether the samples of an iteration, which some of the trainers' parts are made of, are being scored."""
    return lambda s: s["stage"] == "ppo" and s["phase"] == "inference" and s["iteration"] >= iteration


def test_training_on_samples_as_they_come_gives_the_bits_of_training_after_the_last(tmp_path: Path) -> None:
    """A loop of one's own trains after the last sample. The job itself streams; each process dies while it does."""
    made, after, streamed = job(tmp_path), tmp_path / "after", tmp_path / "streamed"
    with forked_jobs(), Pipeline(made, after) as pipeline:
        pipeline.begin_ppo()
        while not pipeline.over:
            pipeline.train(pipeline.generate_experience())
        pipeline.finish()
    assert {row["streamed_fraction"] for row in history(after, "ppo").values()} == {0.0}

    faults = [
        Fault("trainer-1", scoring(2)),
        Fault("coordinator", scoring(3)),
        Fault("rollouts-0-scorer", scoring(4)),
        Fault("trainer-0", scoring(5)),
    ]
    outcome, told = run_job(made, streamed, Injector(faults))
    assert outcome.succeeded, (outcome.reason, told)
    assert [f.process for f in faults if not f.done] == []
    assert same_weights(after, streamed) == []
    # In the first iteration nobody died.
    first = history(streamed, "ppo")[1]
    # How much depends on how fast the machine trains.
    assert first["streamed_fraction"] > 0
    assert first["streamed_seconds"] > 0
    assert first["synchronous_seconds"] > first["iteration_seconds"]
    assert "overlap" in summary(streamed)
