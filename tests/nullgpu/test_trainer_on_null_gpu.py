"""The trainer's CUDA path over torch's real ProcessGroupNCCL, on GPUs that do no arithmetic (hack/nullgpu)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors import safe_open

from helpers.null_gpu import Ended, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The critic's stages run from the last rank to the first. The planner's search found these orders.
FUSED = {
    2: ["FfbBFfbBFfbBFfbB", "fFBbfFBbfFBbfFBb"],
    4: ["FFfbFFfbfbfBbBBB", "FfFffbFBFbfBbBbB", "fFffFBbfFBFbBbBb", "fffFBfFBFBFbBbbb"],
}
REVERSE = {"reverse": True}
SPLIT = {"split": 4}
# Each is one training step, or more, of actor and critic on as many ranks as the layout has.
TRAINING: dict[str, dict[str, Any]] = {
    "pp2": {"layout": {"pp": 2}, "schedules": [4, SPLIT]},
    "pp4": {"layout": {"pp": 4}, "layers": 4, "schedules": [4]},
    "fused2": {"layout": {"pp": 2}, "critic": REVERSE, "schedules": [FUSED[2]]},
    "fused4": {"layout": {"pp": 4}, "layers": 4, "critic": REVERSE, "schedules": [FUSED[4]]},
    "side by side": {
        "layout": {"pp": 4},
        "layers": 4,
        "critic": {"pp": 2, "dp": 2, "pipelines": 2, "reverse": True},
        "schedules": [4],
    },
    "apart": {"layout": {"pp": 2}, "critic": {"first": 2}, "world": 4, "schedules": [4, SPLIT]},
    "recomputed": {"layout": {"pp": 2, "tp": 2}, "recompute": True, "schedules": [4]},
    "adapters": {"layout": {"pp": 2, "dp": 2}, "lora": True, "exports": True, "schedules": [4, {"split": 8}]},
    "all": {
        "layout": {"pp": 2, "dp": 2, "tp": 2},
        "critic": REVERSE,
        "offload": True,
        "exports": True,
        "schedules": [[FUSED[2][rank // 4] for rank in range(8)], {"split": 8}],
    },
}


def train(null_gpu: Run, name: str) -> Ended:
    scenario = TRAINING[name]
    sizes = scenario["layout"].values()
    world = 1
    for size in sizes:
        world *= size
    return null_gpu(name, "trainer.train", **{"world": world, **scenario})


@pytest.mark.parametrize("name", TRAINING)
def test_a_layout_trains(null_gpu: Run, name: str) -> None:
    """No rank waits for a message that its peer sends later, and every rank learns of all steps."""
    for result in train(null_gpu, name).good():
        assert len(result["runs"]) == len(TRAINING[name]["schedules"])
        for run in result["runs"]:
            assert sorted(run["steps"]) == ["actor", "critic"]
            assert run["used"]["sends"] == run["used"]["receives"] > 0
            assert run["used"]["communicators"] == 0, "made in a step, where ranks come in unlike orders"


@pytest.mark.parametrize("name", ["adapters", "all"])
def test_an_export_holds_whole_tensors(null_gpu: Run, name: str) -> None:
    folder = train(null_gpu, name).folder
    for model, head in (("actor", "lm_head.weight"), ("ema", "lm_head.weight"), ("critic", "score.weight")):
        index = json.loads((folder / model / "model.safetensors.index.json").read_text())["weight_map"]
        assert sum(key.endswith("q_proj.weight") for key in index) == 2
        for key, rows in (("model.embed_tokens.weight", 64), ("model.layers.1.mlp.up_proj.weight", 96), (head, None)):
            with safe_open(folder / model / index[key], "np") as file:
                assert rows in (None, file.get_slice(key).get_shape()[0])


def test_offloaded_moments_come_back_from_a_checkpoint(null_gpu: Run) -> None:
    for result in train(null_gpu, "all").good():
        assert result["moments"] > 0
        assert result["lost"] == []


def test_what_a_micro_batch_asks_of_the_gpu(null_gpu: Run) -> None:
    """Counts are the same in every run, so a stray .item() fails this. Raise a budget only for a reason."""
    (alone,) = null_gpu("alone", "trainer.train", layout={"pp": 1}, layers=4, schedules=[4, 4, 8]).good()
    _, four, eight = (run["used"] for run in alone["runs"])
    # Of actor and critic, four layers each. The synchronisations read the times of four passes after the last one.
    budget = {"launches": 1161, "h2d": 6, "d2h": 0, "synchronisations": 4}
    step = {"launches": 175, "h2d": 10, "d2h": 6, "synchronisations": 7}
    for name, most in budget.items():
        assert (eight[name] - four[name]) / 4 <= most, name
        assert four[name] - 4 * most <= step[name], f"{name} of the optimizer's step"
