"""`dovetail serve`: what it asks of vLLM, and what it says where it cannot serve. tests/e2e starts a real server."""

import json
import socket
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli import chat_command
from dovetail.cli.main import cli
from dovetail.coordinator.data.text.chat_template import HUMAN_ASSISTANT_TEMPLATE
from dovetail.protocol.errors import RunError
from dovetail.protocol.process.endings import why_ended
from dovetail.tools.serving.served_result import check_served, last_error, serve_arguments, serve_environment
from dovetail.tools.serving.served_result import serve_command as serve_command_of


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "hello" / "models" / "actor"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 128, "num_attention_heads": 4}))
    (folder / "model.safetensors").write_bytes(b"")
    return tmp_path / "hello"


@pytest.fixture
def started(monkeypatch):
    """The commands that would have replaced this process, with their environments."""
    found = []
    monkeypatch.setattr(chat_command.os, "execve", lambda _, command, environment: found.append((command, environment)))
    monkeypatch.setattr(chat_command, "require", lambda *_: None)
    return found


def test_it_becomes_vllm_serve_with_the_users_own_arguments_last(run_dir, started):
    found = CliRunner().invoke(cli, ["serve", str(run_dir), "--port", "18123", "--gpu-memory-utilization", "0.5"])
    assert found.exit_code == 0, found.output
    (command, environment) = started[0]
    assert str(run_dir / "models" / "actor") in command
    assert command[command.index("--served-model-name") + 1] == "actor"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-2:] == ["--gpu-memory-utilization", "0.5"]
    assert environment["VLLM_PLUGINS"] == ""
    assert f"dovetail chat {run_dir} --url http://127.0.0.1:18123" in found.output


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (True, ["vllm.entrypoints.cli.main", "serve", "models/actor", "--port", "1"]),
        # vLLM's command line does not work in the builds for CPUs.
        (False, ["vllm.entrypoints.openai.api_server", "--model", "models/actor", "--port", "1"]),
    ],
)
def test_vllms_own_entry_points(whole, expected):
    assert serve_command_of(Path("models/actor"), ["--port", "1"], whole)[3:] == expected


def test_a_model_without_a_chat_template_gets_that_of_its_training(run_dir):
    folder = run_dir / "models" / "actor"
    assert HUMAN_ASSISTANT_TEMPLATE in serve_arguments(folder, "actor", "::1", 1, on_cpu=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert "--chat-template" not in serve_arguments(folder, "actor", "::1", 1, on_cpu=True)


def test_what_the_user_has_set_stays():
    found = serve_environment(True, {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_PLUGINS": "mine"})
    assert (found["VLLM_CPU_KVCACHE_SPACE"], found["VLLM_PLUGINS"]) == ("8", "mine")


def test_sockets_have_short_paths_whatever_the_temporary_folder_is(monkeypatch, tmp_path):
    long = tmp_path / ("a" * 90)
    long.mkdir()
    for temporary, expected in ((str(long), "/tmp"), ("/var/tmp", "/var/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        assert serve_environment(True, {})["VLLM_RPC_BASE_PATH"] == expected


def test_what_cannot_be_served_is_said_at_once(run_dir, tmp_path, started):
    def said(*arguments: str) -> str:
        found = CliRunner().invoke(cli, ["serve", *arguments])
        assert found.exit_code in (1, 2)
        assert started == []
        return found.output

    assert "does not exist; name the folder of a run" in said(str(tmp_path / "nothing"))
    (tmp_path / "begun").mkdir()
    assert "has no trained model 'actor'; has the run finished?" in said(str(tmp_path / "begun"))
    assert "has no trained model 'sft'; it has: actor (choose with --model)" in said(str(run_dir), "--stage", "sft")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in said(
            str(run_dir), "--port", str(port)
        )


def test_heads_that_vllm_does_not_compute_on_cpus(run_dir, started, monkeypatch):
    monkeypatch.setattr(chat_command, "cuda_devices", list)
    (run_dir / "models" / "actor" / "config.json").write_text(json.dumps({"head_dim": 24}))
    found = CliRunner().invoke(cli, ["serve", str(run_dir)])
    assert found.exit_code == 1
    assert "heads have 24 dimensions" in found.output


def test_without_vllm_the_extra_is_named(run_dir, monkeypatch):
    monkeypatch.setattr(chat_command, "cuda_devices", list)
    monkeypatch.setattr("dovetail.protocol.process.extras.importlib.util.find_spec", lambda name: None)
    found = CliRunner().invoke(cli, ["serve", str(run_dir)])
    assert found.exit_code == 2
    assert "pip install 'dovetail-rlhf[rollout-cpu]'" in found.output


def test_the_last_error_of_a_log(tmp_path):
    (tmp_path / "log").write_text("INFO begun\nValueError: no memory\nINFO ended\n")
    assert last_error(tmp_path / "log") == "ValueError: no memory"


def test_the_cause_counts_and_not_the_line_that_points_to_it(tmp_path):
    """As vLLM writes them: the worker's error, then the engine core's about the worker, then the server's."""
    (tmp_path / "log").write_text(
        "(Worker pid=7) ERROR 11-23 23:12:36 [multiproc_executor.py:953] ValueError: no memory for the KV cache\n"
        "(EngineCore pid=6) Exception: WorkerProc initialization failed. See stack trace for root cause.\n"
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_error(tmp_path / "log") == "ValueError: no memory for the KV cache"
    assert why_ended(tmp_path / "log") == "ValueError: no memory for the KV cache"
    (tmp_path / "log").write_text("RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert last_error(tmp_path / "log") == why_ended(tmp_path / "log") == (tmp_path / "log").read_text().strip()


def test_a_folder_in_which_vllm_finds_no_weights_is_named_at_once(tmp_path):
    """It takes the path for a pattern."""
    (tmp_path / "[1]").mkdir()
    (tmp_path / "[1]" / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"finds no weights in a folder whose path has \*, \? or \[; rename it: "):
        check_served(tmp_path / "[1]", on_cpu=False)
    check_served(tmp_path, on_cpu=False)
