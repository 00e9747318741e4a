"""One job under every placement: where models are placed changes the time, not what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dovetail.manifest.types import RLHFJob
from helpers.jobs import Fault, Injector, history, run_job, stored_samples, tiny_job

pytestmark = pytest.mark.slow
ITERATIONS, SAMPLES = 2, 16
APART = [
    {"name": "trainers", "roles": ["trainer"], "replicas": 2},
    {"name": "pods", "roles": ["rollout"], "replicas": 2},
]
TOGETHER = [{"name": "pods", "roles": ["trainer", "rollout"], "replicas": 2}]


def job(placement: str, groups: list[dict[str, Any]], **plan: Any) -> RLHFJob:
    return tiny_job(
        plan={"placement": placement, **plan},
        groups=groups,
        sft={"steps": 6},
        reward={"steps": 4},
        ppo={"iterations": ITERATIONS, "globalBatchSize": SAMPLES},
        checkpoint={"everySteps": 100},
    )


@pytest.fixture(scope="module")
def separation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("separation")
    outcome, _ = run_job(job("Separation", APART), run_dir)
    assert outcome.succeeded, outcome.reason
    return run_dir


def check_same(run_dir: Path, reference: Path) -> None:
    """The same tokens and scores, and the same weights."""
    for iteration in range(1, ITERATIONS + 1):
        ours, theirs = stored_samples(run_dir, iteration), stored_samples(reference, iteration)
        assert len(ours) == len(theirs) == SAMPLES
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            for name in ("logprobs", "ref_logprobs", "values", "reward"):
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-6, rtol=0, err_msg=name)
    for model in ("actor", "critic", "reward"):
        one, two = (load_file(path / "models" / model / "model.safetensors") for path in (run_dir, reference))
        assert one.keys() == two.keys()
        assert max(float(np.abs(one[name] - two[name]).max()) for name in one) < 2e-5


def loaded(run_dir: Path, scorer: str) -> list[list[str]]:
    """The models of each of a scorer's loads."""
    lines = (run_dir / "logs" / f"{scorer}.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry["models"] for entry in entries if entry.get("event") == "models.loaded"]


def test_flattening_trains_and_generates_on_the_same_pods(tmp_path: Path, separation: Path) -> None:
    outcome, _ = run_job(job("Flattening", TOGETHER), tmp_path)
    assert outcome.succeeded, outcome.reason
    check_same(tmp_path, separation)
    assert loaded(tmp_path, "pods-0-scorer") == [["critic", "reference", "reward"]]


@pytest.mark.nightly
def test_interleaving_scores_on_unlike_scorers_though_one_dies(tmp_path: Path, separation: Path) -> None:
    """The only scorer with the reference is killed while samples are generated."""
    dies = Fault("pods-0-scorer", lambda s: bool(s["stage"] == "ppo" and s["phase"] == "generation"))
    outcome, told = run_job(job("Interleaving", APART), tmp_path, Injector([dies]))
    assert outcome.succeeded, (outcome.reason, told)
    assert dies.done
    check_same(tmp_path, separation)
    for scorer, models in (("pods-0-scorer", ["reference"]), ("pods-1-scorer", ["critic", "reward"])):
        loads = loaded(tmp_path, scorer)
        assert loads
        assert all(found == models for found in loads)


@pytest.mark.nightly
def test_actor_and_critic_on_trainer_ranks_of_their_own_though_one_dies(tmp_path: Path, separation: Path) -> None:
    """The critic's rank is killed after the first iteration: both models come back to where they were."""
    dies = Fault(
        "trainer-1", lambda s: bool(s["stage"] == "ppo" and s["iteration"] == 2 and s["phase"] == "generation")
    )
    outcome, told = run_job(job("Separation", APART, intraStageFusion="Dedicated"), tmp_path, Injector([dies]))
    assert outcome.succeeded, (outcome.reason, told)
    assert dies.done
    check_same(tmp_path, separation)
    assert json.loads((tmp_path / "schedule.json").read_text())["chosen"] == "dedicated"
    for metrics in history(tmp_path, "ppo").values():
        assert metrics["actor_grad_norm"] > 0
        assert metrics["critic_grad_norm"] > 0
