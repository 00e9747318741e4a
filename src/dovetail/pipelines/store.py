"""A folder as a mapping from keys to text: where searches' answers are kept between commands.

The one module of the planner that touches files. A file that cannot be read counts as absent, one that cannot be
written is left out: the store saves time, nothing depends on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path


class FolderStore(MutableMapping[str, str]):
    """Keys must be plain file names. Writes are atomic, so that several commands may share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        if not key or not all(c.isalnum() or c in "-_" for c in key):
            raise KeyError(key)
        return self.folder / f"{key}.json"

    def __getitem__(self, key: str) -> str:
        try:
            return self._path(key).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: str) -> None:
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(value)
            os.replace(name, path)
        except OSError:
            return

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except OSError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self.folder.glob("*.json")))

    def __len__(self) -> int:
        return sum(1 for _ in self)
