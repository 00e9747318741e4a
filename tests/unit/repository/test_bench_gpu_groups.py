"""`bench_gpu.py` and the processes of its groups."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import bench_gpu


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Any) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_parts_are_all_groups() -> None:
    assert sorted(name for part in bench_gpu.PARTS for name in part) == sorted(set(bench_gpu.GROUPS) - {"device"})


@pytest.mark.slow
def test_a_group_ends_with_the_process_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's Ctrl-C or `timeout` reaches the first process only. The group would keep the GPU."""
    told = tmp_path / "pid"

    def group(*_: Any) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        told.with_suffix(".new").write_text(str(os.getpid()))
        told.with_suffix(".new").rename(told)
        time.sleep(600)

    monkeypatch.setattr(bench_gpu, "child", group)
    first = os.fork()
    if not first:
        try:
            bench_gpu.main(["--tiny", "--groups", "device", "--logs", str(tmp_path)])
        finally:
            os._exit(0)
    until(told.exists)
    started = int(told.read_text())
    os.kill(first, signal.SIGTERM)
    os.waitpid(first, 0)
    until(lambda: not alive(started))
