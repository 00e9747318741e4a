"""What real vLLM servers say with the weights that they were sent, of families, with tied and untied heads."""

from __future__ import annotations

import asyncio
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.samples.requests import Connection
from dovetail.coordinator.store.experts import UNKNOWN, whole
from dovetail.models.build import build_stage
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.sampling import OUTPUT_DELTA
from dovetail.trainer.algorithms.importance import mismatch_metrics, truncated_weights
from helpers.forked_servers import Forks
from helpers.patience import PATIENCE
from helpers.vllm_servers import GREEDY, TOKEN, Server, make_run
from helpers.weight_trainer import Trainer

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
pytestmark = pytest.mark.slow

# A vocabulary that vLLM pads.
COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "float32",
}
GATED = {**COMMON, "intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 32},
    "opt": {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1},
    # Windows are shorter than the responses.
    "mistral": {**GATED, "sliding_window": 8},
    "gemma2": {
        **GATED,
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 1.0,
    },
    "qwen3_moe": {**GATED, "head_dim": 32, "moe_intermediate_size": 64, **EXPERTS, "norm_topk_prob": True},
    "phi3": {**GATED, "sliding_window": 8},
    "gpt_neox": {**COMMON, "intermediate_size": 96, "initializer_range": 0.1},
}
# Others are served once, with the head that they mostly have. Gemma 3, gpt-oss and Qwen3-MoE are in
# test_family_jobs.py.
BOTH = ("llama", "qwen2", "qwen3", "opt")
MOSTLY_TIED = ("gemma2",)
# Both heads, a projection of its own, and one head with bounds. vLLM loads the others as it loads these.
ALWAYS = ("llama", "opt", "gemma2")


def heads(family: str) -> tuple[bool, ...]:
    """Whether the servers' heads are tied."""
    return (True, False) if family in BOTH else (family in MOSTLY_TIED,)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


def folders(family: str, version: int, path: Path) -> tuple[Any, dict[bool, Path]]:
    """A tied model of `transformers` in a folder, and the same one with its head written out: model, folder by whether
    it is tied."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    torch.manual_seed(version)
    config = AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=True)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for tied in heads(family):
        found[tied] = path / f"{family}-{version}-{'tied' if tied else 'untied'}"
        if tied:
            model.save_pretrained(found[tied])
        else:
            twin = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=False)
            )
            twin.load_state_dict(model.state_dict())
            twin.save_pretrained(found[tied])
    return model, found


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ALWAYS else pytest.mark.nightly) for f in FAMILIES if f != "qwen3_moe"],
)
def test_servers_of_tied_and_untied_models_say_what_the_model_says(family: str, forks: Forks, tmp_path: Path) -> None:
    servers: dict[bool, Server] = {}
    model, found = folders(family, 1, tmp_path)
    for tied in heads(family):
        run = tmp_path / f"run-{tied}"
        stage = build_stage(ModelRef(head="lm", path=str(found[tied])))
        assert hasattr(stage, "lm_head") is not tied
        make_run(run, stage.config, prompt_tokens=64, tokens=64)
        servers[tied] = forks.start(f"{family}-{tied}", run)
    forks.wait(list(servers.values()))
    trainers = {tied: Trainer([server]) for tied, server in servers.items()}
    for version in (1, 2):
        if version > 1:
            model, found = folders(family, version, tmp_path)
        prompt = [5, 9, 33, 7, 299]
        tokens, logprobs = greedy(model, prompt, GREEDY["max_tokens"])
        for tied, server in servers.items():
            stage = build_stage(ModelRef(head="lm", path=str(found[tied])))
            assert trainers[tied].publish(stage, version) == {server.name: None}
            got, theirs, _ = server.generate(prompt, **GREEDY)
            assert theirs == pytest.approx(logprobs, abs=1e-4), f"tied: {tied}"
            assert got == tokens
    for trainer in trainers.values():
        trainer.sender.close()
    forks.stop(list(servers.values()))


def test_a_server_says_which_experts_each_token_got(forks: Forks, tmp_path: Path) -> None:
    """The whole prompt's and the response's, also of a cached prefix, and of a response that is aborted and goes on."""
    model, found = folders("qwen3_moe", 1, tmp_path)
    stage = build_stage(ModelRef(head="lm", path=str(found[False])))
    stage.config.max_position_embeddings = 512
    make_run(tmp_path / "run", stage.config, prompt_tokens=300, tokens=200, replay=True)
    server = forks.start("experts", tmp_path / "run")
    forks.wait([server])
    trainer = Trainer([server])
    assert trainer.publish(stage, 1) == {server.name: None}
    # More than two blocks of vLLM's cache.
    prompt = [3 + 7 * i % 290 for i in range(260)]
    fresh = asyncio.run(ask(server, prompt, 0, 12))
    cached = asyncio.run(ask(server, prompt, 0, 12))
    assert fresh.reason == cached.reason == "length"
    for _ in range(10):  # a busy server may hear of an abort too late
        broken = asyncio.run(ask(server, prompt, 0, 200, abort_after=5))
        if broken.reason == "abort":
            break
    assert broken.reason == "abort"
    longer = prompt + broken.tokens
    rest = asyncio.run(ask(server, longer, len(longer) - 1, 7))
    for answers in ([fresh], [cached], [broken, rest]):
        tokens = prompt + [token for answer in answers for token in answer.tokens]
        told = whole([(answer.start, answer.experts) for answer in answers if answer.experts], len(tokens))
        assert told is not None
        np.testing.assert_array_equal(np.sort(told[:-1], axis=-1), experts_of(model, tokens))
        assert (told[-1] == UNKNOWN).all()
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as reply:
        hits = next(line for line in reply if line.startswith(b"vllm:prefix_cache_hits_total"))
    assert float(hits.split()[-1]) >= 3 * 256
    trainer.sender.close()
    forks.stop([server])


@dataclass
class Answer:
    start: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    experts: bytes | None = None


async def ask(server: Server, tokens: list[int], start: int, count: int, abort_after: int | None = None) -> Answer:
    """As the coordinator asks: for `count` tokens more, and for the experts of all tokens from `start` on."""
    answer, name = Answer(start), f"ask-{len(tokens)}-{count}"
    params = {**GREEDY, "max_tokens": count, "routed_experts_prompt_start": start, "output_kind": OUTPUT_DELTA}

    def take(new: Sequence[int], _: Sequence[float], reason: str | None, experts: bytes | None) -> None:
        answer.tokens += new
        answer.reason, answer.experts = reason, experts
        if abort_after is not None and len(answer.tokens) >= abort_after:
            connection.abort([name])

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        connection = Connection(session, server.url, GenerationSettings())
        request = {"request_id": name, "token_ids": array("i", tokens), "sampling_params": params, "weights": 1}
        await connection.draw(request, take)
        await cancel([connection.task])
    return answer


def experts_of(model: Any, tokens: list[int]) -> np.ndarray:
    """(tokens - 1, layers, experts of a token), each token's in order."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


def test_a_float16_server_takes_the_weights_of_a_trainer_in_another_dtype(forks: Forks, tmp_path: Path) -> None:
    """As on a V100 beside trainers on A100s: the server converts, and its samples are those of the trainer's weights up
    to float16's rounding. The mismatch is reported, and truncated importance sampling hardly weighs."""
    model, found = folders("llama", 1, tmp_path)
    stage = build_stage(ModelRef(head="lm", path=str(found[True])))
    make_run(tmp_path / "run", stage.config, prompt_tokens=64, tokens=64, dtype="float16")
    server = forks.start("float16", tmp_path / "run")
    forks.wait([server])
    assert server.call("/dovetail/info")[1]["dtype"] == "float16"
    prompt = [5, 9, 33, 7, 299]
    for version, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        trainer, sent = Trainer([server], "float16"), stage.to(dtype)
        assert trainer.publish(sent, version) == {server.name: None}
        tokens, logprobs, _ = server.generate(prompt, **GREEDY)
        with torch.no_grad():
            rows = model.to(dtype).float()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = rows.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).T
        rollout, mask = torch.tensor([logprobs]), torch.ones(1, len(tokens), dtype=torch.bool)
        metrics = mismatch_metrics(own, rollout, mask)
        assert 0 < metrics["mismatch_abs"] / len(tokens) < 5e-3, dtype
        assert metrics["mismatch_abs_max"] < 0.03, dtype
        assert metrics["mismatch_capped"] == 0
        assert (truncated_weights(own, rollout, mask, cap=2.0) - 1).abs().max() < 0.03
        trainer.sender.close()
    forks.stop([server])
