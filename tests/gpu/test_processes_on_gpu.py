"""The processes of a job on a real GPU."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from dovetail.manifest.types import Stage
from helpers.fake_coordinator import FakeCoordinator
from helpers.null_gpu import Run
from helpers.patience import PATIENCE
from helpers.trainer_ranks import TINY, TrainerRanks, job, layouts, ppo_batch, reward_batch, sft_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class OneRank(TrainerRanks):
    """A trainer of one rank, each time in a folder of its own."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, **spec: Any) -> None:
        super().__init__(folder, job(**spec), layouts(), environment=environment, patience=300)

    def train(self, steps: range, batches: dict[str, bytes]) -> list[dict[str, float]]:
        """The metrics of these PPO steps."""
        coordinator: FakeCoordinator = self.coordinator
        coordinator.batches |= batches
        found = [coordinator.execute(self.step(Stage.PPO, n, f"ppo-{n}"), timeout=PATIENCE).metrics for n in steps]
        return [{k: v for k, v in each.items() if not k.endswith(("seconds", "bytes"))} for each in found]


BATCHES = {f"ppo-{n}": ppo_batch(n) for n in (1, 2, 3)}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def test_a_checkpoint_continues_with_the_same_bits(tmp_path: Path) -> None:
    """Three PPO steps in one process, and in two: the second starts from the checkpoint of the first, which was
    killed. Layers are compiled, as by default."""
    with OneRank(tmp_path / "whole") as whole:
        whole.coordinator.execute(whole.load(Stage.PPO), timeout=PATIENCE)
        expected = whole.train(range(1, 4), BATCHES)
        whole.coordinator.execute(whole.export("actor", tmp_path / "actor"))
    with OneRank(tmp_path / "parts") as parts:
        parts.coordinator.execute(parts.load(Stage.PPO), timeout=PATIENCE)
        first = parts.train(range(1, 2), BATCHES)
        parts.coordinator.execute(parts.save(tmp_path / "checkpoint"), timeout=PATIENCE)
        parts.kill(0)
    with OneRank(tmp_path / "again") as again:
        again.coordinator.execute(again.load(Stage.PPO, checkpoint=tmp_path / "checkpoint"), timeout=PATIENCE)
        later = again.train(range(2, 4), BATCHES)
        again.coordinator.execute(again.export("actor", tmp_path / "actor again"))
    assert [*first, *later] == expected
    assert digests(tmp_path / "actor") == digests(tmp_path / "actor again") != {}


def test_a_gpu_computes_what_a_cpu_computes(tmp_path: Path) -> None:
    """In float32: SFT, reward model and PPO give the same losses and gradient norms."""
    found = []
    exact = {"dtype": "float32"}
    models = {
        "actor": {"source": {"scratch": TINY.model_dump(by_alias=True)}, **exact},
        "critic": exact,
        "reward": exact,
    }
    for place, environment in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        with OneRank(tmp_path / place, environment, models=models, trainer={"compile": "Never"}) as ranks:
            for stage, batch in ((Stage.SFT, sft_batch(1)), (Stage.REWARD, reward_batch(1)), (Stage.PPO, ppo_batch(1))):
                ranks.coordinator.batches[stage.value] = batch
                ranks.coordinator.execute(ranks.load(stage, id=f"load/{stage.value}"), timeout=PATIENCE)
                metrics = ranks.coordinator.execute(ranks.step(stage, 1, stage.value), timeout=PATIENCE).metrics
                found.append((place, stage, metrics))
    for (_, stage, gpu), (_, _, cpu) in zip(found[:3], found[3:], strict=True):
        for name, value in cpu.items():
            if "loss" in name or "norm" in name or name.startswith("ppo/"):
                assert gpu[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (stage, name)


def test_a_scorer_gives_the_same_scores_after_it_left_the_gpu(on_gpu: Run) -> None:
    code, answers = on_gpu("scorer", "scorer.process", world=2, shared=True).good()
    assert code == 0
    assert answers["info"]["device"] == "cuda:0"
    assert answers["logprobs"] < 0
    assert answers["same"]


def test_weights_arrive_whole(on_gpu: Run) -> None:
    """A trainer and two receivers on one GPU, where NCCL refuses a second process: through its memory. Two versions."""
    sent, *taken = on_gpu("weights", "weights.publish", world=3, gpus=[0, 0], exact=True).good()
    assert "NcclLink" not in sent[0]
    assert taken == [[8, 8], [8, 8]]


@pytest.mark.parametrize("fault", ["dies midway", "freezes midway", "freezes while it connects"])
def test_a_receiver_that_is_lost_costs_only_itself(on_gpu: Run, fault: str) -> None:
    ended = on_gpu(fault, "weights.publish", world=3, gpus=[0, 0], fault=fault, seconds=6.0, exact=True)
    assert ended.statuses == [0, 0, 3], f"{ended.statuses}\n{ended.log}"
    assert ended.results[1][1] == 8, "the next round"
