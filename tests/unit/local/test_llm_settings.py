"""What generation without training refuses before it starts a server, and which settings it finds."""

import json
import threading

import pytest

from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.local import llm
from dovetail.local.llm import LLM, SamplingParams
from dovetail.protocol.errors import RunError
from helpers.jobs import tiny_job
from helpers.patience import PATIENCE


def save_model(folder, architecture="LlamaForCausalLM", **config):
    tokenizers.train(["hello there"], 300).save_pretrained(str(folder))
    fields = {"hidden_size": 128, "num_attention_heads": 4, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(fields | config))
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 0}, "n is 0; it is the number of responses"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0: input should be greater than 0"),
        ({"top_k": -1}, "top_k is -1: input should be greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens is 0: input should be greater than"),
        ({"min_tokens": -2}, "min_tokens is -2"),
        ({"stop": "Human:"}, "stop is a string; give a list of strings"),
        ({"stop": [""]}, "stop is ''"),
    ],
)
def test_settings_that_no_server_takes(settings, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        SamplingParams(**settings)


@pytest.mark.parametrize("prompt", [{"prompt": "Hello"}, ["Hello"], [None], 2.5])
def test_a_prompt_that_is_neither_a_text_nor_tokens(tmp_path, prompt):
    with pytest.raises(ValueError, match="prompt 1 must be a text or a list of token ids; `chat` takes messages"):
        LLM(save_model(tmp_path)).generate([[1, 2], prompt])


def test_what_is_no_language_model(tmp_path):
    with pytest.raises(RunError, match="does not exist; name the folder of a run"):
        LLM(tmp_path / "nothing")
    with pytest.raises(RunError, match="has no trained model 'actor'"):
        LLM(tmp_path)
    save_model(tmp_path / "models" / "sft")
    with pytest.raises(RunError, match=r"has no trained model 'actor'; it has: sft"):
        LLM(tmp_path)
    assert LLM(tmp_path, model="sft").folder == LLM(tmp_path / "models" / "sft").folder
    reward = save_model(tmp_path / "models" / "reward", "LlamaForSequenceClassification")
    with pytest.raises(RunError, match="is a model that scores texts; name a language model"):
        LLM(reward)
    with pytest.raises(RunError, match="vLLM cannot serve this model on CPUs"):
        LLM(save_model(tmp_path / "odd", num_attention_heads=10, head_dim=13))


def test_more_gpus_than_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "cuda_devices", lambda: ["0", "1"])
    folder = save_model(tmp_path)
    with pytest.raises(RunError, match="2 servers of 2 GPUs each need 4 GPUs, and this machine shows 2"):
        LLM(folder, servers=2, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="servers is 0"):
        LLM(folder, servers=0)


def test_each_server_has_gpus_of_its_own_and_vllms_own_seeded_sampler(tmp_path, monkeypatch):
    """vLLM's seeded sampler of GPUs, because the noise of the one for CPUs comes from the host."""
    asked, both = [], threading.Barrier(2)

    class Stopped(Exception):
        pass

    def own_server(folder, name, on_cpu, log, note, given, variables, given_up):
        asked.append((on_cpu, given, variables))
        both.wait(PATIENCE)
        raise Stopped

    monkeypatch.setattr(llm, "own_server", own_server)
    monkeypatch.setattr(llm, "cuda_devices", lambda: ["4", "5", "6", "7"])
    made = LLM(save_model(tmp_path), servers=2, tensor_parallel_size=2, vllm_args=["--x"])
    with pytest.raises(Stopped):
        made.open()
    arguments = ["--enable-scale-out", "--tensor-parallel-size", "2", "--x"]
    assert sorted(asked, key=str) == [
        (False, arguments, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        (False, arguments, {"CUDA_VISIBLE_DEVICES": "6,7"}),
    ]
    made._max_model_len = 256
    params = made._body(llm._Draw([1, 2], 9), SamplingParams(temperature=0.5).generation())["sampling_params"]
    assert (params["seed"], params["temperature"]) == (9, 0.5)


def test_two_models_of_a_run_have_logs_of_their_own(tmp_path, monkeypatch):
    """Else the second would overwrite the first one's, even while it is open."""
    logs = []

    class Stopped(Exception):
        pass

    def own_server(folder, name, on_cpu, log, *arguments, given_up):
        logs.append(log)
        raise Stopped

    monkeypatch.setattr(llm, "own_server", own_server)
    for model in ("actor", "sft"):
        save_model(tmp_path / "models" / model)
        with pytest.raises(Stopped):
            LLM(tmp_path, model=model).open()
    assert logs == [tmp_path / "logs" / name for name in ("generate-actor-0.log", "generate-sft-0.log")]


def test_settings_of_a_run_and_of_a_folder(tmp_path):
    folder = save_model(tmp_path / "run" / "models" / "actor")
    assert LLM(folder).get_default_sampling_params() == SamplingParams()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 7}))
    expected = SamplingParams(temperature=0.6, top_k=20, max_tokens=7)
    assert LLM(folder).get_default_sampling_params() == expected
    assert LLM(tmp_path / "run").get_default_sampling_params() == expected
    job = tiny_job(generation={"maxTokens": 9, "minTokens": 2, "temperature": 0.5, "topP": 0.9, "stop": ["."]})
    (tmp_path / "run" / "job.json").write_text(job.model_dump_json(by_alias=True))
    found = LLM(tmp_path / "run").get_default_sampling_params()
    assert found == SamplingParams(temperature=0.5, top_p=0.9, min_tokens=2, max_tokens=9, stop=(".",))


def test_without_servers_it_says_how_to_start_them(tmp_path):
    made = LLM(save_model(tmp_path))
    with pytest.raises(ValueError, match="prompts is a list of numbers; give a list of prompts"):
        made.generate([1, 2])
    with pytest.raises(RuntimeError, match=r"use the model in a with statement, or call open\(\)"):
        made.generate("hello")
    made.close()
