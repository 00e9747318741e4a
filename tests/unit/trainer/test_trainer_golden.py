"""Short training curves of every stage, against stored ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden"
_spec = importlib.util.spec_from_file_location("make_trainer_curves", GOLDEN / "make_trainer_curves.py")
assert _spec is not None
assert _spec.loader is not None
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)


@pytest.fixture(scope="module")
def curves() -> dict[str, dict[str, list[float]]]:
    return maker.curves()


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_training_follows_the_stored_curve(curves: dict[str, dict[str, list[float]]], stage: str) -> None:
    stored = json.loads((GOLDEN / "trainer-curves.json").read_text())[stage]
    assert curves[stage].keys() == stored.keys()
    for name, values in stored.items():
        assert curves[stage][name] == pytest.approx(values, abs=1e-4), name


def test_sft_learns(curves: dict[str, dict[str, list[float]]]) -> None:
    assert curves["sft"]["loss"][-1] < curves["sft"]["loss"][0] - 0.3
