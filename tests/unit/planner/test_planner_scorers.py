"""Which scorer holds what."""

from __future__ import annotations

import pytest
import yaml

from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.candidate import scorer_models
from helpers.manifests import changed


def spec(**changes: object) -> RLHFJobSpec:
    return load_manifest(yaml.safe_dump(changed(**changes))).spec


@pytest.mark.parametrize(
    ("scorers", "expected"),
    [
        (1, [["reference", "reward", "critic"]]),
        (2, [["reference"], ["reward", "critic"]]),
        (3, [["reference"], ["reward", "critic"], ["reward", "critic"]]),
        (4, [["reference"], ["reference"], ["reward", "critic"], ["reward", "critic"]]),
    ],
)
def test_interleaving_parts_the_reference_from_the_heads(scorers: int, expected: list[list[str]]) -> None:
    assert scorer_models(spec(**{"plan.placement": "Interleaving"}), scorers) == expected


@pytest.mark.parametrize("placement", ["Auto", "Separation"])
def test_else_every_scorer_holds_everything(placement: str) -> None:
    assert scorer_models(spec(**{"plan.placement": placement}), 2) == [["reference", "reward", "critic"]] * 2


def test_only_what_the_job_has() -> None:
    function = {"models.reward": {"function": "dovetail.coordinator.data.synthetic:reward"}}
    groups = {"ppo.advantage": "grpo", "ppo.samplesPerPrompt": 4}
    pinned = {"plan.placement": "Interleaving"}
    assert scorer_models(spec(**function, **pinned), 2) == [["reference"], ["critic"]]
    assert scorer_models(spec(**groups, **pinned), 2) == [["reference"], ["reward"]]
    assert scorer_models(spec(**groups, **function, **pinned), 2) == [["reference"]] * 2
