"""A model folder behind vLLM's own command, and a dialogue through it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.tools.serving.chat import ChatModel, Sampling
from dovetail.tools.serving.served_result import serve_arguments, serve_command, serve_environment
from helpers.free_ports import free_port
from helpers.nursery import NURSERY
from helpers.vllm_servers import Server, tiny_llama, wait_for

pytestmark = pytest.mark.slow
START_SECONDS = 1200.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one model, whose tokenizer has no chat template."""
    import torch
    from transformers import LlamaForCausalLM

    path = tmp_path_factory.mktemp("served")
    tokenizer = tokenizers.train(["hello there, how are you"], 300)
    torch.manual_seed(0)
    config = tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    for folder in (path / "models" / "actor", path / "tokenizer"):
        tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).float().save_pretrained(path / "models" / "actor")
    return path


@pytest.fixture(scope="module")
def server(run_dir: Path):
    """What `dovetail serve` becomes, but forked from a process that has the imports."""
    port, log = free_port(), run_dir / "vllm.log"
    folder = run_dir / "models" / "actor"
    arguments = serve_arguments(folder, "actor", "127.0.0.1", port, on_cpu=True)
    environment = serve_environment(True, {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_API_KEY": "k"})
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the imports once, not twice
    process = NURSERY.fork(log, environment, "helpers.vllm_cli", *serve_command(folder, arguments)[3:])
    found = Server("serve", f"http://127.0.0.1:{port}", process, log)
    try:
        wait_for(found.healthy, START_SECONDS, "vllm serve")
        yield found
    finally:
        found.close()


def test_the_served_model_says_what_transformers_says(server: Server, run_dir: Path) -> None:
    """Word for word, with the chat template of the training."""
    expected = "".join(ChatModel(run_dir, "actor").reply([{"role": "user", "content": "hello"}], Sampling(8, 0.0)))
    arguments = ["chat", str(run_dir), "--url", server.url, "--max-tokens", "8", "--temperature", "0"]
    found = CliRunner().invoke(cli, arguments, input="hello\n", env={"OPENAI_API_KEY": "k"})
    assert found.exit_code == 0, found.output
    # One of them ends with what is no whole character, the other leaves it out.
    assert found.output.rstrip("\n") == expected.lstrip().rstrip("\ufffd")
    assert len(found.output) > 2


def test_a_long_dialogue_goes_on(server: Server, run_dir: Path) -> None:
    """The model takes 256 tokens; vLLM's own words for a longer dialogue are known."""
    lines = "\n".join("hello there " * 12 for _ in range(6))
    arguments = ["chat", str(run_dir), "--url", server.url, "--max-tokens", "8"]
    found = CliRunner().invoke(cli, arguments, input=lines, env={"OPENAI_API_KEY": "k"})
    assert found.exit_code == 0, found.output
    assert "its first turn is forgotten" in found.output


def test_requests_need_the_key(server: Server, run_dir: Path) -> None:
    found = CliRunner().invoke(
        cli, ["chat", str(run_dir), "--url", server.url], input="hello\n", env={"OPENAI_API_KEY": ""}
    )
    assert found.exit_code == 1
    assert "wants another key" in found.output
    status, models = server.call("/v1/models", token="k")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["actor"]), json.dumps(models)
