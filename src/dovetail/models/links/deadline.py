"""What all links share: their error, their deadline, and what they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol

import torch


class TransferError(RuntimeError):
    """A weight transfer that did not complete; the message is one sentence for the user. `ranks`: those that others
    waited for, where that is known."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Deadline:
    """Seconds left of a budget that starts now. `extra` seconds more are granted without being spoken of. `clock` is
    injected for tests."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, extra: float = 0.0):
        self._clock = clock
        self._end = clock() + seconds + extra
        self.seconds = seconds

    def left(self, late: Callable[[], Iterable[int]] = list) -> timedelta:
        """Raises TransferError when nothing is left; it names the ranks of `late`."""
        left = self._end - self._clock()
        if left <= 0:
            raise TransferError(f"the weight transfer passed its deadline of {self.seconds:g} s", late())
        return timedelta(seconds=max(left, 0.05))


class Handle(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Raises TransferError if the message did not get through in time."""


class Link(Protocol):
    """Carries a sender's messages to some of its receivers. Broken for good after its first error."""

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """Start sending or receiving `buffer`, a contiguous uint8 tensor. Messages arrive in order."""

    def close(self) -> None:
        """Tear down without waiting for peers."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
