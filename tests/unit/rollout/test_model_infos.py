"""What a server need not find out or wait for: the model's class, which a pod's image brings along, and a config.json
beside the tokenizer."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dovetail.rollout import compat
from dovetail.rollout.serving import model_infos
from dovetail.rollout.serving.plugin import register

pytestmark = pytest.mark.slow  # imports vLLM
QWEN3 = "Qwen3ForCausalLM"


def test_a_server_with_an_empty_cache_uses_what_its_image_brings(tmp_path, monkeypatch):
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    name = compat.find_model_info(QWEN3)
    brought = tmp_path / "image"
    brought.mkdir()
    (brought / name).write_bytes((compat.model_infos() / name).read_bytes())
    found = ModelRegistry.models[QWEN3].inspect_model_cls()

    def refused(_):
        raise AssertionError("vLLM starts a process to find out")

    monkeypatch.setattr(registry, "_run_in_subprocess", refused)
    monkeypatch.setattr(model_infos, "BROUGHT", brought)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with pytest.raises(AssertionError, match="starts a process"):
        ModelRegistry.models[QWEN3].inspect_model_cls()
    model_infos.use_brought(brought)
    assert ModelRegistry.models[QWEN3].inspect_model_cls() == found
    assert [path.name for path in compat.model_infos().iterdir()] == [name]


def test_a_server_on_cpus_starts_no_process_to_find_out(tmp_path, monkeypatch):
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    found = ModelRegistry.models[QWEN3].inspect_model_cls()

    def refused(*_, **__):
        raise AssertionError("vLLM starts a process to find out")

    monkeypatch.setattr(registry, "subprocess", SimpleNamespace(run=refused))
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # put back at the end
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with pytest.raises(AssertionError, match="starts a process"):
        ModelRegistry.models[QWEN3].inspect_model_cls()
    compat.inspect_models_here()
    seen = ModelRegistry.models[QWEN3].inspect_model_cls()
    # vLLM's cache has lists for tuples.
    assert json.dumps(asdict(seen)) == json.dumps(asdict(found))


def test_a_server_does_not_wait_for_a_config_that_its_tokenizer_has_not(tmp_path, monkeypatch):
    from vllm.tokenizers import get_tokenizer
    from vllm.transformers_utils import config, repo_utils

    def waits(_):
        raise AssertionError("vLLM waits")

    Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    monkeypatch.setattr(repo_utils, "time", SimpleNamespace(sleep=waits))
    monkeypatch.setattr(config, "with_retry", repo_utils.with_retry)  # put back at the end
    with pytest.raises(AssertionError, match="vLLM waits"):
        get_tokenizer(str(tmp_path))
    register()
    assert get_tokenizer(str(tmp_path)).encode("a") == [0]


def test_what_is_written_is_what_is_brought(tmp_path, monkeypatch, capsys):
    """A class that cannot be imported where the image is built is left to the server."""
    cache = tmp_path / "cache"
    cache.mkdir()

    def find(architecture):
        if architecture == QWEN3:
            raise RuntimeError("Error raised in subprocess:\nno GPU")
        (cache / f"{architecture}.json").write_text("{}")
        return f"{architecture}.json"

    monkeypatch.setattr(compat, "find_model_info", find)
    monkeypatch.setattr(compat, "model_infos", lambda: cache)
    monkeypatch.setattr(model_infos, "BROUGHT", tmp_path / "image")
    assert model_infos.main() == 0
    assert "Qwen3ForCausalLM: no GPU" in capsys.readouterr().err
    there = sorted(path.name for path in (tmp_path / "image").iterdir())
    assert there == sorted(path.name for path in cache.iterdir())
    assert len(there) > 8


def test_a_cache_that_cannot_be_written_stops_no_server(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setattr(compat, "model_infos", lambda: tmp_path / "file" / "cache")
    model_infos.use_brought(tmp_path)
    assert "cache cannot be written" in capsys.readouterr().err
