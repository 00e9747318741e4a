"""Seconds since the epoch that never jump. So spans and durations stay right when the machine's clock is set."""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """The time in seconds since the epoch. It is the time at the start of this process plus the monotonic seconds since
    then."""
    return _EPOCH + time.monotonic()
