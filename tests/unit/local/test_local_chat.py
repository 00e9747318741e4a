"""Talking with a model folder of a run: a tiny Llama with a tokenizer made here."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.protocol.errors import RunError
from dovetail.tools.serving.chat import ChatModel, Sampling
from dovetail.tools.serving.conversation import PlainScreen, converse
from helpers.patience import PATIENCE

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello there, how are you"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(path / "tokenizer")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=48,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path / "models" / "sft")
    return path


def test_a_missing_model_names_those_that_are_there(run_dir):
    with pytest.raises(RunError, match=r"no trained model 'actor'; it has: sft"):
        ChatModel(run_dir, "actor")


def test_a_dialogue_longer_than_the_model_still_gets_replies(run_dir):
    model, written = ChatModel(run_dir, "sft"), []
    lines = ["hello there " * 20, "", "/what", "how are you", "/reset", "again", "/quit", "never read"]
    converse({"sft": model}, iter(lines), written.append, Sampling(8, 1.0), PlainScreen(written.append))
    text = "".join(written)
    assert "commands: /reset" in text
    assert "(the dialogue starts anew)" in text


def test_temperature_zero_repeats_itself(run_dir):
    model = ChatModel(run_dir, "sft")
    first, second = ("".join(model.reply(HELLO, Sampling(8, 0.0))) for _ in range(2))
    assert first == second
    assert len(first) > 0


def test_a_chat_template_is_used_if_there_is_one(run_dir):
    model = ChatModel(run_dir, "sft")
    assert model.prompt([{"role": "user", "content": "hi"}]) == "\n\nHuman: hi\n\nAssistant:"
    model._tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    assert model.prompt([{"role": "user", "content": "hi"}]) == "[user]hi[assistant]"


def test_a_dialogue_that_the_template_refuses_is_a_sentence(run_dir):
    model = ChatModel(run_dir, "sft")
    model._tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        RunError, match=r"^the tokenizer's chat template refuses the dialogue: System role not supported$"
    ):
        list(model.reply(HELLO, Sampling(8, 0.0)))


def test_the_command_reads_piped_lines(run_dir):
    result = CliRunner().invoke(
        cli, ["chat", str(run_dir), "--model", "sft", "--max-tokens", "4", "--temperature", "0"], input="hello\n/quit\n"
    )
    assert result.exit_code == 0, result.output
    assert result.output.endswith("\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.nightly)])
def test_questions_may_hold_any_bytes(run_dir, encoding):
    command = [sys.executable, "-P", "-m", "dovetail.cli.main", "chat", str(run_dir), "--model", "sft"]
    command += ["--engine", "transformers", "--max-tokens", "2"]
    environment = {
        **os.environ,
        "PYTHONIOENCODING": f"{encoding}:{'surrogateescape' if encoding == 'ascii' else 'strict'}",
    }
    question = "h\N{LATIN SMALL LETTER E WITH ACUTE}llo \N{HIRAGANA LETTER A}\n".encode() + b"caf\xe9\n"
    done = subprocess.run(command, env=environment, input=question, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
