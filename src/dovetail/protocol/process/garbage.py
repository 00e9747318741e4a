"""How often a process looks for garbage."""

from __future__ import annotations

import gc

# So many objects more than were freed, before the youngest are looked at. Python's own number is 700.
YOUNGEST = 20_000


def keep_what_is_here(youngest: int = YOUNGEST, older: int = 10) -> None:
    """Never look for garbage among the objects that there are, and less often among later ones. Call it when a process
    has what it keeps, such as modules and data. One look at these takes tenths of a second, and a process that begins
    thousands of tasks at once looks often."""
    gc.freeze()
    gc.set_threshold(youngest, older, older)
