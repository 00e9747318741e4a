"""Files that survive a power failure, and JSON objects in files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Flush a file to the disk. For a folder, flush the entries that were made, renamed or deleted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. {} if there is none, or something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document atomically. Raises OSError that names `path`."""
    write_whole(path, (json.dumps(document, indent=2, sort_keys=False) + "\n").encode())


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically. It then has all of `data`, or its old content. Raises OSError that names `path`."""
    write_pieces(path, [data], mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """`write_whole` for content that is never in memory as one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, mode), "wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # on a full disk other files need the space
        raise OSError(error.errno, error.strerror, str(path)) from error
