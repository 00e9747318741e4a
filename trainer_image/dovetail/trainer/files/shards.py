"""Checksums of a checkpoint's files. They are computed when files are written, and compared before files are used."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dovetail.models.transfer import checksum
from dovetail.trainer.files.safe_metadata import SafeReader

_CHUNK = 16 * 2**20
# So many files of a rank are written, or read for their digests, at once.
AT_ONCE = 4


class Damaged(RuntimeError):
    """A file is not what was saved. The message is one sentence that names the file."""


def digest(path: Path) -> str:
    """A digest of a file's size and content, 32 hexadecimal digits. It hashes the checksums of all chunks, which are
    those of weight transfers. It runs about as fast as memory is read. It detects any damage, but no deliberate
    forgery. Raises OSError."""
    buffer = torch.empty(_CHUNK, dtype=torch.uint8)
    total, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while count := _fill(file, memoryview(buffer.numpy())):
            size += count
            whole = -(-count // 16) * 16
            buffer[count:whole] = 0
            total.update(checksum(buffer[:whole]).numpy().tobytes())
    total.update(str(size).encode())
    return total.hexdigest()[:32]


def digests(files: Sequence[Path]) -> dict[str, str]:
    """The digest of each file by its name. Several files are read at a time. Raises OSError."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {file.name: found for file, found in zip(files, pool.map(digest, files), strict=True)}


def _fill(file: io.FileIO, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def verify(folder: Path, name: str, expected: Mapping[str, str]) -> None:
    """Raises Damaged unless the file has the digest in `expected` (digests by name). If `expected` is empty, every file
    passes, because the checkpoint is of a release without digests."""
    if not expected:
        return
    if name not in expected:
        raise Damaged(f"{folder / name} is no part of the checkpoint")
    try:
        found = digest(folder / name)
    except FileNotFoundError as error:
        raise Damaged(f"{folder / name} is missing") from error
    if found != expected[name]:
        raise Damaged(f"{folder / name} is damaged: its content is not what was saved")


class CheckedReader(SafeReader):
    """Verifies each file that this rank reads, before it uses anything from it. Raises Damaged."""

    def __init__(self, path: Path, expected: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._expected = path, expected

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        data: dict[Any, Any] = self.storage_data
        names = sorted({data[item.storage_index].relative_path for item in plan.items})
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: verify(self._folder, name, self._expected), names))
        return super().read_data(plan, planner)
