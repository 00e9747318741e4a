"""Errors that end a local run, each with one sentence for its user."""

from __future__ import annotations


class RunError(Exception):
    """The run could not start or has failed. The message is a sentence that says why and what to do."""


class UsageError(RunError):
    """The request itself is wrong: a bad manifest, or a run directory in use. Exit code 2."""


def error_text(error: BaseException) -> str:
    """The error's message, or the name of its class if it has none. Timeouts and cancellations often have none."""
    return str(error) or type(error).__name__


def last_line(error: BaseException) -> str:
    """The last line of the error's message, or the name of its class. There, errors of other processes and of
    transformers' configurations say what is wrong."""
    return last_said(str(error), type(error).__name__)


def last_said(text: str, otherwise: str) -> str:
    """The last line of a text, such as what a child wrote to stderr, or `otherwise` if it has none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else otherwise
