"""Environments of hubs, each in a Python of its own that is installed from a registry, play episodes as services."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.sessions.effects import EpisodeLost, Failed, NotMade, ToolCall
from dovetail.coordinator.sessions.http_environment import HttpEnvironment, HttpEpisode
from dovetail.coordinator.sessions.play import Ending
from dovetail.coordinator.store.tool_calls import CallKey
from helpers.agent_life import END, Job, learnt
from helpers.cluster import wait_for
from helpers.free_ports import free_port
from helpers.own_python import UV, installed

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

HUBS = Path(__file__).parents[3] / "examples" / "hubs"


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def served(command: Sequence[Any], port: int, **variables: str) -> Iterator[str]:
    """The address of a process that serves at a port."""
    with subprocess.Popen(list(map(str, command)), cwd=HUBS, env={**os.environ, **variables}) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{command[1]} answers", lambda: answers(url))
            yield url
        finally:
            process.kill()


def test_a_taskset_of_verifiers(tmp_path: Path) -> None:
    python, port = installed(tmp_path, "verifiers>=0.4,<0.5"), free_port()
    # verifiers runs its agents with uv.
    path = os.pathsep.join([str(UV.parent), os.environ["PATH"]])
    job = Job(tmp_path, [f"4{END}", f"7{END}"])
    with served([python, HUBS / "verifiers_service.py", port, "arithmetic_tasks"], port, PATH=path) as job.url:
        right = job.play(task=0)
        wrong = job.play(task=1)
    assert (right.ending, right.turns, right.reward) == (Ending.ANSWERED, 1, 1.0)
    assert wrong.reward == 0.0
    assert learnt(job, right) == [f"4{END}"]
    assert "What is 2 + 2?" in right.messages[0]["content"]


def opened(turn: int, **arguments: Any) -> ToolCall:
    return ToolCall(CallKey(1, 0, 0, 0, turn, 0), "open_box", arguments)


def test_an_environment_of_openenv(tmp_path: Path) -> None:
    """Tools over MCP. When OpenEnv's server dies, the episode is lost and no other session takes its place."""
    python, ports = installed(tmp_path, "openenv>=0.10,<0.11"), [free_port(), free_port()]

    async def played(url: str, dies: Any) -> None:
        environment = HttpEnvironment(url, "run", 120.0)
        try:
            await environment.open()
            (tool,) = environment.tools
            assert tool["function"]["name"] == "open_box"
            assert tool["function"]["parameters"]["required"] == ["box"]
            first = await environment.begin("1-0-0-0", [], {"box": "green", "of": "no use to reset"})
            assert first.observation == ""
            assert "Missing required argument" in await first.make(opened(0, bax=1))
            assert await first.make(opened(1, box="green")) == "the thing"
            assert await first.make(opened(2, box="green")) == "error: the episode is over"
            assert await first.recall(opened(1, box="green")) == "the thing"
            with pytest.raises(NotMade):
                await first.recall(opened(3, box="red"))
            assert await first.reward() == 1.0
            others: list[HttpEpisode] = [
                await environment.begin(f"1-0-{sample}-0", [], {"box": "red"}) for sample in (1, 2)
            ]
            assert await others[0].make(ToolCall(CallKey(1, 0, 1, 0, 0, 0), "open_box", {"box": "blue"})) == "nothing"
            assert await others[0].reward() == 0.0
            with pytest.raises(Failed, match="the lid is stuck"):
                await others[0].make(ToolCall(CallKey(1, 0, 1, 0, 1, 0), "open_box", {"box": "glued"}))
            await first.end()
            with pytest.raises(EpisodeLost):
                await first.reward()
            dies()
            with pytest.raises(EpisodeLost):
                await others[1].make(ToolCall(CallKey(1, 0, 2, 0, 0, 0), "open_box", {"box": "red"}))
        finally:
            await environment.close()

    with subprocess.Popen([python, HUBS / "openenv_boxes.py", str(ports[0])]) as boxes:
        try:
            theirs = f"http://127.0.0.1:{ports[0]}"
            wait_for("OpenEnv's server answers", lambda: answers(theirs))
            with served([python, HUBS / "openenv_server.py", ports[1], theirs], ports[1]) as url:
                asyncio.run(played(url, boxes.kill))
        finally:
            boxes.kill()


# NeMo Gym's own server of one of its examples: a counter, in a session of each episode.
COUNTER = """
import sys, uvicorn
from unittest.mock import MagicMock
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer as Server
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServerConfig as Config

config = Config(host="127.0.0.1", port=int(sys.argv[1]), entrypoint="", name="counter", domain="other")
app = Server(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
# What it imports. NeMo Gym 0.7 asks for Python 3.13.14. Its code is installed without that check.
NEEDS = (
    *("aiohttp>=3.14.4", "anthropic<=0.109.2", "anyio", "devtools", "fastapi", "httptools", "httpx", "hydra-core"),
    *("itsdangerous", "jinja2", "mcp>=1.28.1,<2", "mlflow-skinny", "omegaconf", "openai==2.44.0", "orjson", "pandas"),
    *("psutil", "pydantic", "pydot", "pyjwt", "python-multipart", "ray", "requests", "rich", "scipy", "tqdm"),
    *("uvicorn", "uvloop", "wandb", "yappi"),
)


def counts(name: str, **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>{END}"


def test_a_resources_server_of_nemo_gym(tmp_path: Path) -> None:
    python, code, ports = installed(tmp_path, *NEEDS), tmp_path / "nemo_gym", [free_port(), free_port()]
    only = ["--no-deps", "--python-version", "3.13.14", "--target", code]
    subprocess.run([UV, "pip", "install", "-q", *only, "nemo-gym==0.7.0"], check=True)
    (tmp_path / "counter.py").write_text(COUNTER)
    data = code / "resources_servers" / "example_session_state_mgmt" / "data" / "example.jsonl"
    row = json.loads(data.read_text().splitlines()[0])
    assert (row["initial_count"], row["expected_count"]) == (3, 6)
    job = Job(
        tmp_path,
        [
            *(counts("increment_counter", count=1), counts("verify"), counts("increment_counter", count=2)),
            *(counts("get_counter_value"), f"It is 6.{END}", f"It is 3.{END}"),
        ],
    )
    with (
        served([python, tmp_path / "counter.py", ports[0]], ports[0], PYTHONPATH=str(code)) as theirs,
        served([python, HUBS / "nemo_gym_service.py", ports[1], theirs], ports[1]) as job.url,
    ):
        right = job.play(**row)
        wrong = job.play(**row)
    assert (right.ending, right.turns, right.calls, right.reward) == (Ending.ANSWERED, 5, 4, 1.0)
    assert (wrong.turns, wrong.reward) == (1, 0.0)
    assert learnt(job, right) == ["".join(job.answers[:5])]
    told = [message["content"] for message in right.messages if message["role"] == "tool"]
    assert told == ['{"success":true}', '{"error": "there is no tool verify"}', '{"success":true}', '{"count":6}']
    assert "add 1 then add 2 then get the count" in right.messages[0]["content"]
