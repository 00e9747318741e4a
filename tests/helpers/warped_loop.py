"""An event loop whose clock jumps to the next timer when nothing else is to be done: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class WarpedLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual. Work in threads is waited for in real time."""

    def __init__(self) -> None:
        self.skipped = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                found = super().select(0)
                if found or timeout is None or timeout <= 0:
                    return found or super().select(timeout)
                loop.skipped += timeout
                return []

        super().__init__(Selector())

    def time(self) -> float:
        return super().time() + self.skipped


def run_warped(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in such a loop."""
    with asyncio.Runner(loop_factory=WarpedLoop) as runner:
        return runner.run(work)
