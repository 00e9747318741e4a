"""Jobs whose samples are episodes, with real servers: what they drew is what is trained, whatever dies meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.store.store import Store
from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.wire import unpack
from dovetail.tools.run_audit import audit_run
from dovetail.tools.serving import served_result
from helpers.agent_jobs import CODE, ITERATIONS, agent_job, write_task
from helpers.free_ports import free_port
from helpers.jobs import Fault, Injector, Watcher, history, run_job, same_weights, stored_samples, untrained
from helpers.vllm_cli import VLLMSpawner
from helpers.whole_lines import whole_lines

pytestmark = pytest.mark.slow

EXAMPLE = CODE.parent / "agent.yaml"


def test_the_example_begins(tmp_path: Path) -> None:
    """Its data fits its manifest, and its environment answers a call in the template's own format."""
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copytree(CODE, tmp_path / "agent", ignore=shutil.ignore_patterns("*.jsonl", "tokenizer"))
    write_task(tmp_path / "agent")
    result = CliRunner().invoke(cli, ["validate", str(tmp_path / EXAMPLE.name), "--deep"])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert 'assistant: open({"box": "a"}) | tool: error: there is no such box' in told


@pytest.mark.nightly
def test_the_example_learns_its_task(tmp_path: Path) -> None:
    shutil.copytree(CODE, tmp_path / "agent")
    write_task(tmp_path / "agent")
    shutil.copy(EXAMPLE, tmp_path)
    outcome, _ = run_job(load_manifest(tmp_path / EXAMPLE.name), tmp_path / "run")
    assert outcome.succeeded, outcome.reason
    rewards = [row["reward"] for _, row in sorted(history(tmp_path / "run", "ppo").items())]
    assert rewards[0] < 0.3
    assert np.mean(rewards[-10:]) > 0.9, rewards


# An agent with two tools of its own, which imports nothing of ours. The model has eight turns, whatever it says.
PLAY = """
import json, sys
from openai import OpenAI

tools = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"box": {"type": "string"}}}}} for name in ("open", "close")]


def play(record, client, at=lambda turn: None):
    messages, right = list(record["messages"]), 0
    for turn in range(8):
        at(turn)
        if turn % 2:
            deltas = [c.choices[0].delta for c in client.chat.completions.create(
                model="m", messages=messages, tools=tools, temperature=0.1, stream=True) if c.choices]
            said, calls = "".join(d.content or "" for d in deltas), [c for d in deltas for c in d.tool_calls or []]
        else:
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            said, calls = message.content, message.tool_calls or []
        functions = [{"name": c.function.name, "arguments": c.function.arguments} for c in calls]
        asked = [{"id": c.id, "type": "function", "function": f} for c, f in zip(calls, functions)]
        messages.append({"role": "assistant", "content": said or "", **({"tool_calls": asked} if asked else {})})
        for call in calls:
            box = json.loads(call.function.arguments).get("box")
            right += box == record["box"]
            found = record["things"].get(box, "nothing") if call.function.name == "open" else "closed"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"a {found}"})
        if not calls:
            messages.append(record["messages"][-1])
    client.post("/reward", body={"reward": right / 8}, cast_to=object)
"""
AGENT = f"{PLAY}\nplay(json.load(sys.stdin), OpenAI())\n"
# The same as a service. If it is to hang, it does so in the midst of each episode of the second iteration.
SERVICE = """
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = asked["episode"].split("-")[-4:]
        print(json.dumps(["asked", *name]), flush=True)

        def at(turn):
            if sys.argv[2:] == ["hangs"] and name[0] == "2" and turn == 4:
                print(json.dumps(["hangs", *name]), flush=True)
                threading.Event().wait()

        play(asked["record"], OpenAI(base_url=asked["base_url"], api_key=asked["api_key"]), at)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
"""


def drawing(iteration: int) -> Any:
    """Whether samples of an iteration, or of one after it, are drawn."""
    return lambda status: (
        status["stage"] == "ppo" and status["phase"] == "generation" and status["iteration"] >= iteration - 1
    )


def episodes(run: Path, iteration: int) -> list[Any]:
    store = Store(run)
    try:
        found = store.episodes.of(iteration)
    finally:
        store.close()
    return [(key, e.ending, e.messages, e.turns, e.calls, e.learnt.tolist()) for key, e in found.items()]


def audited(run: Path) -> tuple[dict[str, int], dict[str, int]]:
    """What became of a run's episodes, and what they did."""
    found = audit_run(run).found
    return found.samples, dict(found.counts)


def assert_played_again(job: RLHFJob, iteration: int, *runs: Path) -> None:
    """The first trained episode of several turns is drawn again from the store, with the run's weights, by a server
    that has the tests' imports. It is that of the first run that has them: a checkpoint that a death has hindered is
    not written later."""
    version = job.spec.ppo.weight_version(iteration)
    run = next(run for run in runs if (run / "checkpoints" / f"ppo-{version:06d}").exists())
    store = Store(run)
    try:
        found = store.episodes.of(iteration).items()
    finally:
        store.close()
    key, episode = next((key, each) for key, each in found if each.turns > 1 and not each.discarded)
    words = ["debug", "replay", str(run), "--iteration", str(iteration), "--session", f"{key.prompt}/{key.sample}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_result, "ExecSpawner", VLLMSpawner)
        result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert result.output.count("drawn again are those of the run") == episode.turns
    assert f"of iteration {iteration} is that of the run: {episode.turns} turns." in result.output


# Some lids are stuck, which is no failure of the model.
STUCK = """
from boxes import Boxes, right  # noqa: F401


class Stuck(Boxes):
    def open(self, box: str) -> str:
        \"\"\"Open a box.

        Args:
            box: The colour of the box.
        \"\"\"
        if box in ("red", "blue"):
            raise OSError(f"the lid of the {box} box is stuck")
        return super().open(box)
"""


@pytest.mark.parametrize(
    ("ppo", "stuck"),
    [
        ({"advantage": "grpo"}, False),
        pytest.param({"advantage": "grpo", "lag": 1}, True, marks=pytest.mark.nightly),
        pytest.param({"advantage": "gae"}, True, marks=pytest.mark.nightly),
        pytest.param({"advantage": "gae", "lag": 1}, True, marks=pytest.mark.nightly),
    ],
    ids=["grpo", "grpo with a lag and discards", "gae with discards", "gae with a lag and discards"],
)
def test_whatever_dies_the_episodes_and_the_weights_are_the_same(
    taught: Path, tmp_path: Path, ppo: dict[str, Any], stuck: bool
) -> None:
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)
    job = agent_job(tmp_path, **ppo)
    if stuck:
        (tmp_path / "stuck.py").write_text(STUCK)
        shutil.copy(CODE / "boxes.py", tmp_path)
        document = job.model_dump(mode="json", by_alias=True)
        document["spec"]["sessions"]["environment"] = {"function": "stuck:Stuck"}
        document["spec"]["models"]["reward"] |= {"importPath": str(tmp_path)}
        job = RLHFJob.model_validate(document)
    outcome, _ = run_job(job, tmp_path / "whole")
    assert outcome.succeeded, outcome.reason
    metrics = history(tmp_path / "whole", "ppo")
    for row in metrics.values():
        assert row["episode_calls"] > 0, "the model calls tools"
        assert 1 < row["episode_turns"] <= 3
        assert (row["episodes_discarded"] > 0) == stuck
        if "lag" not in ppo:
            assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    killer = Injector(
        [
            *(Fault("coordinator", drawing(number)) for number in (1, 2)),
            Fault("rollouts-0", drawing(2)),
            Fault("trainer-1", drawing(3)),
            Fault("coordinator", drawing(3)),
        ]
    )
    outcome, _ = run_job(job, tmp_path / "killed", killer)
    assert outcome.succeeded, outcome.reason
    assert [fault for fault in killer.faults if not fault.done] == []
    last = ITERATIONS
    whole, killed = (stored_samples(tmp_path / name, last) for name in ("whole", "killed"))
    assert [s.tokens.tolist() for s in killed] == [s.tokens.tolist() for s in whole]
    assert episodes(tmp_path / "killed", last) == episodes(tmp_path / "whole", last)
    drawn = {sample.weight_version for sample in (*whole, *killed) if len(sample.tokens)}
    assert drawn == {job.spec.ppo.weight_version(last)}
    assert same_weights(tmp_path / "whole", tmp_path / "killed") == []
    for name in ("whole", "killed"):
        assert untrained(tmp_path / name) == []
        assert_no_discard_is_learnt(tmp_path / name)
    assert audited(tmp_path / "killed") == audited(tmp_path / "whole")
    assert_played_again(job, last, tmp_path / "killed", tmp_path / "whole")


def assert_no_discard_is_learnt(run: Path) -> None:
    """The last batch: the row of a discarded episode has no token, and a group of its own."""
    arrays = unpack((run / "experience" / f"{ITERATIONS:06d}.safetensors").read_bytes())
    store = Store(run)
    try:
        gone = [episode.discarded for episode in store.episodes.of(ITERATIONS).values()]
    finally:
        store.close()
    lengths, groups = arrays["response_lengths"].tolist(), arrays["groups"].tolist()
    for row, (discarded, learnt) in enumerate(zip(gone, arrays["learnt"].any(axis=1).tolist(), strict=True)):
        if discarded:
            assert (lengths[row], learnt, groups.count(groups[row])) == (0, False, 1)


def job_of_agents(folder: Path, agent: dict[str, Any], **sessions: Any) -> RLHFJob:
    earned = {"function": "dovetail.coordinator.rewards.earned:earned", "importPath": str(folder), "workers": 1}
    fewer = {"iterations": 2, "samplesPerPrompt": 2, "globalBatchSize": 8, "miniBatchSize": 8}
    document = agent_job(folder, earned, advantage="grpo", **fewer).model_dump(mode="json", by_alias=True)
    document["spec"]["sessions"] = {"agent": agent, "maxTokens": 40, **sessions}
    document["spec"]["generation"] = {"maxTokens": 640}
    return RLHFJob.model_validate(document)


@pytest.fixture(scope="module")
def own_agent(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RLHFJob, Path]:
    """A job of an agent with eight turns and two tools through the SDK of OpenAI, in a sandbox, and the folder of its
    run, which nobody disturbed."""
    folder = tmp_path_factory.mktemp("agent")
    shutil.copytree(taught, folder, dirs_exist_ok=True)
    folder.chmod(0o755)
    (folder / "agent.py").write_text(AGENT)
    job = job_of_agents(folder, {"command": [sys.executable, "agent.py"]})
    outcome, _ = run_job(job, folder / "whole")
    assert outcome.succeeded, outcome.reason
    return job, folder / "whole"


def test_an_agent_of_ones_own_trains(own_agent: tuple[RLHFJob, Path]) -> None:
    _, whole = own_agent
    for row in history(whole, "ppo").values():
        assert (row["episode_turns"], row["episodes_discarded"]) == (8, 0)
        assert row["episode_calls"] > 0, "the model calls tools"
        assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    events = [json.loads(line) for line in whole_lines(whole / "events.jsonl")]
    assert [e["setting"] for e in events if e["event"] == "agent.overruled"] == ["temperature"]
    assert untrained(whole) == []


@pytest.mark.nightly
def test_a_death_changes_no_token_of_an_agent_of_ones_own(own_agent: tuple[RLHFJob, Path], tmp_path: Path) -> None:
    """The coordinator dies while episodes are played."""
    job, peaceful = own_agent
    killer = Injector([Fault("coordinator", drawing(1)), Fault("coordinator", drawing(2))])
    outcome, _ = run_job(job, tmp_path / "killed", killer)
    assert outcome.succeeded, outcome.reason
    assert [fault for fault in killer.faults if not fault.done] == []
    whole, killed = (stored_samples(run, 2) for run in (peaceful, tmp_path / "killed"))
    assert [s.tokens.tolist() for s in killed] == [s.tokens.tolist() for s in whole]
    assert episodes(tmp_path / "killed", 2) == episodes(peaceful, 2)
    assert same_weights(peaceful, tmp_path / "killed") == []
    assert untrained(tmp_path / "killed") == []
    assert audited(tmp_path / "killed") == audited(peaceful)
    assert_played_again(job, 2, tmp_path / "killed", peaceful)


class Service(Watcher):
    """A service of agents, in a process of its own. While a job runs, it is killed as soon as two episodes hang, if it
    is one that `hangs`, and started again."""

    def __init__(self, folder: Path, hangs: bool) -> None:
        super().__init__()
        self.code, self.log, self.port, self.killed = folder / "service.py", folder / f"{hangs}.log", free_port(), False
        self.code.write_text(PLAY + SERVICE)
        self.start(["hangs"] * hangs)

    def start(self, arguments: list[str]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, str(self.code), str(self.port), *arguments], stdout=log)

    def look(self, launcher: Launcher) -> None:
        if not self.killed and len(self.told("hangs")) == 2:
            self.stop()
            self.start([])
            self.killed = True

    def told(self, what: str) -> list[str]:
        """The episodes of which the service said this."""
        rows = [json.loads(line) for line in whole_lines(self.log)]
        return ["-".join(name) for said, *name in rows if said == what]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the service, too, because a job must leave no process."""
        super().close()
        self.stop()


@pytest.mark.nightly
def test_agents_of_a_service_train_and_its_death_changes_no_token(taught: Path, tmp_path: Path) -> None:
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)
    runs, services = [tmp_path / "whole", tmp_path / "killed"], list[Service]()
    for hangs, run in enumerate(runs):
        services.append(Service(tmp_path, bool(hangs)))
        try:
            job = job_of_agents(tmp_path, {"url": f"http://127.0.0.1:{services[-1].port}"}, maxConcurrent=2)
            outcome, _ = run_job(job, run, services[-1])
            assert outcome.succeeded, outcome.reason
        finally:
            services[-1].stop()
    assert services[1].killed
    asked = [service.told("asked") for service in services]
    assert len(asked[0]) == len(set(asked[0])) == 16
    assert sorted(asked[1]) == sorted([*asked[0], *services[1].told("hangs")]), "what was lost is asked for again"
    for row in history(runs[0], "ppo").values():
        assert (row["episode_turns"], row["episodes_discarded"]) == (8, 0)
        assert row["episode_calls"] > 0, "the model calls tools"
        assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    tokens = [[s.tokens.tolist() for s in stored_samples(run, 2)] for run in runs]
    assert tokens[0] == tokens[1]
    assert episodes(runs[1], 2) == episodes(runs[0], 2)
    assert same_weights(*runs) == []
    assert audited(runs[1]) == audited(runs[0])
    for run in runs:
        assert untrained(run) == []
