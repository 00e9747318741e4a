"""`null_gpu` runs scenarios on the null GPU (hack/nullgpu). All tests of a session share one process that forks the
ranks, so `make test` gives all files of this folder to one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.null_gpu import Run, scenarios
from helpers.patience import PATIENCE

NULLGPU = Path(__file__).parents[2] / "hack/nullgpu"


@pytest.fixture(scope="session")
def null_gpu_library() -> Path:
    """The library to preload; skips the test where it can't be built."""
    asked = subprocess.run([sys.executable, str(NULLGPU), "build"], capture_output=True, text=True, timeout=PATIENCE)
    if asked.returncode == 1:
        pytest.skip(asked.stderr.strip())
    asked.check_returncode()
    return Path(asked.stdout.strip())


@pytest.fixture(scope="session")
def null_gpu_environment(null_gpu_library: Path) -> dict[str, str]:
    """The environment of a process on the null GPU."""
    return {
        **os.environ,
        "LD_PRELOAD": str(null_gpu_library),
        "LD_LIBRARY_PATH": str(null_gpu_library.parent),
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog may end a rank before it can raise
    }


@pytest.fixture(scope="session")
def null_gpu(null_gpu_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`null_gpu(name, do, world=1, ...)` runs the scenario once a session; see worker.py."""
    with scenarios(tmp_path_factory.mktemp("nullgpu"), null_gpu_environment) as run:
        yield run
