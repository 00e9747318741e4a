"""Caches what the search asks for a hundred thousand times: hashes, and figures of a share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def hashed_once(cls: type[T]) -> type[T]:
    """A decorator for a frozen dataclass. The hash is computed when it is first needed, and then kept."""
    whole = cls.__hash__

    def once(self: Any) -> int:
        known: dict[str, Any] = self.__dict__
        if "_hash" not in known:
            known["_hash"] = whole(self)
        value: int = known["_hash"]
        return value

    def state(self: Any) -> dict[str, Any]:
        # The kept hash is left out: another process hashes strings differently.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = once  # type: ignore[assignment]
    cls.__getstate__ = state  # type: ignore[assignment]
    return cls


def known_share(method: Callable[..., T]) -> Callable[..., T]:
    """A decorator for a method of (task, share, ...) whose answer depends on the share's layout, but not on the GPU
    where the share begins. The method runs once for each layout, with a share that begins at GPU 0."""

    @wraps(method)
    def once(self: Any, task: Any, share: Any, *more: Any) -> T:
        answers: dict[Any, T] = self.__dict__.setdefault(f"_known_{method.__name__}", {})
        key = task, share.at(0), *more
        if key not in answers:
            answers[key] = method(self, *key)
        return answers[key]

    return once
