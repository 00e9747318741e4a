"""Errors in a user's data or model sources."""

from __future__ import annotations


class DataError(ValueError):
    """An error in the user's data. The message is one sentence that names the field or file, what it contains, and what
    to do."""
