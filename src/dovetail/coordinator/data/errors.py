"""What goes wrong with a user's data or model sources."""

from __future__ import annotations


class DataError(ValueError):
    """One sentence naming the field or file, what is there, and what to do."""
