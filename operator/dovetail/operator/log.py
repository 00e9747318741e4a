"""Writes a structured log with one JSON line per event to stderr. kopf's own lines have the same form."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

Level = Literal["info", "warning", "error"]


def log(event: str, *, level: Level = "info", **fields: Any) -> None:
    """Write one event. `fields` say what the event is about. `job` is namespace/name."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": at, "level": level, "process": "operator", "event": event, **fields}
    print(json.dumps(line, default=str), file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    """Formats the log records of libraries. The logger's name is the event."""

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        more = {}
        if record.exc_info and record.exc_info[1] is not None:
            more["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        log(
            record.name,
            level="info" if record.levelno < logging.WARNING else level,
            message=record.getMessage(),
            **more,
        )


def log_libraries() -> None:
    """Write warnings and errors of kopf and other libraries as lines of this log."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines()], force=True)
