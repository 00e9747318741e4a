"""What all tests share: this file's folder is on sys.path, so that tests/helpers is importable as `helpers`.

`make test` runs two workers of pytest-xdist. Each test file is run by one worker, and all that use a cluster by the
same one, which begins with them: they mostly wait, and leave the other worker a core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# An example's wall-clock time says more about the machine's load than about the code.
settings.register_profile("dovetail", deadline=None)
settings.load_profile("dovetail")

# Of a run by several workers: the long ones first, the many short ones fill up what is left.
FOLDERS = ["cluster", "e2e", "unit"]


def folder_of(nodeid: str) -> str:
    """`cluster`, `e2e` or `unit`."""
    return Path(nodeid.partition("::")[0]).parent.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    several = "PYTEST_XDIST_WORKER" in os.environ
    # One worker alone comes to the cluster last: nothing then runs beside it.
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name) if several else item.path.parent.name == "cluster")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out files in the order of the tests; tests/cluster as if it were one file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if folder_of(nodeid) == "cluster" else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)
