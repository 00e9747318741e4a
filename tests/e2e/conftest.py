"""What several files of whole jobs begin with, made once for all workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.agent_jobs import taught_task


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task of examples/agent.yaml, with an actor that can call its tool. Tests copy it."""
    folder = tmp_path_factory.getbasetemp()
    return taught_task(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
