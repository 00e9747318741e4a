"""`dovetail data`: what a user learns of a file before a job reads it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text import tokenizer
from dovetail.tools.data_look import look

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template, of bytes: one token a character."""
    folder = tmp_path_factory.mktemp("model")
    made = tokenizer.train(["a"], 258)
    made.chat_template = TEMPLATE
    made.save_pretrained(str(folder))
    return folder


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["data", *map(str, arguments)], env={"COLUMNS": "120"})


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_lengths_and_what_is_cut_at_the_limits(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "d.jsonl", *({"prompt": "p" * n, "response": " r"} for n in range(1, 101)))
    done = data(file, "--model", model, "--max-prompt-tokens", 90, "--max-tokens", 100, "--template", "Never")
    assert done.exit_code == 0, done.output
    rows = squeezed(done.output)
    assert "Records 100" in rows
    assert "prompt 50 95 100 90 10 (10.0%)" in rows
    assert "prompt and response 53 98 103 100 3 (3.0%)" in rows
    assert "Read as demonstrations, a guess from the first record; --as names another" in rows
    assert any("has a chat template, but it is not used: the template of the source is Never" in row for row in rows)


def test_long_records_are_told_in_our_words_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer.train(["a"], 258)
    made.model_max_length = 10
    made.save_pretrained(str(tmp_path / "model"))
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    logging.getLogger("transformers").addHandler(handler)
    try:
        done = data(write(tmp_path / "d.jsonl", {"prompt": "p" * 600}), "--model", tmp_path / "model")
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert "prompt 600 600 600 512 1 (100.0%)" in squeezed(done.output)
    assert told == []


def test_messages_are_shown_as_the_template_writes_them(tmp_path: Path, model: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "id": 7}
    done = data(write(tmp_path / "m.jsonl", row), "--model", model)
    assert "Template the tokenizer's chat template" in squeezed(done.output)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" in done.output
    assert "Response, which is learnt\nHo<|im_end|>" in done.output
    prompts = data(tmp_path / "m.jsonl", "--as", "prompts")
    assert prompts.exit_code == 0
    assert "Template Human/Assistant" in squeezed(prompts.output)
    assert "id = 7" in prompts.output
    assert "give --model" in prompts.output


def test_each_turn_is_shown_as_learnt_or_given(tmp_path: Path, model: Path) -> None:
    said = [("user", "Hi"), ("assistant", "Ho"), ("user", "Who?"), ("assistant", "Me")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    done = data(write(tmp_path / "m.jsonl", row), "--model", model, "--system", "Be brief.")
    assert done.exit_code == 0, done.output
    assert "Prompt of the first record\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi" in done.output
    assert "Response, which is learnt\nHo<|im_end|>\n" in done.output
    assert "Given\n<|im_start|>user\nWho?<|im_end|>" in done.output
    assert "Response, which is learnt\nMe<|im_end|>" in done.output
    assert any(line.startswith("the whole conversation ") for line in squeezed(done.output))


def test_fields_that_nothing_reads_are_named(tmp_path: Path) -> None:
    empty = {"instruction": "Add", "input": "", "context": "", "output": "4"}
    full = {"instruction": "Add", "input": "2 and 2", "context": "sums", "output": "4"}
    file = write(tmp_path / "d.jsonl", empty, full)
    assert "Not used context" in squeezed(data(file, "--as", "demonstrations").stdout)
    assert "Not used" not in data(file, "--as", "prompts").stdout, "reward functions get the others"
    pair = write(tmp_path / "p.jsonl", {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"})
    assert "Not used" not in data(pair).stdout
    assert "template is Never, but this record has the field 'system'" in data(pair, "--template", "Never").stderr
    math = {"problem": "2+2?", "level": 1, "solution": "4"}
    found = squeezed(data(write(tmp_path / "m.jsonl", math)).stdout)
    assert "Read as demonstrations, a guess from the first record; --as names another" in found
    assert "Not used level" in found


def test_fields_of_messages_that_change_nothing_are_named(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "Hi", "name": "Bo", "time": 3}
    done = data(write(tmp_path / "m.jsonl", {"messages": [asked, {"role": "assistant", "content": "Yo."}]}))
    assert "Not used messages[].name, messages[].time" in squeezed(done.output)


def test_labels(tmp_path: Path) -> None:
    done = data(write(tmp_path / "l.jsonl", {"prompt": "p", "response": "r", "label": False}))
    assert "Format Labelled" in squeezed(done.output)
    assert "Response, which is bad\nr" in done.output


def test_the_first_bad_line_has_its_number_and_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "users.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "response": "b"}\r\n\r\n{"prompt": "a"}\r\n{oh\r\n{"prompt": "", "response": ""}'
    )
    done = data(file)
    assert done.exit_code == 2
    assert "Records 1, and 3 bad" in squeezed(done.stdout)
    assert f"Error: {file}:3: field 'response' (or completion, output, answer, solution) is missing" in done.stderr
    assert "3 records are bad" in done.stderr


def test_what_cannot_be_decoded_is_a_line_too(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    done = data(file, "--as", "prompts")
    assert (done.exit_code, "latin.jsonl:2: not UTF-8 text" in done.stderr) == (2, True)


def test_pairs_and_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": "p", "chosen": "good", "rejected": "bad"}, {"prompt": "", "chosen": "x", "rejected": "y"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    found = look(tmp_path / "pairs.parquet", "FILE")
    assert (found.kind, found.format, found.records, found.errors) == ("preferences", "ChosenRejected", 1, 1)
    assert "record 2: field 'prompt' is an empty string" in str(found.first_error)


def test_nothing_is_said_of_the_records_of_a_file_without_a_good_one(tmp_path: Path) -> None:
    done = data(write(tmp_path / "list.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    assert done.exit_code == 2
    assert "Records 0, and 1 bad" in squeezed(done.output)
    assert not any(name in done.output for name in ("Format", "Read as", "Template", "Auto"))
    assert "not a list; a file with one list of all records must end in .json" in done.output


def test_pairs_from_which_nothing_is_learnt_are_counted(tmp_path: Path, model: Path) -> None:
    pairs = [{"prompt": "p", "chosen": " a", "rejected": " b"}, {"prompt": "p", "chosen": " a", "rejected": " a"}]
    cut = {"prompt": "p", "chosen": " " + "a" * 40 + "b", "rejected": " " + "a" * 40 + "c"}
    file = write(tmp_path / "p.jsonl", *pairs, cut)
    said = "of the 3 pairs have equal replies, perhaps because both are cut at maxTokens; nothing is learnt from them."
    assert f"1 {said}" in data(file).output
    assert f"2 {said}" in data(file, "--model", model, "--max-tokens", 20).output
    assert "equal" not in data(write(tmp_path / "q.jsonl", pairs[0])).output


def test_the_lengths_and_the_model_of_a_job(tmp_path: Path, model: Path) -> None:
    assert CliRunner().invoke(cli, ["init", "sft", str(tmp_path / "job"), "--model", str(model)]).exit_code == 0
    done = data(tmp_path / "job/demonstrations.jsonl", "--job", tmp_path / "job/job.yaml", "--max-tokens", 8)
    assert done.exit_code == 0, done.output
    (row,) = [row for row in squeezed(done.output) if row.startswith("prompt and response")]
    assert row.endswith(" 8 5 (100.0%)")


def test_a_model_of_a_jobs_hub_is_not_taken_for_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def describe(self: Any, name: str, field: str, repository: str, revision: str | None) -> Path:
        asked.append(repository)
        raise DataError("no network")

    monkeypatch.setattr("dovetail.cli.data_command.Hub.describe", describe)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    file = write(tmp_path / "p.jsonl", {"prompt": "p"})
    spec = {"stages": ["sft"], "models": {"actor": {"source": {"huggingFace": "Qwen/small"}}}}
    spec |= {"data": {"demonstrations": [{"path": "p.jsonl"}]}, "groups": [{"name": "t", "roles": ["trainer"]}]}
    job = {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "j"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert "no network" in data(file, "--job", "job.yaml").stderr
    assert asked == ["Qwen/small"]
    assert "but the folder Qwen does" in data(file, "--model", "Qwen/small").stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing.jsonl", "does not exist"),
        ("text.txt", "must end in .jsonl, .json"),
        ("empty.jsonl", "is empty"),
        ("empty.json", "is empty"),
        ("empty.csv", "is empty"),
    ],
)
def test_files_that_hold_no_records_are_refused(tmp_path: Path, name: str, sentence: str) -> None:
    if name != "nothing.jsonl":
        (tmp_path / name).write_text("\n")
    done = data(tmp_path / name)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("Error: ")
    assert "FILE" not in done.stderr


def test_a_template_that_refuses_the_first_record_is_still_named(tmp_path: Path) -> None:
    made = tokenizer.train(["a"], 258)
    made.chat_template = "{{ raise_exception('System role not supported') }}"
    made.save_pretrained(str(tmp_path / "model"))
    row = {"messages": [{"role": "user", "content": "Hi"}]}
    done = data(write(tmp_path / "m.jsonl", row), "--model", tmp_path / "model")
    assert done.exit_code == 2
    assert "m.jsonl:1: the tokenizer's chat template refuses the conversation: System role not supported" in done.output
    assert "Template the tokenizer's chat template" in squeezed(done.output)


def test_a_data_set_of_a_hub_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, **options: Any) -> Any:
        asked.append((name, subset, options["split"]))
        return datasets.Dataset.from_list(
            [{"question": "2 + 2?", "answer": "4"}] * 3 + [{"question": "", "answer": "5"}]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    done = data("openai/gsm8k", "--subset", "main", "--split", "test", "--as", "prompts")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert done.exit_code == 2
    assert "Records 3, and 1 bad" in squeezed(done.stdout)
    assert "Error: openai/gsm8k (test): record 4: field 'question' is an empty string" in done.stderr
    (tmp_path / "mine").mkdir()
    for name in ("data/promts.jsonl", "mine/prompts"):
        missing = data(name)
        assert (missing.exit_code, missing.stderr) == (2, f"Error: {name} does not exist\n")
    assert len(asked) == 1, "no hub is asked for a mistyped path"
    wrong = data("nothing.jsonl", "--subset", "main")
    assert "--subset and --split are for a data set of a hub (owner/name), but nothing.jsonl is not one" in wrong.stderr


def test_empty_and_repeated_records_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    one, empty = {"prompt": "a", "response": "b"}, {"prompt": "c", "response": " "}
    path = write(tmp_path / "d.jsonl", one, empty, one, {"prompt": "d", "response": ""}, one, {**one, "response": "x"})
    told = " ".join(squeezed(data(path).output)).replace("\n", " ")
    assert f"2 records have an empty response (first: {path}:2)." in told
    assert f"2 records repeat an earlier one (first: {path}:3)." in told
    pairs = [{"prompt": "a", "chosen": "b", "rejected": ""}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    told = " ".join(squeezed(data(path := write(tmp_path / "p.jsonl", *pairs)).output))
    assert f"1 record has an empty response (first: {path}:1)." in told
    assert "repeats" not in told
