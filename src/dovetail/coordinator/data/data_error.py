"""Errors in a user's data or model sources."""

from __future__ import annotations

from collections.abc import Iterator


class DataError(ValueError):
    """An error in the user's data. The message is one sentence that names the field or file, what it contains, and what
    to do."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the chain of errors that caused it, each once. The chain may be a circle: if an error is raised
    again while an error that it caused is handled, each of the two names the other one."""
    told: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and not any(seen is each for each in told):
        yield seen
        told.append(seen)
        seen = seen.__cause__ or seen.__context__
