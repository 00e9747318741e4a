"""The scorer on GPUs that do no arithmetic (hack/nullgpu): its process, its passes, and where its weights are."""

from __future__ import annotations

import pytest

from helpers.null_gpu import Run

pytestmark = pytest.mark.slow

MODELS = ["reference", "reward", "critic"]


@pytest.mark.parametrize(("split", "device"), [(1, "cuda:0"), (2, "cuda:0, cuda:1")])
def test_the_process_scores_sleeps_and_wakes(null_gpu: Run, split: int, device: str) -> None:
    ended = null_gpu(f"scorer {split}", "scorer.process", world=2, split=split, shared=True)
    code, answers = ended.good()
    assert code == 0
    assert answers["info"]["device"] == device
    assert answers["info"]["dtype"] == "bfloat16"
    assert sorted(answers["brought"]) == sorted(MODELS)
    assert answers["shapes"] == {"ref_logprobs": [8, 4], "scores": [8], "values": [8, 4]}


def test_the_process_ends_if_its_gpu_fails(null_gpu: Run) -> None:
    """CUDA refuses all further work of the process, so it would answer each request with an error."""
    code, answer = null_gpu("scorer fails", "scorer.process", world=2, fails=True).good()
    assert answer["status"] == 500
    assert "CUDA error: an uncorrectable ECC error" in answer["text"]
    assert code == 1, "which starts it again"


@pytest.mark.parametrize("devices", [1, 2])
def test_a_sleeping_scorer_keeps_no_weights_on_the_device(null_gpu: Run, devices: int) -> None:
    """What it keeps is cuBLAS's workspace and the rotary frequencies, and does not grow."""
    (found,) = null_gpu(f"asleep {devices}", "scorer.passes", devices=devices, shared=True).good()
    assert found["kept"] == [[22 * 2**20] * devices] * 3


@pytest.mark.budget
@pytest.mark.parametrize(("devices", "launches", "h2d"), [(1, 1120, 44), (2, 1174, 68)])
def test_what_passes_ask_of_the_gpu(null_gpu: Run, devices: int, launches: int, h2d: int) -> None:
    """Counts are the same in every run. Eight samples more are two passes more of each of three models with four
    layers. The host waits once a pass, for its result."""
    (found,) = null_gpu(f"passes {devices}", "scorer.passes", devices=devices).good()
    _, eight, sixteen = found["used"]
    budget = {"launches": launches, "h2d": h2d, "d2h": 6, "synchronisations": 6, "mallocs": 0, "communicators": 0}
    for name, most in budget.items():
        assert sixteen[name] - eight[name] <= most, name


def test_in_float16_samples_share_the_kernels_of_a_pass(null_gpu: Run) -> None:
    """No kernel takes sequences of unlike lengths in float16. They are padded, not computed one by one."""
    (found,) = null_gpu("float16", "scorer.passes", dtype="float16", tokens=256).good()
    _, eight, sixteen = found["used"]
    assert sixteen["launches"] == eight["launches"]
    assert sixteen["synchronisations"] == eight["synchronisations"] == 3
