"""Options of chat templates (data.chatTemplateKwargs): every stage, the exported folder and a chat use the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import Prepared, prepare
from dovetail.coordinator.data.text import tokenizer
from dovetail.coordinator.data.text.chat_template import chat_format, with_options
from dovetail.coordinator.data.text.tokenizer import with_template_options
from dovetail.manifest.types import RLHFJobSpec

# As Qwen3 writes it: thoughts of earlier turns are left out, the last turn has its thoughts, and the reply is opened
# with empty thoughts if `enable_thinking` is false.
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
                {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
SILENT = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    made = tokenizer.train(["What is 2 + 2? Four."], 300)
    made.chat_template = QWEN3
    made.save_pretrained(str(folder))
    return folder


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec(model: Path, **options: Any) -> RLHFJobSpec:
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return RLHFJobSpec.model_validate(
        {
            "models": {"actor": {"source": {"scratch": {"config": config}}}, "tokenizer": {"path": str(model)}},
            "data": {
                "demonstrations": [{"path": "demonstrations.jsonl"}],
                "preferences": [{"path": "preferences.jsonl"}],
                "prompts": [{"path": "prompts.jsonl"}],
                "heldOut": 0,
                "chatTemplateKwargs": options,
            },
            "evaluation": {"prompts": [{"path": "prompts.jsonl"}]},
            "sft": {"batchSize": 1},
            "reward": {"batchSize": 1},
            "ppo": {"globalBatchSize": 1, "samplesPerPrompt": 1, "miniBatchSize": 1},
            "groups": [{"name": "all", "roles": ["trainer"]}],
        }
    )


def prepared(model: Path, folder: Path, **options: Any) -> Prepared:
    answer = {"role": "assistant", "content": "Four."}
    write(folder / "demonstrations.jsonl", {"messages": [*ASKED, answer]})
    wrong = {"role": "assistant", "content": "Five."}
    write(folder / "preferences.jsonl", {"chosen": [*ASKED, answer], "rejected": [*ASKED, wrong]})
    write(folder / "prompts.jsonl", {"messages": ASKED})
    return prepare(spec(model, **options), folder / "run", folder)


def decoded(job: Prepared, tokens: Any, length: int) -> str:
    return str(job.tokenizer.decode(list(tokens)[:length]))


def test_all_stages_and_evaluation_use_the_options(model: Path, tmp_path: Path) -> None:
    job = prepared(model, tmp_path, enable_thinking=False)
    assert job.prompts(1)[0].text == SILENT
    assert job.evaluation_prompts()[0].text == SILENT
    sft = job.sft_batch(1)
    assert decoded(job, sft["tokens"][0], sft["lengths"][0]) == f"{SILENT}Four.<|im_end|>\n<|eos|>"
    learnt = [int(t) for t, m in zip(sft["tokens"][0], sft["loss_mask"][0], strict=True) if m]
    assert job.tokenizer.decode(learnt) == "Four.<|im_end|>\n<|eos|>", "the empty thoughts are given, not learnt"
    pair = job.reward_batch(1)
    for name, said in (("chosen", "Four."), ("rejected", "Five.")):
        text = decoded(job, pair[f"{name}_tokens"][0], pair[f"{name}_lengths"][0])
        assert text == f"{SILENT}{said}<|im_end|>\n<|eos|>"


def test_without_options_the_model_thinks(model: Path, tmp_path: Path) -> None:
    job = prepared(model, tmp_path)
    assert job.prompts(1)[0].text == SILENT.removesuffix("<think>\n\n</think>\n\n")
    assert (tmp_path / "run/tokenizer/chat_template.jinja").read_text() == QWEN3


def test_a_template_writes_the_time_of_the_preparation(tmp_path: Path) -> None:
    """Templates of Llama 3 and gpt-oss write the date, which must not change in a run, nor after a resume."""
    made = tokenizer.train(["What is 2 + 2? Four."], 300)
    made.chat_template = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    made.save_pretrained(str(tmp_path / "model"))
    first, again = (prepared(tmp_path / "model", tmp_path) for _ in range(2))
    texts = {first.prompts(1)[0].text, first.prompts(1)[0].text, again.prompts(1)[0].text}
    assert len(texts) == 1
    (tmp_path / "other").mkdir()
    assert prepared(tmp_path / "model", tmp_path / "other").prompts(1)[0].text not in texts
    assert (tmp_path / "run/tokenizer/chat_template.jinja").read_text() == made.chat_template, "as it came"


def test_what_the_run_saves_has_the_options_as_defaults(model: Path, tmp_path: Path) -> None:
    """From this folder come the exported models' tokenizers, `dovetail chat` and `dovetail serve`."""
    prepared(model, tmp_path, enable_thinking=False)
    found = tokenizer.load(tmp_path / "run/tokenizer", "x")
    assert found.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == SILENT
    thinks = found.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert thinks == SILENT.removesuffix("<think>\n\n</think>\n\n"), "who asks may still choose"
    with_template_options(found, {"enable_thinking": True})
    assert found.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == thinks, "the next job's"
    again = prepare(spec(model, enable_thinking=False), tmp_path / "run", tmp_path)
    assert again.prompts(1)[0].text == SILENT


def test_dovetail_data_takes_the_options_of_a_job(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", {"messages": ASKED})
    made = CliRunner().invoke(cli, ["init", "grpo", str(tmp_path / "job"), "--model", str(model)])
    assert made.exit_code == 0, made.output
    manifest = tmp_path / "job/job.yaml"
    text = manifest.read_text()
    assert text.count("\n  data:\n") == 1
    manifest.write_text(text.replace("\n  data:\n", "\n  data:\n    chatTemplateKwargs: {enable_thinking: false}\n"))
    done = CliRunner().invoke(cli, ["data", str(tmp_path / "p.jsonl"), "--job", str(manifest), "--as", "prompts"])
    assert done.exit_code == 0, done.output
    assert SILENT.strip() in done.output


@pytest.mark.parametrize(
    "value", [False, None, 1.5, 'a "quoted" \\ %} }} \n line', "日本 😀", [1, "two", [None]], {"a": {"b": [True]}}]
)
def test_a_default_is_what_would_have_been_given(value: Any) -> None:
    made = tokenizer.train(["a"], 258)
    template = "\n  {% if true %}\n  {{ option | tojson }} {{ messages[0].content }}\n  {% endif %}\n"
    made.chat_template = template
    given = made.apply_chat_template(ASKED, tokenize=False, option=value)
    assert json.loads(given.strip().removesuffix(" What is 2 + 2?")) == value
    made.chat_template = with_options(template, {"option": value})
    assert made.apply_chat_template(ASKED, tokenize=False) == given


def test_a_macro_sees_an_option() -> None:
    made = tokenizer.train(["a"], 258)
    made.chat_template = with_options("{% macro m() %}[{{ style }}]{% endmacro %}{{ m() }}", {"style": "short"})
    assert made.apply_chat_template(ASKED, tokenize=False) == "[short]"


def test_each_template_of_a_tokenizer_gets_the_options() -> None:
    made = tokenizer.train(["a"], 258)
    made.chat_template = {"default": "{{ style }}: {{ messages[0].content }}", "tool_use": "tools"}
    prompt = chat_format(with_template_options(made, {"style": "short"})).prompt(ASKED)
    assert prompt == "short: What is 2 + 2?"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (QWEN3, "does not use 'enable_thinkin'; it uses enable_thinking$"),
        ("{{ messages }}", "does not use 'enable_thinkin'; it uses no options$"),
        (None, "the tokenizer has no chat template, so there are no options; remove the field$"),
        ("{% if %}", "the tokenizer's chat template cannot be read: "),
    ],
)
def test_an_option_that_nobody_reads_is_refused(template: str | None, sentence: str) -> None:
    made = tokenizer.train(["a"], 258)
    made.chat_template = template
    with pytest.raises(DataError, match=r"^spec\.data\.chatTemplateKwargs: .*" + sentence):
        with_template_options(made, {"enable_thinkin": False})
