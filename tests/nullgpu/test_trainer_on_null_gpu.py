"""The trainer's CUDA path over torch's real ProcessGroupNCCL, on GPUs that do no arithmetic (hack/nullgpu)."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.null_gpu import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The critic's stages run from the last rank to the first. The planner's search found these orders.
FUSED = {
    2: ["FfbBFfbBFfbBFfbB", "fFBbfFBbfFBbfFBb"],
    4: ["FFfbFFfbfbfBbBBB", "FfFffbFBFbfBbBbB", "fFffFBbfFBFbBbBb", "fffFBfFBFBFbBbbb"],
}


@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param({"pp": n, "world": n, "schedules": [4]}, id=f"pp{n}") for n in FUSED),
        *(pytest.param({"pp": n, "world": n, "reverse": True, "schedules": [FUSED[n]]}, id=f"fused{n}") for n in FUSED),
    ],
)
def test_pipelines_finish(null_gpu: Run, request: pytest.FixtureRequest, scenario: dict[str, Any]) -> None:
    """Actor and critic, one after the other and fused: no rank waits for a message that its peer sends later."""
    for result in null_gpu(request.node.callspec.id, "trainer.train", **scenario).good():
        (run,) = result["runs"]
        assert sorted(run["steps"]) == ["actor", "critic"]
        assert run["used"]["sends"] == run["used"]["receives"] > 0
        assert run["used"]["communicators"] == 0, "made in a step, where ranks come in unlike orders"


def test_tensor_parallel_ranks_finish(null_gpu: Run) -> None:
    for result in null_gpu("tp2", "trainer.train", world=2, tp=2, schedules=[4]).good():
        (run,) = result["runs"]
        assert sorted(run["steps"]) == ["actor", "critic"]
        assert run["used"]["collectives"] > 0


def test_what_a_micro_batch_asks_of_the_gpu(null_gpu: Run) -> None:
    """Counts are the same in every run, so a stray .item() fails this. Raise a budget only for a reason."""
    (alone,) = null_gpu("alone", "trainer.train", schedules=[4, 4, 8]).good()
    _, four, eight = (run["used"] for run in alone["runs"])
    # Of actor and critic, four layers each. The synchronisations read the times of four passes after the last one.
    budget = {"launches": 1161, "h2d": 6, "d2h": 0, "synchronisations": 4}
    step = {"launches": 175, "h2d": 10, "d2h": 6, "synchronisations": 7}
    for name, most in budget.items():
        assert (eight[name] - four[name]) / 4 <= most, name
        assert four[name] - 4 * most <= step[name], f"{name} of the optimizer's step"


def test_sharded_ranks_get_offloaded_moments_back_from_a_checkpoint(null_gpu: Run) -> None:
    for result in null_gpu("dp2", "trainer.train", world=2, dp=2, schedules=[4], offload=True).good():
        (run,) = result["runs"]
        assert sorted(run["steps"]) == ["actor", "critic"]
        assert run["used"]["collectives"] > 0
        assert result["moments"] > 0
        assert result["lost"] == []
