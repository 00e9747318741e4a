"""Checksums of a checkpoint's files: taken when they are written, compared before any of them is used."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dovetail.models.transfer import checksum
from dovetail.trainer.files.safe_metadata import SafeReader

_CHUNK = 16 * 2**20


class Damaged(RuntimeError):
    """A file is not what was saved; the message is one sentence that names it."""


def digest(path: Path) -> str:
    """A digest of a file's size and content, computed at about the speed of memory: the checksum of weights in transit,
    chunk by chunk, hashed. It detects any damage. It is no defence against a forger."""
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


def _fill(file: io.FileIO, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def verify(folder: Path, name: str, expected: Mapping[str, str]) -> None:
    """Raises Damaged unless the file is what `expected` (digests by name) says. Files without a digest pass: the
    checkpoint is of a release that kept none."""
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
    """Verifies each file that this rank reads before it takes anything from it. Raises Damaged."""

    def __init__(self, path: Path, expected: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._expected = path, expected

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        data: dict[Any, Any] = self.storage_data
        for name in sorted({data[item.storage_index].relative_path for item in plan.items}):
            verify(self._folder, name, self._expected)
        return super().read_data(plan, planner)
