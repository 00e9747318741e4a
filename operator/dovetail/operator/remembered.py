"""A memory for answers that can be computed again. It does no I/O."""

from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")

MOST = 5000
# The maximum number of characters of JSON of all answers. In memory they take about ten times as much.
MOST_TEXT = 8 << 20


class Remembered(Generic[V]):
    """The newest answers by key. There are at most MOST, and their sizes are at most `most_size` together, but the last
    one is always kept. The caller chooses the unit of sizes. The default is characters."""

    def __init__(self, most_size: int = MOST_TEXT) -> None:
        self._most_size = most_size
        self._kept: dict[str, tuple[int, V]] = {}
        self._size = 0

    def put(self, key: str, value: V, size: int) -> None:
        self.drop(key)
        while self._kept and (len(self._kept) >= MOST or self._size + size > self._most_size):
            self.drop(next(iter(self._kept)))
        self._kept[key] = size, value
        self._size += size

    def get(self, key: str) -> V | None:
        found = self._kept.get(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def drop(self, key: str) -> None:
        """Forget one answer."""
        size, _ = self._kept.pop(key, (0, None))
        self._size -= size
