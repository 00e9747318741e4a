"""Data files of every format become the right records; every bad input is answered by one sentence."""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert, detect
from dovetail.coordinator.data.prepare import given_prompt
from dovetail.coordinator.data.records import Demonstration, Preference, Prompt, Records
from dovetail.coordinator.data.sources import load
from dovetail.coordinator.data.text.chat_template import HumanAssistant, Template
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import DataSource
from helpers.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

HH_NAME = "hh-rlhf-harmless-base-test.jsonl.gz"
SHARED = Path(os.environ.get("DOVETAIL_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def write(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def read(path: Path, kind: DataKind, chat: Any = None, **options: Any) -> Records[Any]:
    source = DataSource.model_validate({"path": path.name, **options})
    return load(
        source,
        kind,
        field=f"spec.data.{kind}[0]",
        base_dir=path.parent,
        cache_dir=path.parent / "cache",
        seed=0,
        chat=chat,
    )


HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away."}


def test_hh(tmp_path: Path) -> None:
    path = write(tmp_path, HH, name="data.jsonl.gz")
    prompt = "\n\nHuman: Hi\n\nAssistant:"
    assert read(path, "preferences")[0] == Preference(prompt, " Hello!", " Go away.")
    assert read(path, "demonstrations")[0] == Demonstration.of(prompt, " Hello!")
    assert read(path, "prompts")[0] == Prompt(prompt, {})


def test_hh_prompt_is_the_common_dialogue_up_to_its_last_assistant_turn(tmp_path: Path) -> None:
    start = "\n\nHuman: a\n\nAssistant: same\n\nHuman: b\n\nAssistant:"
    path = write(tmp_path, {"chosen": start + " The cat", "rejected": start + " The dog\n\nHuman: c\n\nAssistant: d"})
    record = read(path, "preferences")[0]
    assert record == Preference(start, " The cat", " The dog\n\nHuman: c\n\nAssistant: d")


@pytest.mark.parametrize("names", [("prompt", "response"), ("instruction", "output"), ("question", "answer")])
def test_prompt_and_response(tmp_path: Path, names: tuple[str, str]) -> None:
    path = write(tmp_path, {names[0]: "1+1=", names[1]: "2", "level": 3})
    assert read(path, "demonstrations")[0] == Demonstration.of("1+1=", "2")
    assert read(path, "prompts")[0] == Prompt("1+1=", {names[1]: "2", "level": 3})


def test_chosen_and_rejected_with_a_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "P: ", "chosen": "good", "rejected": "bad"},
        {"prompt": "P:", "chosen": "P: a", "rejected": "P: b"},
    ]
    records = read(write(tmp_path, *rows), "preferences")
    assert [records[i] for i in range(2)] == [Preference("P: ", "good", "bad"), Preference("P:", " a", " b")]


def test_chosen_and_rejected_without_a_prompt_share_their_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, {"chosen": "Once upon a time", "rejected": "Once upon another"})
    assert read(path, "preferences")[0] == Preference("Once upon", " a time", " another")


@pytest.mark.parametrize("name", ["instruction", "question", "query"])
def test_the_prompt_of_a_pair_may_have_the_names_of_other_prompts(tmp_path: Path, name: str) -> None:
    """Pairs such as those of Intel/orca_dpo_pairs lost their question without a word: the prompt was empty."""
    path = write(tmp_path, {"system": "Be brief.", name: "2+2?", "chosen": "4", "rejected": "5"})
    bare = write(tmp_path, {name: "2+2?", "chosen": "4", "rejected": "5"}, name="bare.jsonl")
    assert read(bare, "preferences", template="Never")[0] == Preference("2+2?", "4", "5")
    prompt = "\n\nSystem: Be brief.\n\nHuman: 2+2?\n\nAssistant:"
    assert read(path, "preferences")[0] == Preference(prompt, " 4", " 5")
    assert read(path, "prompts")[0] == Prompt(prompt, {"system": "Be brief."})
    replies = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    for asked in ("Hi", [{"role": "user", "content": "Hi"}]):
        path = write(tmp_path, {name: asked, **replies}, name=f"{type(asked).__name__}.jsonl")
        assert read(path, "preferences")[0] == Preference("\n\nHuman: Hi\n\nAssistant:", " chosen", " rejected")


def test_the_input_of_a_pairs_instruction_is_part_of_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, {"instruction": "Add", "input": "2 and 2", "chosen": "4", "rejected": "5"})
    assert read(path, "preferences")[0] == Preference("Add\n2 and 2", "4", "5")


def test_pairs_beside_a_whole_dialogue_are_preferences_where_a_stage_needs_them(tmp_path: Path) -> None:
    """Rows as those of UltraFeedback: the dialogue of `messages` is the chosen one."""
    user = {"role": "user", "content": "Hi"}
    chosen, rejected = ([user, {"role": "assistant", "content": text}] for text in ("yes", "no"))
    row = {"prompt": "Hi", "chosen": chosen, "rejected": rejected, "messages": chosen, "score_chosen": 8.0}
    path = write(tmp_path, row)
    assert read(path, "preferences")[0] == Preference("\n\nHuman: Hi\n\nAssistant:", " yes", " no")
    assert read(path, "demonstrations")[0] == Demonstration.of("\n\nHuman: Hi\n\nAssistant:", " yes")
    with pytest.raises(DataError, match=r"Messages holds no preferences, .* set the source's format to Chosen"):
        read(path, "preferences", format="Messages")


def test_messages_without_a_template_are_human_and_assistant(tmp_path: Path) -> None:
    dialogue = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    path = write(tmp_path, {"messages": dialogue})
    prompt = "\n\nSystem: Be kind.\n\nHuman: Hi\n\nAssistant:"
    assert read(path, "demonstrations")[0] == Demonstration.of(prompt, " Hello")
    assert read(path, "prompts")[0] == Prompt(prompt, {})


def test_message_pairs(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi"}
    pair = [[user, {"role": "assistant", "content": text}] for text in ("yes", "no")]
    path = write(tmp_path, {"chosen": pair[0], "rejected": pair[1]})
    assert read(path, "preferences")[0] == Preference("\n\nHuman: Hi\n\nAssistant:", " yes", " no")


def test_messages_use_the_tokenizers_chat_template(tmp_path: Path) -> None:
    class Tokenizer:
        eos_token, bos_token = "</s>", "<s>"

        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, **options: bool) -> str:
            text = "<s>" + "".join(f"[{m['role']}]{m['content']}</s>" for m in messages)
            return text + ("[assistant]" if options.get("add_generation_prompt") else "")

    dialogue = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = write(tmp_path, {"conversations": dialogue})
    record = read(path, "demonstrations", chat=Template(Tokenizer()))[0]
    assert record == Demonstration.of("<s>[user]Hi</s>[assistant]", "Hello</s>")


def test_text(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "Just words."}, {"text": "\n\nHuman: a\n\nAssistant: b"})
    records = read(path, "demonstrations")
    assert records[0] == Demonstration.of("", "Just words.")
    assert records[1] == Demonstration.of("\n\nHuman: a\n\nAssistant:", " b")


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    write(folder, {"prompt": "c"}, name="2.jsonl")
    write(folder, {"prompt": "a"}, "", {"prompt": "b", "other": [1, "mixed"]}, name="1.jsonl.gz")
    records = read(folder, "prompts")
    assert [records[i].prompt for i in range(len(records))] == ["a", "b", "c"]


def test_parquet(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"prompt": "p", "response": "r"}] * 3).to_parquet(str(tmp_path / "d.parquet"))
    records = read(tmp_path / "d.parquet", "demonstrations")
    assert (len(records), records[2]) == (3, Demonstration.of("p", "r"))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (datetime(2026, 1, 2, tzinfo=UTC), "a timestamp"),
        (date(2026, 1, 2), "a date"),
        (b"x", "bytes"),
        (Decimal("1.5"), "a decimal number"),
        ([{"at": timedelta(1)}], "a duration"),
    ],
)
def test_a_field_that_json_lacks_is_named(tmp_path: Path, value: Any, what: str) -> None:
    """It ended runs in the middle, when a reward function should get it."""
    rows = pyarrow.Table.from_pylist([{"prompt": "p", "response": "r", "when": value}] * 2)
    parquet.write_table(rows, tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet", "demonstrations")[0] == Demonstration.of("p", "r"), "nobody reads the field"
    with pytest.raises(DataError, match=f"d.parquet: record 1: field 'when' is {what}; make it text"):
        read(tmp_path / "d.parquet", "prompts")
    with pytest.raises(ValueError, match=f"prompt 'p': field 'when' is {what}; make it text"):
        given_prompt({"prompt": "p", "when": value})


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """They ended runs when the first answers were written."""
    path = write(tmp_path, '{"prompt": "p", "level": NaN, "parts": [{"x": -Infinity}, 1.5]}')
    fields = {"level": None, "parts": [{"x": None}, 1.5]}
    assert read(path, "prompts")[0] == Prompt("p", fields)
    assert given_prompt({"prompt": "p", "level": float("nan")}) == ("p", {"level": None})
    rows = pyarrow.Table.from_pylist([{"prompt": "p", "level": 0.5}, {"prompt": "q", "level": float("inf")}])
    parquet.write_table(rows, tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet", "prompts")[1] == Prompt("q", {"level": None})


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "old"})
    assert read(path, "prompts")[0].prompt == "old"
    write(tmp_path, {"prompt": "newer"})
    assert read(path, "prompts")[0].prompt == "newer"


BAD_LINES: list[tuple[Any, DataKind, str]] = [
    ("{'a'}", "prompts", "not valid JSON (Expecting property name enclosed in double quotes at column 2)"),
    ("[1]", "prompts", "a record must be an object"),
    ({"prompt": 3}, "prompts", "field 'prompt' must be a string, not a number"),
    ({"prompt": ""}, "prompts", "field 'prompt' is an empty string"),
    ({"other": "x", "text": None}, "prompts", "field 'prompt' (or instruction, question, query, problem) is missing"),
    ({"prompt": "x"}, "demonstrations", "(or completion, output, answer, solution) is missing; the record has only"),
    ({"prompt": "x", "response": "y"}, "preferences", "needs records with chosen and rejected replies"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "kind", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, kind: DataKind, message: str) -> None:
    good = {"prompt": "x", "response": "y"}
    path = write(tmp_path, good, good, row)
    with pytest.raises(DataError) as error:
        read(path, kind)
    line = 1 if kind == "preferences" else 3
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "nothing"}, "no common dialogue"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b"}, "field 'rejected' is missing; the record has only 'chosen'"),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": ["x"]},
            "field 'rejected' must be a string, not a list",
        ),
    ],
)
def test_bad_hh_lines(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path, HH, row)
    with pytest.raises(DataError, match=f"{path}:2: ") as error:
        read(path, "preferences")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "must be a list of messages, not a string"),
        ({"messages": [{"role": "user"}]}, "message 0 of field 'messages' needs 'role' and 'content'"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "has role 'critic'; use system, user, assistant or tool"),
        ({"messages": [{"role": "user", "content": "x"}]}, "must be an assistant message"),
    ],
)
def test_bad_messages(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(write(tmp_path, row), "demonstrations")
    assert message in str(error.value)


def test_half_of_a_character_is_named(tmp_path: Path) -> None:
    """JSON may hold a surrogate without the other one. No tokenizer and no terminal takes such a text."""
    whole = '{"prompt": "\\ud83d\\ude42"}'
    with pytest.raises(DataError, match=r"data.jsonl:2: the record holds '\\ud83d', half of a character"):
        read(write(tmp_path, whole, '{"prompt": "a", "fields": [{"x": "b\\uD83D"}]}'), "prompts")
    assert read(write(tmp_path, whole, name="whole.jsonl"), "prompts")[0] == Prompt("\N{SLIGHTLY SMILING FACE}")
    roles = ["user", "assistant", "user", "assistant"]
    half = {"messages": [{"role": role, "content": text} for role, text in zip(roles, "abc\udc00", strict=True)]}
    with pytest.raises(DataError, match=r"half.jsonl:1: the record holds '\\udc00'"):
        read(write(tmp_path, half, name="half.jsonl"), "demonstrations")
    unused = write(tmp_path, '{"prompt": "a", "response": "b", "author": "c\\uD83D"}', name="unused.jsonl")
    assert read(unused, "demonstrations")[0] == Demonstration.of("a", "b"), "what nobody reads may be anything"


def test_a_field_that_is_null_or_no_label_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:2: field 'prompt' is null; write a value"):
        read(write(tmp_path, {"prompt": "a"}, {"prompt": None, "answer": None}), "prompts")
    row = {"prompt": "a", "response": "b", "label": 1}
    with pytest.raises(
        DataError, match=r"label.jsonl:1: field 'label' must be true \(a good response\) or false, not a number"
    ):
        read(write(tmp_path, row, name="label.jsonl"), "preferences")


def test_unknown_fields(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot tell the format of a record with fields 'a', 'b'; name the fields"):
        read(write(tmp_path, {"a": 1, "b": 2}), "prompts")


def test_missing_empty_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"spec.data.prompts\[0\].path: .*nowhere.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl", "prompts")
    with pytest.raises(DataError, match=r"data.txt must end in .jsonl, .json, .csv or .tsv .* or .parquet"):
        read(write(tmp_path, name="data.txt"), "prompts")
    with pytest.raises(DataError, match=r"empty.jsonl: the file is empty"):
        read(write(tmp_path, "", "  ", name="empty.jsonl"), "prompts")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder holds no .jsonl"):
        read(tmp_path / "folder", "prompts")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps({"prompt": "x" * 9999}).encode())[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: broken gzip file"):
        read(tmp_path / "cut.jsonl.gz", "prompts")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:2: not UTF-8 text"):
        read(tmp_path / "latin.jsonl", "prompts")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"bad.parquet: cannot be loaded"):
        read(tmp_path / "bad.parquet", "prompts")


def test_a_line_that_went_bad_after_good_ones_is_not_cached_as_good(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, "oops")
    for _ in range(2):
        with pytest.raises(DataError, match=r"data.jsonl:2: not valid JSON"):
            read(path, "prompts")


def test_a_table_gives_records_and_the_line_of_a_bad_one(tmp_path: Path) -> None:
    path = write(tmp_path, "question,answer", '"one\nand",1', "two,2", name="a.csv")
    records = read(path, "prompts")
    assert [records[i] for i in range(2)] == [Prompt("one\nand", {"answer": "1"}), Prompt("two", {"answer": "2"})]
    write(tmp_path, "question,answer", '"one\nand",1', ",2", name="a.csv")
    with pytest.raises(DataError, match=r"a.csv:4: field 'question' is an empty string"):
        read(path, "prompts")


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / HH_NAME).exists(), reason="the hh-rlhf test file is not here")
def test_all_pairs_of_hh_rlhf_parse(tmp_path: Path) -> None:
    source = DataSource(path=str(SHARED / HH_NAME))
    records = load(source, "preferences", field="f", base_dir=tmp_path, cache_dir=tmp_path, seed=0)
    assert len(records) == 2312
    for i in range(len(records)):
        record = records[i]
        assert isinstance(record, Preference)
        assert record.prompt.startswith("\n\nHuman:")
        assert record.prompt.endswith("\n\nAssistant:")


@pytest.mark.parametrize(("context", "prompt"), [("2 and 2", "Add\n2 and 2"), ("", "Add"), (None, "Add")])
def test_the_input_of_an_instruction_is_part_of_the_prompt(context: str | None, prompt: str) -> None:
    """It was left out without a word, so models learnt answers to questions that they had not seen."""
    row = {"instruction": "Add", "input": context, "output": "4"}
    assert detect(row, "here") == "PromptResponse"
    learnt = convert(row, "PromptResponse", "demonstrations", HumanAssistant(), "here")
    assert learnt == Demonstration.of(prompt, "4")
    asked = convert(row, "PromptResponse", "prompts", HumanAssistant(), "here")
    assert isinstance(asked, Prompt)
    assert (asked.prompt, asked.fields["input"]) == (prompt, context)
    other = {"prompt": "Add", "input": "x", "output": "4"}
    made = convert(other, "PromptResponse", "demonstrations", HumanAssistant(), "here")
    assert made == Demonstration.of("Add", "4"), "only Alpaca's records have this meaning"
