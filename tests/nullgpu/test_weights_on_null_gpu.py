"""Weights on the null GPU: who gets them, over which link, and what a receiver that is lost costs the others."""

from __future__ import annotations

import pytest

from helpers.null_gpu import Run
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow
TENSORS = 8
# Of a transfer: the receivers that are well must come in time on a busy machine too.
SECONDS = 6.0


@pytest.mark.parametrize(
    ("gpus", "versions", "links"),
    [
        ([1, 2], {}, ["NcclLink"]),
        ([0], {}, ["IpcSender"]),  # NCCL refuses two ranks on one GPU
        ([0, 1], {"2": 22605}, ["IpcSender", "GlooLink"]),  # NCCL refuses unlike versions
        ([0, 1, 2, 2], {}, ["NcclLink", "IpcSender", "GlooLink"]),
    ],
)
def test_weights_take_the_link_that_each_receiver_has(
    null_gpu: Run, gpus: list[int], versions: dict[str, int], links: list[str]
) -> None:
    name = f"links-{''.join(map(str, gpus))}-{len(versions)}"
    sent, *taken = null_gpu(name, "weights.publish", world=1 + len(gpus), gpus=gpus, versions=versions).good()
    assert sent[0] == sent[2] == links
    assert taken == [[TENSORS, TENSORS]] * len(gpus)


def test_each_stage_sends_to_its_own_gpu_and_to_others(null_gpu: Run) -> None:
    found = null_gpu("stages", "weights.publish", world=4, trainers=2, gpus=[0, 3]).good()
    assert found[0][0] == ["NcclLink", "IpcSender"]
    assert found[1][0] == ["NcclLink"]
    first, second = found[2:]
    assert first == second
    assert first[0] == first[1] > TENSORS


def test_a_server_sends_on_from_host_memory_what_came_over_nccl(null_gpu: Run) -> None:
    found = null_gpu("relay", "weights.relay", world=3).good()
    assert found == [["NcclLink"], [TENSORS, ["cpu"]], TENSORS]


@pytest.mark.parametrize(
    ("fault", "gpus"),
    [
        ("dies midway", [1, 2, 3]),
        ("freezes midway", [1, 2, 3]),
        ("freezes in set-up", [1, 2, 3]),
        ("dies midway", [1, 2, 0]),
        ("freezes while it connects", [1, 2, 0]),
    ],
)
def test_a_receiver_that_is_lost_costs_only_itself(null_gpu: Run, fault: str, gpus: list[int]) -> None:
    """Every other process lives, gives up in time, and gets the weights in the next round."""
    ended = null_gpu(f"{fault}-{gpus[-1]}", "weights.publish", world=4, gpus=gpus, fault=fault, seconds=SECONDS)
    assert ended.statuses == [0, 0, 0, 3], f"{ended.statuses} {ended.waits}\n{ended.log}"
    error, seconds, again, _ = ended.results[0]
    if fault.startswith("dies"):
        assert "called off" in error
    else:
        assert f"within {SECONDS:.0f} s" in error or f"deadline of {SECONDS:.0f} s" in error
        assert "not there: rollout-2" in error
    assert seconds < PATIENCE, "not the deadline of a generation"
    assert again == ["NcclLink"]
    for failed, whole in ended.results[1:3]:
        assert "called off" in failed, "the others are not to blame"
        assert whole == TENSORS
