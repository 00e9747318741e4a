"""Reads the rows of data files strictly: JSON lines, a JSON list, CSV or Parquet. Every error names the file, and the
line or record."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text.conversations import table_row, type_name
from dovetail.manifest.fixed_names import CSV, DATA_ENDINGS, DATA_SUFFIXES, JSON, PARQUET, data_files

# The first characters that are read of a JSON list. A record that is longer is read in larger and larger parts.
CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def source_files(path: Path, field: str) -> list[Path]:
    """The files of a `path` source, in order. Raises DataError."""
    if not path.exists():
        raise DataError(f"{field}.path: {path} does not exist")
    files = data_files(path)
    if not files and path.is_dir():
        raise DataError(f"{field}.path: folder {path} holds no {DATA_ENDINGS} file")
    if not files:
        raise DataError(f"{field}.path: {path.name} must end in {DATA_ENDINGS}")
    kinds = (PARQUET, CSV, DATA_SUFFIXES)
    if len({next(kind for kind in kinds if file.name.endswith(kind)) for file in files}) > 1:
        raise DataError(f"{field}.path: folder {path} mixes JSON, CSV or Parquet; keep one kind a folder")
    for other in sorted(path.iterdir()) if path.is_dir() else []:
        if other.name.endswith(JSON) and other.is_file() and other not in files and _holds_records(other):
            raise DataError(
                f"{field}.path: folder {path} holds records in {other.name} and in {files[0].name}; keep one kind of "
                "file a folder"
            )
    return files


def _holds_records(file: Path) -> bool:
    """Whether a JSON file has a list of objects or several objects, and not a list of names, or the one object that
    describes other files."""
    try:
        with _opened(file) as opened:
            enough = 1 if _Json(_text(opened)).next() == "[" else 2
        found = list(itertools.islice(_json(file), enough))
        return len(found) == enough and all(isinstance(value, dict) for _, value in found)
    except DataError:
        return False


def content_digest(path: Path) -> str:
    """The SHA-256 of a file. It is read each time, because a file may change and keep its size and time. Raises
    DataError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def rows(file: Path) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """The place of each row, and the row or what is wrong with it. Raises DataError where the rest of the file cannot
    be read, and for a file without rows."""
    if file.name.endswith(PARQUET):
        found = _parquet(file)
    elif file.name.endswith(CSV):
        found = _csv(file)
    else:
        found = _json(file) if file.name.endswith(JSON) else _lines(file)
    empty = True
    for place, value in found:
        empty = False
        if isinstance(value, dict | DataError):
            yield place, value
            continue
        listed = isinstance(value, list) and not file.name.endswith(JSON)
        mend = "; a file with one list of all records must end in .json" if listed else ""
        error = f'{place}: a record must be an object such as {{"prompt": ...}}, not {type_name(value)}{mend}'
        yield place, DataError(error)
    if empty:
        raise DataError(f"{file}: the file is empty; it should hold records")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file, decompressed if it ends in .gz. Raises DataError if it cannot be read, decompressed or decoded."""
    try:
        with cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: broken gzip file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _text(file: BinaryIO) -> TextIO:
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            place = f"{path}:{number}"
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield place, _parsed(raw, place)


def _parsed(raw: bytes, place: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataError(f"{place}: not UTF-8 text ({error.reason})")
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return DataError(f"{place}: not valid JSON ({reason})")
    except RecursionError:
        return DataError(f"{place}: JSON nested too deeply")


class _Json:
    """The text of a JSON file, of which a part is in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at, self._line = "", 0, 1

    def _more(self) -> bool:
        """Read more of the file. False at its end."""
        self._line += self._text.count("\n", 0, self._at)
        more = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def next(self) -> str:
        """The next character that is no white space. "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self) -> None:
        """Go past a character."""
        self._at += 1

    def value(self, place: str) -> Any:
        """The value that begins here. Raises DataError."""
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                # What is not in memory yet may make it whole.
                near = error.pos > len(self._text) - 16 or error.msg.startswith("Unterminated string")
                if near and self._more():
                    continue
                line = self._line + self._text.count("\n", 0, error.pos)
                raise DataError(f"{place}: not valid JSON ({error.msg} in line {line})") from None
            except ValueError as error:  # a number with thousands of digits
                raise DataError(f"{place}: not valid JSON ({error})") from None
            except RecursionError:
                raise DataError(f"{place}: JSON nested too deeply") from None


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of one JSON list, or of objects that follow each other."""
    with _opened(path) as file:
        text, number = _Json(_text(file)), 0
        if text.next() == "[":
            text.skip()
            while (mark := text.next()) != "]":
                if number:
                    if mark != ",":
                        found = f"{mark!r} is there" if mark else "the file ends there; it may be cut off"
                        raise DataError(f"{path}: no comma and no end of the list after record {number}: {found}")
                    text.skip()
                    text.next()
                number += 1
                yield (place := f"{path}: record {number}"), text.value(place)
            text.skip()
            if text.next():
                raise DataError(f"{path}: there is more after the end of the list; keep one list in a file")
        while text.next():
            number += 1
            yield (place := f"{path}: record {number}"), text.value(place)


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a table whose first row has the names of the columns. Commas, semicolons or tabs separate
    them."""
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as opened:
        file = _text(opened)
        first = file.readline()
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
        names: list[str] | None = None
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{place}: not valid CSV ({error})") from None
            if cells is None:
                break
            if not any(cells):
                continue
            if names is None:
                names = [name.strip() for name in cells]
                if twice := [name for name in names if name and names.count(name) > 1]:
                    raise DataError(f"{place}: two columns are called {twice[0]!r}; rename one")
            elif len(cells) != len(names):
                says = f"{len(cells)} values for {len(names)} columns; put a value with separators in quotation marks"
                yield place, DataError(f"{place}: {says}")
            else:
                # Without a name are the numbers that pandas gives its rows.
                yield place, {name: _cell(name, cell) for name, cell in zip(names, cells, strict=True) if name}


def _cell(name: str, text: str) -> Any:
    """A value of a table of texts. Labels and lists of messages are written as in JSON."""
    if name in ("label", "kto_tag") and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if name in ("messages", "conversations", "prompt", "chosen", "rejected", "history", "tools") and text[:1] == "[":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        kind = list if name == "history" else dict
        empty = not found and name not in ("history", "tools")
        return text if empty or not all(isinstance(each, kind) for each in found) else found
    return text


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: record {number}", table_row(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read: {' '.join(str(error).split())[:300]}") from error
