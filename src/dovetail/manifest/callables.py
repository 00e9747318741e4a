"""Loads the functions that a manifest names as `module:callable`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Self


class FunctionError(ValueError):
    """A function that the manifest names failed. The message is one sentence with the field, the function and what it
    did."""

    @classmethod
    def raised(cls, field: str, name: str, error: Exception) -> Self:
        """The error of a function that raised an exception. It has the exception's first line and the place in the
        user's code."""
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)[1:]
        at = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return cls(f"{field}: {name} raised {what}{at}")


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
