"""The list of an image with another torch or vLLM than the locked ones."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "requirements" / "other_torch.py"
WHEEL = "requirements/vllm-0.32.0+cu126-cp38-abi3-linux_x86_64.whl"


def listed(lock, *given):
    command = [sys.executable, TOOL, ROOT / "requirements" / lock, *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_torch_and_vllm_take_the_places_of_the_locks():
    lines = listed("rollout-gpu.txt", "torch==2.13.0+cu126", WHEEL).stdout.splitlines()
    assert {"torch==2.13.0+cu126", WHEEL} <= set(lines)
    assert "torch==2.13.0" not in lines
    assert not [line for line in lines if "--hash" in line or line.endswith("\\")]
    locked = set(re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements/rollout-gpu.txt").read_text(), re.MULTILINE))
    assert {line.split(" ; ")[0] for line in lines} - locked == {"torch==2.13.0+cu126", WHEEL}
    for name in ("transformers", "aiohttp", "numpy", "peft", "safetensors"):
        assert any(line.startswith(f"{name}==") for line in lines), name


def test_what_belongs_to_one_cuda_is_left_to_pip():
    for lock in ("trainer.txt", "rollout-gpu.txt"):
        assert "nvidia-cublas==" in (ROOT / "requirements" / lock).read_text()
        left = listed(lock, "torch==2.13.0+cu126").stdout
        assert not re.findall(r"^(?:nvidia|cuda|nccl|triton|torchvision|flashinfer)\S*", left, re.MULTILINE)


@pytest.mark.parametrize("given", ["vllm==0.32.0", "jax==1", "--pre"])
def test_what_the_list_does_not_have_is_refused(given):
    done = listed("trainer.txt", given)
    assert done.returncode == 2
    assert done.stderr == (
        f"other_torch: {given} takes the place of no package of the list; give torch==... or vllm==...\n"
    )
