"""A whole job with an environment of a hub, whose server and adapter die in the midst of episodes."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from helpers.agent_jobs import ITERATIONS, agent_job
from helpers.free_ports import free_port
from helpers.jobs import Watcher, history, run_job, same_weights, stored_samples, untrained
from helpers.own_python import installed
from helpers.patience import PATIENCE
from helpers.vllm_servers import wait_for
from helpers.whole_lines import whole_lines

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ADAPTER = Path(__file__).parents[2] / "examples" / "hubs" / "openenv_server.py"
# The boxes of examples/agent as an environment of OpenEnv's. If it is to hang, it does so in its eighth call.
BOXES = """
import json, sys, threading
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

calls = []


def tell(*said):
    print(json.dumps(said), flush=True)


class Boxes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("boxes")

        @mcp.tool(name="open")
        def open_box(box: str) -> str:
            calls.append(box)
            if sys.argv[2:] == ["hangs"] and len(calls) == 8:
                tell("hangs", self.name)
                threading.Event().wait()
            self.right = box == self.box
            return f"a {self.things[box]}" if box in self.things else "error: there is no such box"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, box="", things=None, **_):
        self.box, self.things, self.name, self.right = box, things, episode_id, False
        self._state = State(episode_id=episode_id, step_count=0)
        tell("begins", episode_id)
        return Observation(done=False, reward=0.0, metadata={})

    async def step_async(self, action, timeout_s=None, **options):
        found = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(found, CallToolObservation) and found.error is None:
            found.reward = float(self.right)
        return found

    def _step_impl(self, action, timeout_s=None, **_):
        raise ValueError(f"there is no action {type(action).__name__}")

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Boxes, CallToolAction, CallToolObservation, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


class Hub(Watcher):
    """OpenEnv's server, and the adapter of examples/hubs beside the job. OpenEnv's server hangs in so many `lives`. It
    is killed and started again then, and in the last of them the adapter, too."""

    def __init__(self, python: Path, folder: Path, lives: int) -> None:
        super().__init__()
        self.python, self.lives, self.log = python, lives, folder / f"{lives}.log"
        self.code, self.ports, self.died = folder / "boxes.py", (free_port(), free_port()), 0
        self.code.write_text(BOXES)
        self.boxes, self.adapter = self.start_boxes(), self.start_adapter()
        for port in self.ports:  # a job that begins before gives up after six questions
            wait_for(partial(_listens, port), PATIENCE, f"a server on port {port}")

    def start_boxes(self) -> subprocess.Popen[bytes]:
        hangs = ["hangs"] if self.died < self.lives else []
        with self.log.open("ab") as log:
            return subprocess.Popen([self.python, self.code, str(self.ports[0]), *hangs], stdout=log)

    def start_adapter(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([self.python, ADAPTER, str(self.ports[1]), f"http://127.0.0.1:{self.ports[0]}"])

    def look(self, launcher: Launcher) -> None:
        if self.died < self.lives and len(self.told("hangs")) > self.died:
            self.died += 1
            _kill(self.boxes)
            if self.died == self.lives:
                _kill(self.adapter)
                self.adapter = self.start_adapter()
            self.boxes = self.start_boxes()

    def told(self, what: str) -> list[str]:
        """The episodes of which the environment said this, without the run's name."""
        rows = [json.loads(line) for line in whole_lines(self.log)]
        return ["-".join(name.split("-")[-4:]) for said, name in rows if said == what]

    def close(self) -> None:
        """End both, because a job must leave no process."""
        super().close()
        _kill(self.boxes)
        _kill(self.adapter)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def job_with(folder: Path, hub: Hub) -> RLHFJob:
    earned = {"function": "dovetail.coordinator.rewards.earned:earned", "importPath": str(folder), "workers": 1}
    document = agent_job(folder, earned, advantage="grpo").model_dump(mode="json", by_alias=True)
    document["spec"]["sessions"] = {"environment": {"url": f"http://127.0.0.1:{hub.ports[1]}"}, "maxTurns": 3}
    return RLHFJob.model_validate(document)


def test_an_environment_of_openenv_trains_and_its_death_changes_no_token(taught: Path, tmp_path: Path) -> None:
    """An episode whose session died begins anew in another session, with the same tokens."""
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)
    python, runs, hubs = installed(tmp_path, "openenv>=0.10,<0.11"), [tmp_path / "whole", tmp_path / "killed"], []
    for run, lives in zip(runs, (0, 2), strict=True):
        hubs.append(Hub(python, tmp_path, lives))
        try:
            outcome, _ = run_job(job_with(tmp_path, hubs[-1]), run, hubs[-1])
            assert outcome.succeeded, outcome.reason
        finally:
            hubs[-1].close()
    rows = history(runs[0], "ppo")
    assert len(rows) == ITERATIONS
    for row in rows.values():
        assert row["episodes_discarded"] == 0
        assert row["episode_calls"] > 0, "the model calls tools"
        assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    assert sum(row["reward"] for row in rows.values()) > 0, "some open the right box"
    whole, killed = (hub.told("begins") for hub in hubs)
    assert len(whole) == len(set(whole)) == 16 * ITERATIONS
    assert hubs[1].died == 2
    assert {name.rpartition("-")[0] for name in killed} == {name.rpartition("-")[0] for name in whole}
    again = {name for name in killed if not name.endswith("-0")}
    assert again, "what was lost is begun anew"
    tokens = [[sample.tokens.tolist() for sample in stored_samples(run, ITERATIONS)] for run in runs]
    assert tokens[0] == tokens[1]
    assert same_weights(*runs) == []
    for run in runs:
        assert untrained(run) == []
        assert all(row["episodes_discarded"] == 0 for row in history(run, "ppo").values())
