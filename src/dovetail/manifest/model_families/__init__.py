"""The families of causal language models that Dovetail trains. `MODEL_FAMILIES` is their only list.

`make families` writes the table. It derives a family's facts from transformers and proves them on a small copy
(`hack/families.py`). It is read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.manifest.model_families.family import Experts, Kind, LinearPart, ModelFamily

__all__ = ["MADE", "MODEL_FAMILIES", "MODEL_TYPES", "TABLE", "Experts", "Kind", "LinearPart", "ModelFamily"]

TABLE = Path(__file__).with_name("families.json")


def _family(row: Mapping[str, Any]) -> ModelFamily:
    sequences = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    linears = tuple(LinearPart(*part) for part in row["linears"])
    experts = None
    if (told := row.get("experts")) is not None:
        lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
        experts = Experts(**{**told, **lists})
    kinds = tuple(
        Kind(**{**kind, "at": tuple(kind["at"]), "kept": tuple(kind["kept"])}) for kind in row.get("kinds", ())
    )
    kept = {n: _tuples(row[n]) for n in ("kept", "kept_dense", "kept_linear", "matrices") if n in row}
    return ModelFamily(**{**row, **sequences, **kept, "linears": linears, "experts": experts, "kinds": kinds})


def _tuples(lists: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(values) for name, values in lists.items()}


_table = json.loads(TABLE.read_text()) if TABLE.is_file() else {"made": {}, "families": [], "refused": {}}
# The families by name, and why other types of transformers are not trained.
MODEL_FAMILIES: dict[str, ModelFamily] = {row["name"]: _family(row) for row in _table["families"]}
# The values of `model_type` in config.json.
MODEL_TYPES = tuple(dict.fromkeys(family.model_type for family in MODEL_FAMILIES.values()))
REFUSED: dict[str, str] = _table["refused"]
# The versions with which the table was made, and the day.
MADE: dict[str, str] = _table["made"]
