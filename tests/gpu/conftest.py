"""Tests on a real NVIDIA GPU: `make test-gpu`. Without one they are skipped. Each needs one GPU and no vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dovetail.gpus.nvidia_driver import cuda_devices
from helpers.null_gpu import Run, scenarios


@pytest.fixture(scope="session", autouse=True)
def a_gpu() -> None:
    if not cuda_devices():
        pytest.skip("this machine has no NVIDIA GPU")


@pytest.fixture(scope="session")
def on_gpu(a_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs scenarios of tests/nullgpu on the GPU; see worker.py."""
    with scenarios(tmp_path_factory.mktemp("gpu"), {**os.environ}) as run:
        yield run
