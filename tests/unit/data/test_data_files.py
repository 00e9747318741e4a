"""Files of every kind give the same records, or one sentence that names the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data import data_files
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.data_files import rows, source_files

ROWS = [{"prompt": "a, b", "response": 'say "c"'}, {"prompt": "two\nlines", "response": "é"}]
LIST = json.dumps(ROWS, ensure_ascii=False)
TABLE = 'prompt,response\n"a, b","say ""c"""\n"two\nlines",é\n'


def found(path: Path) -> list[Any]:
    """The rows of a file, and the sentences about bad ones."""
    return [str(row) if isinstance(row, DataError) else row for _, row in rows(path)]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines.jsonl", "\n".join(map(json.dumps, ROWS))),
        ("crlf.jsonl", "\r\n\r\n".join(map(json.dumps, ROWS)) + "\r\n"),
        ("list.json", LIST),
        ("pretty.json", json.dumps(ROWS, indent=2)),
        ("lines.json", "\n".join(map(json.dumps, ROWS))),
        ("pretty-lines.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("table.csv", TABLE),
        ("excel.csv", TABLE.replace("é\n", "é\r\n").replace("response\n", "response\r\n")),
        ("semicolons.csv", 'prompt;response\na, b;"say ""c"""\n"two\nlines";é\n;\n'),
        ("tabs.tsv", 'prompt\tresponse\na, b\t"say ""c"""\n"two\nlines"\té'),
        ("pandas.csv", ',prompt , response\n0,"a, b","say ""c"""\n1,"two\nlines",é\n'),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_kind_of_file(
    tmp_path: Path, name: str, text: str, ending: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "CHUNK", chunk)
    for mark in (b"", b"\xef\xbb\xbf"):
        content = mark + text.encode()
        (tmp_path / (name + ending)).write_bytes(gzip.compress(content) if ending else content)
        assert found(tmp_path / (name + ending)) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("empty.json", "", "empty.json: the file is empty; it should hold records"),
        ("empty.json", " [ ]\n", "the file is empty"),
        ("empty.csv", "prompt,response\n", "the file is empty"),
        ("cut.json", LIST[:-1], "no end of the list after record 2: the file ends there; it may be cut off"),
        ("cut.json", LIST[:-20], "record 2: not valid JSON"),
        ("colon.json", '[{"a": 1}\n{"a": 2}]', "no comma and no end of the list after record 1: '{' is there"),
        ("two.json", LIST + LIST, "there is more after the end of the list"),
        ("typo.json", '[\n{"a": 1},\n{"a": b}]', r"record 2: not valid JSON \(Expecting value in line 3\)"),
        ("digits.json", '[{"a": 1}, {"a": ' + "9" * 5000 + "}]", r"record 2: not valid JSON \(Exceeds the limit"),
        ("twice.csv", "prompt,response,prompt\na,b,c\n", "twice.csv:1: two columns are called 'prompt'; rename one"),
        ("quotes.csv", 'prompt,response\na,"b\n', r"quotes.csv:2: not valid CSV \(unexpected end of data\)"),
        ("after.csv", 'prompt,response\na,"b"c\n', "after.csv:2: not valid CSV"),
    ],
)
def test_what_ends_a_file(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence) as error:
        found(tmp_path / name)
    assert "\n" not in str(error.value)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    for name, text in (("table.csv", TABLE), ("list.json", LIST)):
        for encoding in ("latin-1", "utf-16"):
            (tmp_path / name).write_bytes(text.encode(encoding))
            with pytest.raises(DataError, match=f"{name}: not UTF-8 text .*; save the file as UTF-8"):
                found(tmp_path / name)


def test_bad_rows_between_good_ones(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["text", {"prompt": "a"}, [1], null]')
    (tmp_path / "a.csv").write_text("prompt,response\na,b,c\nd\ne,f\n")
    (tmp_path / "a.jsonl").write_text('[{"prompt": "a"}]\n{"prompt": "b"}\n')
    text, good, inner, null = found(tmp_path / "a.json")
    assert text.endswith('a.json: record 1: a record must be an object such as {"prompt": ...}, not a string')
    assert "record 3: a record must be an object" in inner
    assert null.endswith("not null")
    assert good == {"prompt": "a"}
    many, few, good = found(tmp_path / "a.csv")
    assert "a.csv:2: 3 values for 2 columns" in many
    assert "a.csv:3: 1 values for 2 columns" in few
    assert good == {"prompt": "e", "response": "f"}
    listed, good = found(tmp_path / "a.jsonl")
    assert "a.jsonl:1: a record must be an object" in listed
    assert "a file with one list of all records must end in .json" in listed


def test_a_table_holds_labels_and_messages_as_json(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi, you"}]
    cell = json.dumps(talk).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'prompt,messages,label,response\n[1],"{cell}",True,"[{{}}]"\n')
    assert found(tmp_path / "a.csv") == [{"prompt": "[1]", "messages": talk, "label": True, "response": "[{}]"}]
    for text in ("[]", "[[1, 2], [3, 4]]", "[" * 100_000):
        (tmp_path / "a.csv").write_text(f'prompt,response\n"{text}",b\n')
        assert found(tmp_path / "a.csv") == [{"prompt": text, "response": "b"}], "no messages, but a text"


def test_a_list_is_not_read_whole_to_find_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of some GB would fill the memory."""
    monkeypatch.setattr(data_files, "CHUNK", 64)
    asked: list[int] = []
    read = data_files._Json._more

    def more(self: Any) -> bool:
        asked.append(1)
        return read(self)

    monkeypatch.setattr(data_files._Json, "_more", more)
    (tmp_path / "a.json").write_text("[" + ", ".join([json.dumps({"prompt": oops}) for oops in ("a", "b")] * 500) + "]")
    first = next(rows(tmp_path / "a.json"))
    assert first == (f"{tmp_path / 'a.json'}: record 1", {"prompt": "a"})
    assert len(asked) == 1
    (tmp_path / "a.json").write_text('[{"prompt": oops}, ' + '{"prompt": "a"}, ' * 500)
    with pytest.raises(DataError, match="record 1: not valid JSON"):
        next(rows(tmp_path / "a.json"))
    assert len(asked) == 2


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    def names(*files: str) -> list[str]:
        folder = tmp_path / f"of-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for file in (*files, "README.md"):
            (folder / file).write_text("x")
        return [file.name for file in source_files(folder, "spec.data.prompts[0]")]

    assert names("b.json", "a.json.gz") == ["a.json.gz", "b.json"]
    assert names("train.jsonl", "dataset_info.json") == ["train.jsonl"]
    assert names("train.parquet", "dataset_info.json") == ["train.parquet"]
    assert names("a.csv", "b.tsv.gz") == ["a.csv", "b.tsv.gz"]
    for mixed in (("a.csv", "b.jsonl"), ("a.parquet", "b.jsonl")):
        with pytest.raises(DataError, match=r"\[0\].path: folder .* mixes JSON, CSV or Parquet; keep one kind"):
            names(*mixed)
    with pytest.raises(DataError, match=r"folder .* holds no .jsonl, .json, .csv"):
        names()


@pytest.mark.parametrize("records", ['[{"text": "a"}]', '{"text": "a"}\n{"text": "b"}\n'])
def test_records_beside_files_of_another_kind_are_not_left_out(tmp_path: Path, records: str) -> None:
    (tmp_path / "test.csv").write_text("text\na\n")
    (tmp_path / "dataset_info.json").write_text('{"features": [{"name": "text"}]}')
    for name, text in (("labels", '["a", "b"]'), ("empty", "[]"), ("broken", "[{")):
        (tmp_path / f"{name}.json").write_text(text)
    assert [file.name for file in source_files(tmp_path, "f")] == ["test.csv"]
    (tmp_path / "train.json").write_text(records)
    with pytest.raises(
        DataError, match=r"f.path: folder .* holds records in train.json and in test.csv; keep one kind"
    ):
        source_files(tmp_path, "f")
