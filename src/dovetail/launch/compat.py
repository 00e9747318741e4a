"""Gathers the private parts of CPython that `dovetail.launch` uses.
tests/unit/local/test_compat_supervision.py fails with the name of the part that has moved."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading


def end_interpreter() -> None:
    """Wait for threads that are not daemons, run what was registered with atexit, and flush the streams.

    CPython 3.11 to 3.13 do the first two in `threading._shutdown` and `atexit._run_exitfuncs`. The public ways return
    through all frames first. A forked child must not return: it would run the code of the process that it was forked
    from. `multiprocessing` calls the same functions at the end of its forked children. Raises nothing."""
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
