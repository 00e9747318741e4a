"""Defines what all links share: their error, their deadline, and the handle of a message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
# The longest pause between two checks of a transfer, in seconds.
LONGEST_PAUSE = 0.001


class TransferError(RuntimeError):
    """A weight transfer did not complete. The message is one sentence for the user. `ranks`: the ranks for which others
    waited, if they are known."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Deadline:
    """A time limit of `seconds` that starts now. `extra` are further seconds that messages do not mention. Tests
    replace `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, extra: float = 0.0):
        self._clock = clock
        self._end = clock() + seconds + extra
        self.seconds = seconds

    def left(self, late: Callable[[], Iterable[int]] = list) -> timedelta:
        """The time that is left, at least 50 ms. Raises TransferError if none is left. The error has the ranks that
        `late` gives."""
        left = self._end - self._clock()
        if left <= 0:
            raise TransferError(f"the weight transfer passed its deadline of {self.seconds:g} s", late())
        return timedelta(seconds=max(left, 0.05))


def in_time(work: Callable[[], T], seconds: float, late: str) -> T:
    """The result of `work`, a call that takes no deadline of its own. After `seconds` it raises TransferError with the
    sentence `late`, and leaves the call behind in its thread. A store whose process is frozen, or whose node is gone,
    never answers."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="dovetail-transfer", daemon=True).start()
    wait([future], seconds)
    if not future.done():
        raise TransferError(late)
    return future.result()


class Handle(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Wait until the message is through. Raises TransferError if that takes too long."""


class Link(Protocol):
    """Carries a sender's messages to some of its receivers. After its first error it can no longer be used."""

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> Handle:
        """Start sending or receiving `buffer`, a contiguous uint8 tensor. Messages arrive in order."""

    def close(self) -> None:
        """Close the link without waiting for peers."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text. Without a text it is the name of the error's class."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
