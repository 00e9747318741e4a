"""Loads the functions that a manifest names as `module:callable`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

# A function that goes on although its call was interrupted ends its process after so many seconds.
INTERRUPTED_SECONDS = 10.0
# Users' functions have their own SIGALRM.
LATE = signal.SIGRTMIN


class FunctionError(ValueError):
    """A function that the manifest names failed. The message is one sentence with the field, the function and what it
    did."""

    @classmethod
    def raised(cls, field: str, name: str, error: Exception) -> Self:
        """The error of a function that raised an exception. It has the exception's first line and the place in the
        user's code."""
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if frame.filename != __file__]
        at = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return cls(f"{field}: {name} raised {what}{at}")


@contextmanager
def time_limit(seconds: float, field: str, name: str) -> Iterator[None]:
    """Raises TimeoutError where the block stands after `seconds`. A block that goes on nevertheless, or that stands in
    C code, ends the process with 2 and one sentence on stderr. Only the main thread can be interrupted. Other threads
    have no limit, nor has a process whose function a debugger may stop."""
    main = threading.main_thread()
    if threading.current_thread() is not main or "debugpy" in sys.modules:
        yield
        return
    what = f"did not return within {seconds:g} s (spec.ppo.timeoutSeconds)"
    over = threading.Event()

    def late(_: int, __: FrameType | None) -> None:
        if not over.is_set():
            raise TimeoutError(what)

    def watch() -> None:
        if over.wait(seconds):
            return
        assert main.ident is not None
        signal.pthread_kill(main.ident, LATE)
        if not over.wait(INTERRUPTED_SECONDS):
            os.write(2, f"{field}: {name} {what}, and could not be interrupted\n".encode())
            os._exit(2)

    before = signal.signal(LATE, late)
    guard = threading.Thread(target=watch, daemon=True)
    guard.start()
    try:
        yield
    finally:
        over.set()
        guard.join()
        signal.signal(LATE, before)


def load_callable(name: str, field: str, folder: str | None = None) -> Callable[..., Any]:
    """The function that the manifest's `field` names. Its module is searched in `folder` first. If that is None, it is
    searched in the current directory first.

    Raises ValueError with one sentence that names the field and what is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{field}: {name!r} must have the form module:callable")
    folder = folder or os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ValueError(
            f"{field}: cannot import {module_name!r} of {name!r}: {error}; is it on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{field}: module {module_name!r} has no {attribute!r}, wanted by {name!r}") from error
    if not callable(function):
        raise ValueError(f"{field}: {name!r} is not callable")
    return function  # type: ignore[no-any-return]
