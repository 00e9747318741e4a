"""Structured log: one JSON line per event on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log(event: str, **fields: Any) -> None:
    line = {"time": round(time.time(), 3), "process": "operator", "event": event, **fields}
    print(json.dumps(line, default=str), file=sys.stderr, flush=True)
