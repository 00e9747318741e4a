"""Records with tools of their own: the chat template gets the schemas, and calls of tools are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert, detect
from dovetail.coordinator.data.records import Demonstration, Preference, Prompt
from dovetail.coordinator.data.sources import load, with_system
from dovetail.coordinator.data.text import tokenizer
from dovetail.coordinator.data.text.chat_template import ChatFormat, HumanAssistant, Template
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import DataSource
from helpers.model_folder import save_model_folder

pytestmark = pytest.mark.usefixtures("proved_once")

# As Qwen's writes them, shortened.
TEMPLATE = """{%- if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</system>
{% endif %}
{%- for message in messages %}<{{ message.role }}>
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}<call>{{ call.name }} {{ call.arguments | tojson }}</call>
    {%- endfor %}</{{ message.role }}>
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
DIALOGUE = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "1"},
    {"role": "assistant", "content": "No."},
]
HEAD = f"<system>{json.dumps(TOOL)}</system>\n"
CALLED = '<call>weather {"city": "Bern"}</call></assistant>\n'


def with_template(template: str) -> Any:
    made = tokenizer.train(["a"], 258)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return Template(with_template(TEMPLATE))


def read(row: dict[str, Any], chat: ChatFormat, kind: DataKind = "demonstrations") -> Any:
    return convert(row, detect(row, "f:1"), kind, chat, "f:1")


def test_demonstrations_learn_calls_and_see_the_schemas(chat: ChatFormat) -> None:
    record = read({"messages": DIALOGUE, "tools": [TOOL]}, chat)
    assert isinstance(record, Demonstration)
    assert record.prompt == HEAD + "<user>Rain?</user>\n<assistant>"
    assert record.response.rstrip() == CALLED.rstrip()
    (_, _), (given, _), (answer, _) = record.parts()
    assert given.strip() == "<tool>dry</tool>\n<assistant>"
    assert answer.startswith("No.")
    assert record.text.startswith(HEAD + "<user>Rain?</user>\n<assistant>" + CALLED + "<tool>dry</tool>\n")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["a list", "a text in JSON"])
def test_prompts_and_pairs_see_them_too(chat: ChatFormat, tools: Any) -> None:
    row = {"messages": DIALOGUE[:3], "tools": tools, "answer": "No."}
    prompt = read(row, chat, "prompts")
    assert isinstance(prompt, Prompt)
    assert prompt.prompt == HEAD + "<user>Rain?</user>\n<assistant>" + CALLED + "<tool>dry</tool>\n<assistant>"
    assert prompt.fields == {"tools": tools, "answer": "No."}, "reward functions get the schemas as before"
    better, worse = DIALOGUE[1], {"role": "assistant", "content": "I cannot know."}
    pair = read({"prompt": DIALOGUE[:1], "chosen": [better], "rejected": [worse], "tools": tools}, chat, "preferences")
    assert isinstance(pair, Preference)
    assert (pair.prompt, pair.chosen) == (HEAD + "<user>Rain?</user>\n<assistant>", CALLED + "<|eos|>")
    system = with_system(chat, DataSource(path="x", systemPrompt="Be kind."))
    assert read(row, system, "prompts").prompt.startswith(HEAD + "<system>Be kind.</system>\n<user>")
    assert "weather" not in read({"messages": DIALOGUE[:1], "tools": None}, chat, "prompts").prompt


def test_the_old_name_of_a_call_is_a_call(chat: ChatFormat) -> None:
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    for written in (old, old | {"tool_calls": None}, old | {"tool_calls": [], "content": ""}):
        assert read({"messages": [DIALOGUE[0], written]}, chat) == read({"messages": DIALOGUE[:2]}, chat)


@pytest.mark.parametrize(
    ("calling", "answering"),
    [("function_call", "observation"), ("tool_call", "tool_response"), ("function_call", "tool")],
)
def test_sharegpt_is_read_as_openai(chat: ChatFormat, calling: str, answering: str) -> None:
    """Its schemas are functions without the object around them, and its calls are texts."""
    said = [
        {"from": "human", "value": "Rain?"},
        {"from": calling, "value": json.dumps(CALL["function"])},
        {"from": answering, "value": "dry"},
        {"from": "gpt", "value": "No."},
    ]
    expected = read({"messages": DIALOGUE, "tools": [TOOL]}, chat)
    for tools in ([TOOL["function"]], json.dumps([TOOL["function"]]), [TOOL]):
        assert read({"conversations": said, "tools": tools}, chat) == expected
    old = [DIALOGUE[0], DIALOGUE[1], {"role": "function", "name": "weather", "content": "dry"}, DIALOGUE[3]]
    assert read({"messages": old, "tools": [TOOL]}, chat) == expected
    other = {"type": "web_search", "name": "search"}
    assert json.dumps(other) in read({"conversations": said, "tools": [other]}, chat).prompt, "a type of its own"


@pytest.mark.parametrize("option", ["auto", "none", {}, [], False])
def test_an_option_of_a_request_is_no_call(chat: ChatFormat, option: object) -> None:
    answer = {"role": "assistant", "content": "No."}
    asked = [{**DIALOGUE[0], "function_call": option}, {**answer, "function_call": option}]
    assert read({"messages": asked}, chat) == read({"messages": [DIALOGUE[0], answer]}, chat)


@pytest.mark.parametrize(
    "call", [{"function_call": "weather"}, {"tool_calls": [{"function": "auto"}]}, {"tool_calls": [{}]}]
)
def test_a_call_has_a_name(chat: ChatFormat, call: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="message 1 of field 'messages' has a call without a name"):
        read({"messages": [DIALOGUE[0], {"role": "assistant", "content": None, **call}]}, chat)


def test_what_the_assistant_thought_is_learnt(chat: ChatFormat) -> None:
    answer = {"role": "assistant", "content": "No.", "reasoning_content": "dry"}
    assert read({"messages": [DIALOGUE[0], answer]}, chat).response.startswith("<think>dry</think>No.")


def test_what_a_table_fills_with_nulls_is_left_out(tmp_path: Path, chat: ChatFormat) -> None:
    """The arguments of all calls in a column have the same fields."""
    import pyarrow
    from pyarrow import parquet

    def row(function: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [DIALOGUE[0], call], "tools": [{"type": "function", "function": function}]}

    rows = [row({"name": "f", "strict": True}, {"city": "Bern"}), row({"name": "f"}, {"day": 3})]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    options = {"field": "f", "base_dir": tmp_path, "cache_dir": tmp_path / "cache", "seed": 0, "chat": chat}
    found = load(DataSource(path="d.parquet"), "demonstrations", **options)
    assert [found[i] for i in (0, 1)] == [read(each, chat) for each in rows]


def test_what_cannot_be_written_is_named(chat: ChatFormat) -> None:
    with pytest.raises(DataError, match=r"^f:1: field 'tools' must be a list of function schemas, such as \[") as error:
        read({"messages": DIALOGUE, "tools": {"name": "hammer"}}, chat)
    assert "rename it" in str(error.value)
    with pytest.raises(
        DataError, match=r"^f:1: message 1 belongs to a call of a tool, but the tokenizer has no chat template"
    ):
        read({"messages": DIALOGUE}, HumanAssistant())
    with pytest.raises(DataError, match=r"^f:1: message 1 belongs to a call of a tool"):
        read({"messages": DIALOGUE[:2]}, HumanAssistant())
    with pytest.raises(DataError, match=r"must have a list of objects in 'tool_calls'$"):
        read({"messages": [DIALOGUE[0], {"role": "assistant", "content": "", "tool_calls": "f()"}]}, chat)
    assert read({"prompt": "1+1=", "response": "2", "tools": "pencil"}, chat).response.startswith("2<"), "a text"


@pytest.mark.parametrize("shown", [True, False])
def test_dovetail_data_shows_the_tools(tmp_path: Path, shown: bool) -> None:
    plain = TEMPLATE.replace("{%- if tools %}", "{%- if false %}").replace("in tools", "in []")
    save_model_folder(tmp_path / "model")
    with_template(TEMPLATE if shown else plain).save_pretrained(tmp_path / "model")
    row = {"messages": DIALOGUE, "tools": [TOOL]}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["data", str(tmp_path / "d.jsonl"), "--model", str(tmp_path / "model")]
    done = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "named by 1 record" in done.output
    assert (HEAD.strip() in done.output) == shown
    assert ("1 record has tools, but the template shows none of them" in done.output) != shown
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    fields = {"model": str(tmp_path / "model"), "data": str(tmp_path / "d.jsonl")}
    arguments = ["init", "sft", str(tmp_path / "job"), *(f"--{name}={value}" for name, value in fields.items())]
    made = CliRunner().invoke(cli, arguments)
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(cli, ["validate", str(tmp_path / "job" / "job.yaml"), "--deep"], env={"COLUMNS": "200"})
    warned = "9 of 9 records have tools, but the chat template shows none of them" in " ".join(done.output.split())
    assert warned != shown, done.output
