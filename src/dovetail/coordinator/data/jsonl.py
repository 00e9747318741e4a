"""Reads JSON lines strictly. Every error names the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from dovetail.coordinator.data.data_error import DataError

# Advice for a file that holds one list of all records. Other trainers read such files.
ONE_LIST = "if the file holds one list of all records, this makes lines of it: jq -c '.[]' LIST.json > LINES.jsonl"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The (line number from 1, text) of every line that is not blank. Files that end in .gz are decompressed. Raises
    DataError for a file that cannot be read, decompressed or decoded."""
    number = 0
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield number, raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason})") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: broken gzip file after line {number} ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def ending(path: Path) -> str:
    """Advice for a user who names a .json file, as the end of a sentence. Such a file may already have JSON lines.
    Raises DataError for a file that cannot be read."""
    first = next(lines(path), (0, ""))[1]
    try:
        parse(first, str(path))
    except DataError:
        return ONE_LIST
    return f"its lines are JSON objects, so rename it to {path.stem}.jsonl"


def parse(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a line. Raises DataError whose message begins with `where`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{where}: not valid JSON ({reason})") from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply") from None
    if not isinstance(value, dict):
        mend = f"; {ONE_LIST}" if isinstance(value, list) else ""
        raise DataError(
            f'{where}: each line must be an object such as {{"prompt": ...}}, not {type(value).__name__}{mend}'
        )
    return value
