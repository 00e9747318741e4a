"""The values that a reward function may return, and the description of its errors. It imports only the standard
library, because workers import it first."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.user_code.user_requests import digest, one_line


class WrongRewards(ValueError):
    """A function returned a value that cannot be used. The message continues a sentence that begins with the function's
    name."""


# The steps of one response. Each has the number of characters up to its end, and its reward.
Steps = list[tuple[int, float]]


@dataclass(frozen=True)
class Returned:
    """One reward for each response. `steps` has the steps of each response. It is None if the function gave none."""

    rewards: list[float]
    steps: list[Steps] | None = None


def checked(result: Any, responses: Sequence[str]) -> Returned:
    """Check `result` and convert it to one finite float for each response. It may be a list, tuple, array or tensor. A
    response may have {"reward": number, "steps": [[end, number], ...]} in place of a number. Raises WrongRewards."""
    count = len(responses)
    kind = type(result).__name__
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | dict | set | frozenset) or not isinstance(result, Iterable):
        raise WrongRewards(f"returned a {kind}; return a list with one number for each response")
    values = list(result)
    if len(values) != count:
        raise WrongRewards(f"returned {len(values)} rewards for {count} responses; return one for each")
    if not any(isinstance(value, dict) for value in values):
        return Returned([_number(value, position) for position, value in enumerate(values)])
    rewards: list[float] = []
    steps: list[Steps] = []
    for position, (value, response) in enumerate(zip(values, responses, strict=True)):
        of_response = value if isinstance(value, dict) else {"reward": value}
        if unknown := sorted(map(str, of_response.keys() - {"reward", "steps"})):
            raise WrongRewards(f"returned {unknown[0]!r} for response {position}; an object has reward and steps")
        rewards.append(_number(of_response.get("reward", 0.0), position))
        steps.append(_steps(of_response.get("steps", ()), len(response), position))
    return Returned(rewards, steps)


def _steps(marks: Any, characters: int, position: int) -> Steps:
    """The steps of a response, ordered by their ends. Raises WrongRewards."""
    if isinstance(marks, str | bytes | dict) or not isinstance(marks, Iterable):
        raise WrongRewards(
            f"returned steps as {type(marks).__name__} for response {position}; return [[end, reward], ...]"
        )
    found = []
    for mark in marks:
        if isinstance(mark, str | bytes) or not isinstance(mark, Sequence) or len(mark) != 2:
            raise WrongRewards(f"returned step {_short(mark)} for response {position}; return [end, reward]")
        end, reward = mark
        if isinstance(end, bool) or not hasattr(end, "__index__") or not 1 <= int(end) <= characters:
            raise WrongRewards(
                f"returned a step that ends at {_short(end)} for response {position}; its {characters} characters "
                "count from 1"
            )
        found.append((int(end), _number(reward, position)))
    return sorted(found, key=lambda step: step[0])


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


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """The `file` and `line` of a function, the `digest` of the file (SHA-256), the value of its attribute `needs`, and
    whether it has a parameter `raw`. `digest` is None if the file cannot be read, and `needs` is None without the
    attribute. Raises ValueError if `needs` is neither Sample nor Group."""
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
        "digest": None if code is None else digest(code.co_filename),
        "needs": needs,
        "raw": _takes_raw(function),
    }


def _takes_raw(function: Callable[..., Any]) -> bool:
    try:
        found = inspect.signature(function).parameters.get("raw")
    except (TypeError, ValueError):  # a function in C
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)
