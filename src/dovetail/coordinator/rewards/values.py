"""What a reward function may return, and how its errors are described. It imports only the standard library, because
workers import it first."""

from __future__ import annotations

import functools
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

FRAMES = 3
MESSAGE_CHARACTERS = 500


class WrongRewards(ValueError):
    """A function returned something that cannot be used. The message continues a sentence that begins with the
    function's name."""


def checked(result: Any, count: int) -> list[float]:
    """`result` as `count` finite floats. Takes lists, tuples, arrays and tensors. Raises WrongRewards."""
    kind = type(result).__name__
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | dict | set | frozenset) or not isinstance(result, Iterable):
        raise WrongRewards(f"returned a {kind}; return a list with one number for each response")
    values = list(result)
    if len(values) != count:
        raise WrongRewards(f"returned {len(values)} rewards for {count} responses; return one for each")
    return [_number(value, position) for position, value in enumerate(values)]


def _number(value: Any, position: int) -> float:
    if isinstance(value, str | bytes) or (not hasattr(value, "__float__") and not hasattr(value, "__index__")):
        raise WrongRewards(f"returned {_short(value)} ({type(value).__name__}) for response {position}; return numbers")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongRewards(f"returned {_short(value)} for response {position}: {error}") from error
    if not math.isfinite(number):
        raise WrongRewards(f"returned {number} for response {position}; return finite numbers")
    return number


def _short(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """The text without line breaks, cut if it is too long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MESSAGE_CHARACTERS else f"{flat[: MESSAGE_CHARACTERS - 3]}..."


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """The `file` and `line` of a function, and the value of its attribute `needs` (None without one). Raises ValueError
    if `needs` is neither Sample nor Group."""
    needs = getattr(function, "needs", None)
    if needs not in (None, "Sample", "Group"):
        raise ValueError(f"its attribute `needs` is {needs!r}; write 'Sample' or 'Group'")
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not hasattr(inner, "__code__"):
        inner = type(inner).__call__
    code = getattr(inner, "__code__", None)
    return {
        "file": None if code is None else code.co_filename,
        "line": None if code is None else code.co_firstlineno,
        "needs": needs,
    }


def raised(error: BaseException, own: Iterable[str]) -> dict[str, Any]:
    """An exception as JSON: `what` it was, its last `frames`, and whether it came from `outside` (a connection, a
    file). Frames before the user's own, those of files in `own` and of asyncio, are left out."""
    own = set(own)
    found = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(found) if f.filename not in own and not _asyncio(f.filename)), len(found))
    frames = [f"{f.filename}:{f.lineno} in {f.name}" for f in found[first:]]
    if isinstance(error, SyntaxError) and error.filename:
        frames = [f"{error.filename}:{error.lineno}"]
    text = one_line(str(error))
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {"what": what, "frames": frames[-FRAMES:], "outside": isinstance(error, OSError)}


def _asyncio(file: str) -> bool:
    return os.path.basename(os.path.dirname(file)) == "asyncio"
