"""The text of an error."""

from __future__ import annotations


def error_text(error: BaseException) -> str:
    """The error's message, or the name of its class if it has none. Timeouts and cancellations often have none."""
    return str(error) or type(error).__name__
