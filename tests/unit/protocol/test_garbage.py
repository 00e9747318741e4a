"""Garbage: what a process keeps is looked at no more, and what it drops later is still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dovetail.protocol.process.garbage import YOUNGEST, keep_what_is_here


class Circle:
    """It is garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_here_is_kept_and_later_garbage_is_found() -> None:
    circle = Circle()
    kept = weakref.ref(circle)
    del circle
    keep_what_is_here()
    later = weakref.ref(Circle())
    assert later() is not None, "the youngest are looked at less often"
    made = [[] for _ in range(3 * YOUNGEST)]
    assert later() is None
    assert kept() is not None
    assert len(made) == 3 * YOUNGEST
