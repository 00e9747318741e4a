"""Checks that the extras which a command needs are installed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import Extra, is_installed, missing_extras


def require(what: str, extras: Collection[Extra], installed: Callable[[str], bool] = is_installed) -> None:
    """Check that `extras` are installed. `what`: who needs them, for example "dovetail run". Raises UsageError (exit
    code 2) with one sentence that names the missing extras and the command that installs them."""
    if sentence := missing_extras(what, extras, installed):
        raise UsageError(sentence)
