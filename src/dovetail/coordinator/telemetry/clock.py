"""Seconds since the epoch that never jump, so that spans and durations stay right when somebody sets the machine's
clock."""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """The time at the start of this process plus the monotonic seconds since then."""
    return _EPOCH + time.monotonic()
