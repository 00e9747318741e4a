"""Generation without training, through real vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.local.llm import LLM, RequestOutput, SamplingParams
from dovetail.protocol.errors import RunError
from dovetail.tools.serving import served_result
from helpers import vllm_cli
from helpers.jobs import tiny_job
from helpers.nursery import NURSERY
from helpers.vllm_servers import tiny_llama

pytestmark = pytest.mark.slow

TEXTS = ["hello there, how are you", "are you there", "how how how"]
DRAWN = SamplingParams(n=3, temperature=0.8, top_k=40, top_p=0.9, max_tokens=20, seed=5)
GENERATION = {"maxTokens": 9, "temperature": 0.5, "topK": 7, "stop": ["zzz"]}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one model."""
    from transformers import LlamaForCausalLM

    path = tmp_path_factory.mktemp("generated")
    tokenizer = tokenizers.train(TEXTS, 300)
    torch.manual_seed(0)
    config = tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    tokenizer.save_pretrained(path / "models" / "actor")
    LlamaForCausalLM(config).float().save_pretrained(path / "models" / "actor")
    (path / "job.json").write_text(tiny_job(generation=GENERATION).model_dump_json(by_alias=True))
    return path


@pytest.fixture(scope="module")
def llm(run_dir: Path) -> Iterator[LLM]:
    NURSERY.start()  # in this thread, because it ends with the one that started it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_result, "ExecSpawner", vllm_cli.VLLMSpawner)
        with LLM(run_dir, servers=2) as made:
            yield made
    left = [p for p in psutil.process_iter(["status"]) if group(p.pid) in vllm_cli.VLLMSpawner.begun]
    assert [p for p in left if p.info["status"] != psutil.STATUS_ZOMBIE] == []


def group(pid: int) -> int | None:
    """None: the process, which may be any of this machine, has just ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_tokens_and_log_probabilities_are_those_of_transformers(llm: LLM, run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run_dir / "models" / "actor").eval()
    greedy = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=12))
    for output in [*greedy, *llm.generate(TEXTS, DRAWN)]:
        for completion in output.outputs:
            assert output.prompt_token_ids == llm.tokenizer(output.prompt)["input_ids"]
            ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
            assert completion.cumulative_logprob == pytest.approx(float(expected.sum()), abs=1e-3)
            assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            if output in greedy:
                assert logits.argmax(-1).tolist() == completion.token_ids
    assert len(greedy[0].outputs[0].token_ids) == 12
    assert greedy[0].outputs[0].finish_reason == "length"


def test_a_response_depends_on_its_prompt_seed_and_settings_alone(llm: LLM) -> None:
    first = llm.generate(TEXTS, DRAWN)
    assert [completion.index for completion in first[0].outputs] == [0, 1, 2]
    assert len({tuple(each) for output in tokens(first) for each in output}) == 9
    assert tokens(llm.generate(TEXTS, DRAWN)) == tokens(first)
    assert tokens(llm.generate(TEXTS[:1], DRAWN)) == tokens(first)[:1]
    assert tokens(llm.generate([*TEXTS, *["something else"] * 20], DRAWN))[:3] == tokens(first)
    two = llm.generate(TEXTS, replace(DRAWN, n=2))
    assert tokens(two) == [output[:2] for output in tokens(first)]
    assert tokens(llm.generate(TEXTS, replace(DRAWN, seed=6))) != tokens(first)
    any_seed = replace(DRAWN, seed=None)
    assert tokens(llm.generate(TEXTS, any_seed)) != tokens(llm.generate(TEXTS, any_seed))
    ids = [llm.tokenizer(text)["input_ids"] for text in TEXTS]
    given = llm.generate(ids, DRAWN)
    assert (tokens(given), given[0].prompt) == (tokens(first), None)


def test_what_ends_a_response(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0]
    assert len(whole.text) > 3
    stop = whole.text[3]
    cut = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=16, stop=[stop]))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert stop in llm.tokenizer.decode(cut.token_ids)
    assert len(cut.logprobs) == len(cut.token_ids) < 16
    # A response that has no room for all its tokens is as long as there is room.
    long = [5] * (llm.max_model_len - 4)
    assert len(llm.generate([long], SamplingParams(min_tokens=100, max_tokens=100))[0].outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match=r"prompt 1 has 256 tokens; the model takes 256 with the response"):
        llm.generate([[5], [5] * 256])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.generate([""])


def test_a_dialogue_is_written_as_in_the_training(llm: LLM) -> None:
    said = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (reply,) = llm.chat(said, params)
    assert reply.prompt == "\n\nHuman: hello\n\nAssistant:"
    assert tokens([reply]) == tokens(llm.generate([reply.prompt], params))
    assert tokens(llm.chat([said, said], params)) == tokens([reply]) * 2
    with pytest.raises(ValueError, match="dialogue 0: 'hello' is no message"):
        llm.chat([["hello"]])  # type: ignore[list-item]


def test_without_settings_the_run_s_own_are_taken(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.5, top_k=7, max_tokens=9, stop=("zzz",))
    assert tokens(llm.generate(TEXTS)) == tokens(llm.generate(TEXTS, params))
    assert max(len(output[0]) for output in tokens(llm.generate(TEXTS))) == 9


def test_it_works_in_a_notebook_s_event_loop_and_tells_how_far_it_is(llm: LLM) -> None:
    told: list[tuple[int, int]] = []

    async def cell() -> list[RequestOutput]:
        return llm.generate(TEXTS, DRAWN, on_progress=lambda done, total: told.append((done, total)))

    assert tokens(asyncio.run(cell())) == tokens(llm.generate(TEXTS, DRAWN))
    assert told == [(done, 9) for done in range(1, 10)]


def test_a_server_that_is_killed_changes_no_token(llm: LLM) -> None:
    """Comes last: it leaves no server."""
    many = replace(DRAWN, n=40)
    expected = llm.generate(TEXTS, many)
    killed: list[int] = []
    first, second = vllm_cli.VLLMSpawner.begun[-2:]  # after those of other files

    def kill(done: int, total: int) -> None:
        if not killed:
            killed.append(second)
            os.killpg(second, signal.SIGKILL)

    assert tokens(llm.generate(TEXTS, many, on_progress=kill)) == tokens(expected)
    assert killed
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGKILL)
    with pytest.raises(RunError, match=r"no vLLM server works any more: .*generate-actor-0\.log"):
        llm.generate(TEXTS, many)
