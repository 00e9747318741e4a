"""The description of a format of rows. `formats.py` lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.records import Record
from dovetail.coordinator.data.text.chat_template import ChatFormat
from dovetail.manifest.fixed_names import DataKind

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowFormat:
    """One format of a row. `fits` says whether a row has it (`format: Auto`). `read(row, kind, chat, where)` makes the
    record, or raises DataError whose message begins with `where`. `judged` says whether rows tell good replies from bad
    ones. Other formats give no preferences. `no_pair(row, where)` says whether a row of a judged format tells none from
    another, so that it is left out of preferences."""

    name: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, DataKind, ChatFormat, str], Record]
    judged: bool = False
    no_pair: Callable[[Row, str], bool] = lambda row, where: False
