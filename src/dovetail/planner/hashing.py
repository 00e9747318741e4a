"""Hashes of what caches are asked for a hundred thousand times."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def hashed_once(cls: type[T]) -> type[T]:
    """For a frozen dataclass: its hash is computed when it is first needed, and kept."""
    whole = cls.__hash__

    def once(self: Any) -> int:
        known: dict[str, Any] = self.__dict__
        if "_hash" not in known:
            known["_hash"] = whole(self)
        value: int = known["_hash"]
        return value

    def state(self: Any) -> dict[str, Any]:
        # Another process hashes strings otherwise.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = once  # type: ignore[assignment]
    cls.__getstate__ = state  # type: ignore[assignment]
    return cls
