"""A memory for answers that can be made again. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")

MOST = 5000
# Characters of JSON of all answers. In memory they take about ten times as much.
MOST_TEXT = 8 << 20


class Remembered(Generic[V]):
    """The newest answers by key: at most MOST, and at most MOST_TEXT characters together, but always the last one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, V]] = {}
        self._size = 0

    def put(self, key: str, value: V, size: int) -> None:
        """`size`: characters."""
        self._drop(key)
        while self._kept and (len(self._kept) >= MOST or self._size + size > MOST_TEXT):
            self._drop(next(iter(self._kept)))
        self._kept[key] = size, value
        self._size += size

    def get(self, key: str) -> V | None:
        found = self._kept.get(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def _drop(self, key: str) -> None:
        size, _ = self._kept.pop(key, (0, None))
        self._size -= size
