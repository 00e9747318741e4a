"""Seconds since the epoch that never jump: when somebody sets the machine's clock, spans and durations stay right."""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """As of this process: the time at its start, and the monotonic seconds since."""
    return _EPOCH + time.monotonic()
