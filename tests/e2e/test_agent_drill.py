"""Two hundred episodes and a hundred SIGKILLs: each call is made once, and the weights are those of a run in peace."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from helpers import box_server
from helpers.agent_jobs import agent_job
from helpers.free_ports import free_port
from helpers.jobs import Watcher, run_job, same_weights, untrained
from helpers.whole_lines import whole_lines

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# 16 episodes in each iteration.
ITERATIONS = 13
VICTIMS = ("coordinator", "rollouts-0", "trainer-0", "trainer-1", "environment")


class BoxServer:
    """A tool server, which is started again when it dies."""

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, free_port()
        self.start()

    def start(self) -> None:
        command = [sys.executable, box_server.__file__, str(self.port), str(self.log)]
        self.process = subprocess.Popen(command)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def calls(self) -> dict[str, str]:
        """What was answered, by the call. Fails if a call was made twice. The name of the run is left out."""
        rows = list[dict[str, Any]]()
        for line in whole_lines(self.log):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        keys = Counter(row["key"] for row in rows if "key" in row)
        assert set(keys.values()) == {1}, [key for key, count in keys.items() if count > 1]
        return {"-".join(row["key"].split("-")[-6:]): row["told"] for row in rows if "key" in row}


@contextlib.contextmanager
def served(log: Path) -> Iterator[BoxServer]:
    server = BoxServer(log)
    try:
        yield server
    finally:
        server.stop()


@dataclass
class Killer(Watcher):
    """Kills one process after another, at random, until `left` is 0. What was hit is hit again once it was replaced."""

    rng: random.Random
    server: BoxServer
    left: int
    done: Counter[str] = field(default_factory=Counter)
    _hit: dict[str, int] = field(default_factory=dict)
    _next: float = 0.0

    def look(self, launcher: Launcher) -> None:
        if self.server.process.poll() is not None:
            self.server.start()
        there = {**launcher.pids, "environment": self.server.process.pid}
        able = [name for name in VICTIMS if name in there and self._hit.get(name) != there[name]]
        if self.left == 0 or time.monotonic() < self._next or not able:
            return
        name = self.rng.choice(able)
        self._hit[name] = there[name]
        with contextlib.suppress(ProcessLookupError):
            os.kill(there[name], signal.SIGKILL)
            self.done[name] += 1
            self.left -= 1
        self._next = time.monotonic() + self.rng.uniform(0.5, 6.0)

    def close(self) -> None:
        """End the server, too, because a job must leave no process."""
        super().close()
        self.server.stop()


def job_with(folder: Path, port: int, lag: int) -> RLHFJob:
    document = agent_job(folder, advantage="grpo", iterations=ITERATIONS, lag=lag).model_dump(
        mode="json", by_alias=True
    )
    document["spec"]["sessions"] = {"environment": {"url": f"http://127.0.0.1:{port}"}, "maxTurns": 3}
    document["spec"]["failurePolicy"] |= {"maxRestarts": 10_000, "peerTimeoutSeconds": 15}
    return RLHFJob.model_validate(document)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_hundred_kills_change_no_weight_and_repeat_no_call(taught: Path, tmp_path: Path, lag: int) -> None:
    """DOVETAIL_DRILL_KILLS says how many. A run that ends before is followed by another."""
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)
    with served(tmp_path / "peace.log") as server:
        outcome, _ = run_job(job_with(tmp_path, server.port, lag), tmp_path / "peace")
        assert outcome.succeeded, outcome.reason
        calls = server.calls()
    assert len(calls) > 100
    left, done = int(os.environ.get("DOVETAIL_DRILL_KILLS", "100")), Counter[str]()
    rng, number = random.Random(lag), 0
    while left:
        number += 1
        with served(tmp_path / f"killed-{number}.log") as server:
            killer = Killer(rng, server, left)
            run = tmp_path / f"killed-{number}"
            outcome, _ = run_job(job_with(tmp_path, server.port, lag), run, killer)
            assert outcome.succeeded, outcome.reason
            assert killer.left < left
            left, done = killer.left, done + killer.done
            assert server.calls() == calls
        assert same_weights(tmp_path / "peace", run) == []
        assert untrained(run) == []
    print("killed:", dict(done))
