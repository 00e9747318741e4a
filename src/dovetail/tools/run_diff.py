"""Finds the first thing in which two runs differ, from the manifest down to a weight."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.coordinator.reporting.page.page_documents import token_texts
from dovetail.coordinator.store.database import ReadOnlyDatabase, StoreError
from dovetail.coordinator.store.store import KeyValues
from dovetail.protocol.errors import RunError
from dovetail.protocol.wire import Array, Arrays, unpack
from dovetail.tools.run_facts import (
    COLUMNS,
    HASH,
    STAGES,
    Fact,
    differences,
    read_facts,
    sample_columns,
    sample_names,
)

# The name of a run, and what follows from settings: it is said by the settings.
_SETTINGS, _FOLLOWS = "job.json", ("plan.json", "run/")
_NAMES = ("metadata.", "status")
SHOWN_TOKENS = 8


@dataclass(frozen=True)
class RunDiff:
    """`settings` says which fields of the manifest and which versions differ. `through` is the last iteration up to
    which all results that both runs keep are the same bits, and 0 if there is none. `sentence` names the first
    difference in the results, and is empty if there is none. `evidence` has lines about it."""

    settings: list[str]
    through: int
    sentence: str
    evidence: list[str]


def diff_runs(one: Path, other: Path) -> RunDiff:
    """Compare two runs that are not at work. Raises RunError for a folder that has no whole run."""
    a, b = _facts(one), _facts(other)
    pairs = differences(a, b)
    settings = [
        f"{(x or y).item}: {_shown(x)} and {_shown(y)}"  # type: ignore[union-attr]
        for x, y in pairs
        if (x or y).what == _SETTINGS and not (x or y).item.startswith(_NAMES)  # type: ignore[union-attr]
    ]
    settings += _versions(one, other)
    results = [(x, y) for x, y in pairs if x is not None and y is not None and _is_result(x)]
    common = {fact.place for fact in b}
    known = {f.when[1] for f in a if f.when[0] == STAGES["ppo"] and f.when[1] < 1 << 29 and f.place in common}
    if not results:
        return RunDiff(settings, max(known, default=0), "", [])
    x, y = results[0]
    earlier = known if x.when[0] > STAGES["ppo"] else {n for n in known if x.when[:2] > (STAGES["ppo"], n)}
    evidence = _of_batch(one, other, x) if x.what.startswith("batch of iteration") else [f"{_shown(x)} and {_shown(y)}"]
    told = f"{x.item} ({x.what}) differ{'' if x.item in COLUMNS.values() else 's'}"
    more = len({pair[0].what for pair in results}) - 1
    evidence += [f"{more} more kinds of results differ after it"] if more else []
    return RunDiff(settings, max(earlier, default=0), told, evidence)


def _facts(run: Path) -> list[Fact]:
    try:
        return read_facts(run)
    except (OSError, ValueError, KeyError, StoreError, sqlite3.Error) as error:
        raise RunError(f"{run} has no whole run: {error}") from error


def _is_result(fact: Fact) -> bool:
    return fact.what != _SETTINGS and not fact.what.startswith(_FOLLOWS) and not fact.item.startswith(_FOLLOWS)


def _shown(fact: Fact | None) -> str:
    return "missing" if fact is None else "another content" if fact.value.startswith(HASH) else fact.value


def _versions(one: Path, other: Path) -> Iterator[str]:
    a, b = (KeyValues(ReadOnlyDatabase(run / "store.sqlite")).get("fact/versions") or {} for run in (one, other))
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield f"{name}: {json.dumps(a.get(name))} and {json.dumps(b.get(name))}"


def _of_batch(one: Path, other: Path, fact: Fact) -> list[str]:
    """Lines about the first token at which a sample differs."""
    name = f"experience/{fact.when[1]:06d}.safetensors"
    a, b = (unpack((run / name).read_bytes()) for run in (one, other))
    column = next(column for column, title in COLUMNS.items() if title == fact.kind)
    sample = fact.item.removeprefix(f"{fact.kind} of ")
    rows = [sample_columns(arrays)[column][sample_names(arrays).index(sample)] for arrays in (a, b)]
    at = _first_difference(*rows)
    if at >= min(map(len, rows)):
        return [
            f"one has {len(rows[0])} tokens, the other {len(rows[1])}, and the shorter is the beginning of the longer"
        ]
    if column in ("prompt", "response"):
        texts = [_text(run, row, at) for run, row in zip((one, other), rows, strict=True)]
        return [
            f"token {at} is {rows[0][at]} and {rows[1][at]}: {texts[0]} and {texts[1]}",
            *_logprobs(a, b, sample, at, column),
        ]
    x, y = (float(row[at]) for row in rows)
    return [f"{'at token ' + str(at) if len(rows[0]) > 1 else 'it'}: {x!r} and {y!r}, a difference of {abs(x - y):.3g}"]


def _logprobs(a: Arrays, b: Arrays, sample: str, at: int, column: str) -> list[str]:
    if column == "prompt":
        return []
    values = (sample_columns(arrays)["rollout_logprobs"][sample_names(arrays).index(sample)][at] for arrays in (a, b))
    x, y = (float(value) for value in values)
    return [f"the log-probabilities of these tokens when they were sampled: {x:.6f} and {y:.6f} nats"]


def _first_difference(a: Array, b: Array) -> int:
    """The first place at which two rows differ, bit for bit; the length of the shorter one if there is none."""
    n = min(len(a), len(b))
    bytes_a, bytes_b = (np.ascontiguousarray(row[:n]).view(np.uint8).reshape(n, -1) for row in (a, b))
    found = np.flatnonzero((bytes_a != bytes_b).any(axis=1))
    return int(found[0]) if len(found) else n


def _text(run: Path, row: Array, at: int) -> str:
    ids = [int(token) for token in row[max(0, at - SHOWN_TOKENS) : at + 1]]
    texts = token_texts(run, ids)
    return repr("".join(texts)) if texts is not None else "(no tokenizer)"
