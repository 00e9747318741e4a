"""`dovetail validate --deep`, and the manifest's lines in errors."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.coordinator.sessions import http_environment
from dovetail.gpus.nvidia_driver import Device
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.documents import FieldLines
from dovetail.planner.make_plan import make_plan
from dovetail.tools.deep_check import gpus_found
from helpers.model_folder import save_model_folder

pytestmark = pytest.mark.usefixtures("proved_once")


def dovetail(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as users have it: a configuration, weights, and a tokenizer with a chat template."""
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def grpo(tmp_path: Path, model: Path) -> Path:
    """The folder of a GRPO job that init wrote, with the model and data of a user: BOM, blank lines, CRLF."""
    data = tmp_path / "mine.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"})
    data.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n".encode() * 40)
    assert dovetail("init", "grpo", tmp_path / "job", "--model", model, "--data", data).exit_code == 0
    return tmp_path / "job"


def test_a_good_job_is_read_through(grpo: Path) -> None:
    done = dovetail("validate", grpo / "job.yaml", "--deep")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "a chat template, ends with '<|eos|>'" in text
    assert "data.prompts[0] 40 records, Messages; prompt: median" in text
    assert "prompts 36 to train on, 4 held out; the first: '<user>What is 2 + 3?<assistant>'" in text
    assert "correct, short gave finite numbers for two prompts" in text
    assert "the plan uses no GPUs" in text
    assert "is valid: job" in text


@pytest.mark.parametrize("method", ["sft", "ppo", "grpo", "dpo"])
def test_what_init_writes_passes(method: str, tmp_path: Path) -> None:
    assert dovetail("init", method, tmp_path).exit_code == 0
    done = dovetail("validate", tmp_path / "job.yaml", "--deep")
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output


@pytest.mark.slow
def test_an_episode_of_an_agent_is_played_and_shown(tmp_path: Path) -> None:
    assert dovetail("init", "agent", tmp_path).exit_code == 0
    command = ("validate", tmp_path / "job.yaml", "--deep", "--set", "spec.sessions.sandbox=None")
    done = dovetail(*command)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert 'The number is between 1 and 99. | assistant: guess({"number": 1}) | tool: higher | assistant: Done' in text
    assert "it earned 0" in text
    game = tmp_path / "game.py"
    game.write_text(game.read_text().replace("self.guesses = secret,", "self.guesses = secrets,"))
    done = dovetail(*command)
    assert done.exit_code == 2
    assert "game:Game.reset raised NameError: name 'secrets' is not defined" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_an_episode_of_an_agent_of_ones_own_is_played_and_shown(tmp_path: Path) -> None:
    """The agent of the how-to page."""
    assert dovetail("init", "agent", tmp_path).exit_code == 0
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "agents.md").read_text()
    (tmp_path / "agent.py").write_text(page.partition("```python\n# agent.py\n")[2].partition("```")[0])
    document = yaml.safe_load((tmp_path / "job.yaml").read_text())
    document["spec"]["sessions"] = {"agent": {"command": ["python", "agent.py"]}, "sandbox": "None"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    done = dovetail("validate", tmp_path / "job.yaml", "--deep")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert 'assistant: guess({"number": 1}) | tool: wrong | assistant: Done' in text
    assert "it earned 0" in text
    (tmp_path / "agent.py").write_text("raise OSError('the shop is closed')")
    done = dovetail("validate", tmp_path / "job.yaml", "--deep")
    assert done.exit_code == 2
    said = "spec.sessions: the agent ended with exit code 1: OSError: the shop is closed"
    assert said in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_service_of_agents_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for an episode, which may have effects."""
    assert dovetail("init", "agent", tmp_path).exit_code == 0
    monkeypatch.setattr(http_environment, "BACKOFF_SECONDS", 0.01)
    asked = list[str]()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_error(405)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        document = yaml.safe_load((tmp_path / "job.yaml").read_text())
        document["spec"]["sessions"] = {"agent": {"url": url}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
        done = dovetail("validate", tmp_path / "job.yaml", "--deep")
        server.shutdown()
    assert done.exit_code == 0, done.output
    assert f"{url} answers; only a run asks it for episodes" in " ".join(done.output.split())
    assert asked == ["GET /v1/episodes"]
    done = dovetail("validate", tmp_path / "job.yaml", "--deep")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert f"spec.sessions.agent.url: {url} accepts no connection (" in said
    assert "; start the service, or correct the address" in said


@pytest.mark.slow
def test_an_episode_that_begins_with_too_much_is_named(tmp_path: Path) -> None:
    assert dovetail("init", "agent", tmp_path).exit_code == 0
    game = tmp_path / "game.py"
    game.write_text(game.read_text().replace('return "The number', 'return "Once more. " * 999 + "The number'))
    done = dovetail("validate", tmp_path / "job.yaml", "--deep", "--set", "spec.sessions.sandbox=None")
    assert done.exit_code == 2
    said = r"spec\.sessions: the episode begins with \d+ tokens, but spec\.data\.maxPromptTokens is \d+; raise it"
    assert re.search(said, " ".join(done.stderr.split()))


def test_a_bad_line_of_the_data_is_named(grpo: Path) -> None:
    data = grpo.parent / "mine.jsonl"
    data.write_bytes(data.read_bytes() + b'{"messages": []}\n{"messages": 3}\n')
    assert dovetail("validate", grpo / "job.yaml").exit_code == 0
    done = dovetail("validate", grpo / "job.yaml", "--deep")
    assert done.exit_code == 2
    assert (
        "mine.jsonl:81: field 'messages' holds no user message to answer; 1 more of its records are bad" in done.stderr
    )


def test_a_broken_reward_function_is_named_with_its_line(grpo: Path) -> None:
    (grpo / "rewards.py").write_text(
        "def correct(prompts, responses, **fields):\n    return fields['score']\n\n\nshort = correct\n"
    )
    done = dovetail("validate", grpo / "job.yaml", "--deep")
    assert done.exit_code == 2
    assert f"reward function correct ({grpo}/rewards.py:1) raised KeyError: 'score'" in done.stderr
    (grpo / "rewards.py").write_text("import nothing_of_this_name\n")
    missing = dovetail("validate", grpo / "job.yaml", "--deep")
    assert missing.exit_code == 2
    at = line_with(grpo / "job.yaml", "rewards:correct")
    assert f"Error: {grpo}/job.yaml:{at}: spec.models.reward.functions[0].function: cannot import" in missing.stderr


def test_sequences_longer_than_the_model_takes_are_a_problem(grpo: Path) -> None:
    longer = ("--set", "spec.data.maxPromptTokens=512", "--set", "spec.generation.maxTokens=4000")
    done = dovetail("validate", grpo / "job.yaml", "--deep", *longer)
    assert done.exit_code == 2
    assert (
        "is 4512, but the model takes 2048 tokens (max_position_embeddings of its config.json); lower it."
        in done.stderr
    )


def test_records_that_are_cut_are_a_warning(grpo: Path) -> None:
    done = dovetail("validate", grpo / "job.yaml", "--deep", "--set", "spec.data.maxPromptTokens=4")
    assert done.exit_code == 0, done.output
    assert "40 are cut at 4 (prompt). To mend it: raise spec.data.maxPromptTokens" in " ".join(done.output.split())


def test_pairs_from_which_nothing_is_learnt_are_a_warning(tmp_path: Path) -> None:
    assert dovetail("init", "dpo", tmp_path).exit_code == 0
    pair = {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 5"}
    with (tmp_path / "preferences.jsonl").open("a") as file:
        file.write(json.dumps(pair) + "\n")
    done = dovetail("validate", tmp_path / "job.yaml", "--deep")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "1 of the 6 pairs have equal replies" in text
    assert "To mend it: leave them out, or raise spec.data.maxTokens if they are cut" in text


def test_data_on_a_clusters_volume_is_left_out(grpo: Path) -> None:
    source = "spec.data.prompts=[{pvc: claim/prompts.jsonl}]"
    done = dovetail("validate", grpo / "job.yaml", "--deep", "--set", source)
    assert done.exit_code == 0, done.output
    assert "spec.data.prompts[0].pvc is on a volume of a cluster" in done.output


def line_with(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("iterations: 100", "iteration: 100", "spec.ppo.iteration is not a field"),
        ("maxTokens: 512}", "maxTokens: 512, temperature: warm}", "spec.generation.temperature must be"),
        ("roles: [rollout]\n    replicas: 1", "roles: [rollout]\n    replicas: 0", "spec.groups[1].replicas must be"),
        ("microBatchSize: 4", "microBatchSize: 3", "spec.ppo.miniBatchSize is 16"),
    ],
)
def test_a_problem_carries_the_manifests_line(grpo: Path, old: str, new: str, field: str) -> None:
    file = grpo / "job.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    done = dovetail("validate", file)
    assert done.exit_code == 2
    at = line_with(file, "miniBatchSize" if "miniBatchSize" in field else new.splitlines()[-1])
    assert f"Error: {file}:{at}: {field}" in done.stderr


def test_a_field_that_is_missing_or_set_on_the_command_line(grpo: Path) -> None:
    file = grpo / "job.yaml"
    document = yaml.safe_load(file.read_text())
    del document["spec"]["groups"]
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    done = dovetail("validate", file)
    assert f"{file}:{line_with(file, 'spec:')}: spec.groups is required" in done.stderr
    lines = FieldLines(file, ["spec.ppo.clip"])
    assert lines.located("spec.ppo.clip is wrong.") == "spec.ppo.clip is wrong."
    assert lines.located("something else") == "something else"


def test_gpus_are_counted_against_the_plan(grpo: Path) -> None:
    text = (grpo / "job.yaml").read_text().replace("replicas: 1\n", "replicas: 1\n    gpu: {product: NVIDIA-A10}\n")
    (grpo / "gpus.yaml").write_text(text)
    job = load_manifest(grpo / "gpus.yaml")
    plan = make_plan(job.spec, {"actor": 2}, {}, {}, None, None)
    a10, a100 = (Device(i, name, (8, 0), 2**34) for i, name in enumerate(("NVIDIA A10", "NVIDIA A100")))
    assert gpus_found(job, plan, [a10, a10]).state == "ok"
    none = gpus_found(job, plan, [])
    assert (none.state, none.says) == ("warning", "the plan uses 2 GPUs (NVIDIA-A10), and this machine has 0")
    assert "--cpu" in none.mend
    assert "of other products: NVIDIA A100" in gpus_found(job, plan, [a10, a100]).says


@pytest.mark.parametrize("listed", ["data", "evaluation"])
def test_a_bad_record_of_a_hub_is_named(grpo: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    import datasets

    rows = [{"prompt": "2 + 2?", "answer": "4"}] * 30 + [{"prompt": "", "answer": "5"}] * 2
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    document = yaml.safe_load((grpo / "job.yaml").read_text())
    document["spec"].setdefault(listed, {})["prompts"] = [{"huggingFace": "a/b"}]
    (grpo / "job.yaml").write_text(yaml.safe_dump(document))
    done = dovetail("validate", grpo / "job.yaml", "--deep")
    assert done.exit_code == 2
    assert "a/b (train): record 31: field 'prompt' is an empty string; 1 more of its records are bad" in done.stderr
