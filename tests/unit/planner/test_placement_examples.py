"""The examples' plans: what was estimated is what their iterations take when they are played event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, mean

import numpy as np
import pytest
import yaml

from dovetail.cli import simulated_iteration as simulated
from dovetail.cli.simulated_iteration import simulate
from dovetail.fusion.lengths import Lengths
from dovetail.manifest.types import RLHFJob
from dovetail.planner.placements import place
from dovetail.planner.planned_job import PlannedJob
from helpers.example_jobs import EXAMPLES, hub_configs, recommended

ITERATIONS = 6


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Schedules are searched until nothing more is found, as a coordinator does. One round, which `dovetail plan` takes
    for its timeline, leaves 4% of 32 stages that run both models at once. The clock counts the rounds of the search,
    so the result does not depend on the machine."""
    rounds: list[str] = []
    effort = replace(
        simulated.EFFORT,
        seconds=2.0,
        clock=lambda: float(len(rounds)),
        progress=lambda what, makespan, peak: rounds.append(what),
    )
    monkeypatch.setattr(simulated, "EFFORT", effort)
    simulated._orders.cache_clear()
    yield
    simulated._orders.cache_clear()


def drawn(lengths: Lengths, count: int, at: float, rng: np.random.Generator) -> list[int]:
    """`count` tokens whose longest is at quantile `at` of the longest's own distribution, the others spread evenly
    below it: a few such draws have the mean of many that leave this to chance."""
    top = at ** (1 / count)
    levels = [*(top * (np.arange(count - 1) + rng.uniform(0.01, 0.99, count - 1)) / (count - 1)), top]
    tokens = [lengths.median * np.exp(lengths.sigma * NormalDist().inv_cdf(float(level))) for level in levels]
    found: list[int] = rng.permutation(np.clip(np.rint(tokens), 1, lengths.longest).astype(np.int64)).tolist()
    return found


@pytest.mark.parametrize(
    ("job", "inventory"),
    [
        pytest.param("rlhf-65b.yaml", "a100x128.yaml", marks=pytest.mark.nightly),
        ("quickstart.yaml", "a100-v100-a10.yaml"),
        ("quickstart-cluster.yaml", "a100-v100-a10.yaml"),
        ("quickstart-cluster.yaml", None),
        ("hh-rlhf.yaml", None),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("searched")
def test_an_examples_estimate_is_within_3_percent_of_its_simulation(job: str, inventory: str | None) -> None:
    spec = RLHFJob.model_validate(yaml.safe_load((EXAMPLES / job).read_text())).spec
    configs = hub_configs(Path(job).stem)
    if inventory is None:
        placed = place(PlannedJob(spec, configs))
        chosen = placed.chosen if placed is not None else None
    else:
        chosen = recommended(Path(job).stem, Path(inventory).stem)
    assert chosen is not None
    costs = chosen.costs
    work, rng = costs.work, np.random.default_rng(0)
    played = []
    for k in range(ITERATIONS):
        prompts, responses = (
            drawn(lengths, work.batch, (k + 0.5) / ITERATIONS, rng) for lengths in (work.prompt, work.response)
        )
        made = simulate(chosen.candidate, costs, prompts, responses)
        played.append(made.seconds)
    expected = costs.estimate(chosen.candidate)
    assert expected.seconds == pytest.approx(mean(played), rel=0.03)
