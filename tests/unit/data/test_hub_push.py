"""A run's model, sent with the real client to a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.push_command import push_model
from dovetail.protocol.errors import RunError, UsageError
from helpers.fake_hub import FakeHub
from helpers.patience import PATIENCE

WEIGHTS = b"1" * 200_000


@pytest.fixture
def hub():
    server = FakeHub()
    server.tokens |= {"reader", "writer"}
    server.writers.add("writer")
    with server.running():
        yield server


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "hello" / "models" / "actor"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# hello\n")
    return tmp_path / "hello"


def push(hub: FakeHub, run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the client reads the hub's address when it is imported."""
    # Without Xet, a protocol of the public hub, its client speaks git-lfs.
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "writer", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run_dir / ".hf")}
    own |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dovetail.cli.main", "push", str(run_dir), *arguments],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.slow
def test_a_new_private_repository_gets_the_whole_model_on_a_branch(hub, run_dir):
    done = push(hub, run_dir, "me/hello", "--private", "--revision", "first")
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["me/hello"]
    assert repository.private
    files = repository.commits[repository.branches["first"]]
    assert files["model.safetensors"] == WEIGHTS
    assert json.loads(files["config.json"]) == {"model_type": "llama"}
    assert files["README.md"].startswith(b"---")
    assert "model.safetensors" not in repository.commits[repository.branches["main"]]
    assert f"{hub.url}/me/hello/commit/{repository.branches['first']}" in done.stdout
    # Once more: the weights are there already.
    hub.asked.clear()
    assert push(hub, run_dir, "me/hello").returncode == 0
    assert [path for method, path, _, _ in hub.asked if method == "PUT"] == []
    assert repository.commits[repository.branches["main"]]["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(
    ("token", "said"),
    [("nobody", "does not accept the token"), ("reader", "the token may not write to me/hello")],
)
def test_a_refusal_says_what_to_do(hub, run_dir, token, said):
    with pytest.raises(RunError, match=said):
        push_model(run_dir / "models/actor", "me/hello", message="x", endpoint=hub.url, token=token)
    assert hub.repositories == {}


def test_a_hub_that_does_not_answer(run_dir):
    with pytest.raises(RunError, match=r"^http://127\.0\.0\.1:9 does not answer"):
        push_model(run_dir / "models/actor", "me/hello", message="x", endpoint="http://127.0.0.1:9", token="writer")


def test_a_name_that_is_none(tmp_path):
    with pytest.raises(UsageError, match="write owner/name"):
        push_model(tmp_path, "hello", message="x")
