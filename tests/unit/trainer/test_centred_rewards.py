"""A trained reward model gives demonstrations 0 on average, wherever its scores are computed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.coordinator.loop.supervised import Hooks, SupervisedStage, centre, run_supervised
from dovetail.manifest.types import Stage
from dovetail.models import build_stage
from dovetail.protocol.messages import CommandResult, Evaluate, Export, ModelRef
from dovetail.protocol.wire import unpack
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, reward_batch, sft_batch


def scorer_scores(folder: Path, batch: bytes) -> np.ndarray:
    arrays = unpack(batch)
    scorer = scoring.ModelScorer()
    scorer.load({"reward": ModelRef(head="value", path=str(folder))})
    prompts = np.ones_like(arrays["lengths"])
    rows = {"tokens": arrays["tokens"], "prompt_lengths": prompts, "response_lengths": arrays["lengths"] - 1}
    return scorer.score(["reward"], SamplesToScore.read(rows))["scores"]


@pytest.mark.slow
def test_demonstrations_score_zero_on_average_in_trainer_and_scorer(tmp_path: Path) -> None:
    with LocalTrainer(job()) as trainer:
        trainer.client.batches |= {f"demonstrations/{i}": sft_batch(20 + i) for i in (0, 1)}
        trainer.metrics(load_command(Stage.REWARD))
        for step in range(1, 5):
            trainer.metrics(trainer.step(Stage.REWARD, step, reward_batch(step), ["reward"], 4))
        keys = ["demonstrations/0", "demonstrations/1"]
        ask = Evaluate(id="evaluate", stage=Stage.REWARD, batches=["reward/1"], demonstrations=keys)
        before = trainer.metrics(ask)
        assert before["demonstrations"] == 16
        assert abs(before["demonstration_score"]) > 0.01
        subtract = centre(before)
        for name, amount in (("plain", 0.0), ("centred", subtract)):
            command = Export(id=name, model="reward", path=str(tmp_path / name), subtract=amount)
            trainer.metrics(command)
        load = load_command(Stage.REWARD)
        ref = ModelRef(head="value", path=str(tmp_path / "centred"))
        trainer.metrics(load.model_copy(update={"models": {"reward": ref}}))
        after = trainer.metrics(ask)
        # A model that is trained further is centred anew.
        trainer.metrics(Export(id="again", model="reward", path=str(tmp_path / "again"), subtract=1.5))
    assert after["demonstration_score"] == pytest.approx(0.0, abs=1e-6)
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)
    found = {
        n: np.concatenate([scorer_scores(tmp_path / n, sft_batch(20 + i)) for i in (0, 1)])
        for n in ("plain", "centred", "again")
    }
    assert found["centred"].mean() == pytest.approx(0.0, abs=1e-5)
    np.testing.assert_allclose(found["centred"], found["plain"] - subtract, atol=1e-5)
    np.testing.assert_allclose(found["again"], found["centred"] - 1.5, atol=1e-5)
    tokens = torch.arange(5)[None]
    critic = build_stage(ModelRef(head="value", path=str(tmp_path / "centred")))
    plain = build_stage(ModelRef(head="value", path=str(tmp_path / "plain")))
    torch.testing.assert_close(critic(tokens), plain(tokens) - subtract)
    assert "score_bias" in json.loads((tmp_path / "centred" / "config.json").read_text())


class Session:
    """Trainers that answer at once."""

    def __init__(self, evaluation: dict[str, float]) -> None:
        self.step, self.evaluation = 0, evaluation
        self.folders = None
        self.exported: list[tuple[str, float]] = []
        self.evaluated: list[list[str]] = []

    def begin(self, plan: object, step: int) -> None:
        self.step = step

    async def run_step(self) -> CommandResult:
        self.step += 1
        return CommandResult(id="step", ok=True)

    async def evaluate(self, batches: list[str], demonstrations: list[str] | tuple[()] = ()) -> dict[str, float]:
        self.evaluated.append(list(demonstrations))
        return self.evaluation

    async def export(self, model: str, path: Path, subtract: float = 0.0) -> None:
        self.exported.append((model, subtract))

    def forget(self, stage: Stage) -> None:
        pass


class Facts(dict[str, Any]):
    def put(self, name: str, value: object) -> None:
        self[name] = value


@pytest.mark.parametrize(
    ("evaluation", "centred", "subtract"),
    [
        ({"demonstrations": 8.0, "demonstration_score": 2.5, "chosen": 4.0}, True, 2.5),
        ({"chosen": 4.0}, True, 4.0),
        ({}, True, 0.0),
        ({"chosen": 4.0}, False, 0.0),
    ],
)
def test_the_stage_exports_what_the_evaluation_says(
    tmp_path: Path, evaluation: dict[str, float], centred: bool, subtract: float
) -> None:
    session = Session(evaluation)
    stage = SupervisedStage(
        stage=Stage.REWARD,
        model="reward",
        source=ModelRef(head="value", path="x"),
        steps=2,
        make_step=lambda k: None,  # type: ignore[arg-type,return-value]
        eval_batches=["reward-eval/0"],
        export_to=tmp_path,
        checkpoint_every=1,
        centred=centred,
        demonstrations=["demonstrations/0"],
    )
    hooks = Hooks(lambda *_: None, lambda *_: None, lambda: 0.0)
    asyncio.run(run_supervised(stage, session, Facts(), hooks))  # type: ignore[arg-type]
    assert session.exported == [("reward", subtract)]
    assert session.evaluated == [[], ["demonstrations/0"]]
