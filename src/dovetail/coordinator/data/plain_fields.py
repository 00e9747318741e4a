"""Turns the fields of a prompt's record into JSON values. Reward functions and the files of samples get them."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any

from dovetail.coordinator.data.data_error import DataError

# Values that tables can hold and JSON cannot. A datetime is also a date, so it comes first.
_NAMES: Mapping[type, str] = {
    datetime.datetime: "a timestamp",
    datetime.date: "a date",
    datetime.time: "a time",
    datetime.timedelta: "a duration",
    bytes: "bytes",
    decimal.Decimal: "a decimal number",
}


def plain_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields, with null instead of numbers that are not finite, because JSON has no such numbers. Raises DataError
    for a field that JSON cannot hold. Its message begins with `where`."""
    return {name: _plain(value, name, where) for name, value in fields.items()}


def _plain(value: Any, name: str, where: str) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each, name, where) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, name, where) for key, each in value.items()}
    known = (what for kind, what in _NAMES.items() if isinstance(value, kind))
    what = next(known, f"of type {type(value).__name__}")
    raise DataError(f"{where}: field {name!r} is {what}; make it text")
