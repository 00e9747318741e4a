"""The store's key-value part, in memory."""

from __future__ import annotations


class Records:
    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def get(self, key: str) -> object:
        return self.values.get(key)

    def put(self, key: str, value: object) -> None:
        self.values[key] = value

    def sync(self) -> None:
        pass
