"""Finds the first thing in which two runs differ, from the manifest down to a weight."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.reporting.page.page_documents import token_texts
from dovetail.coordinator.store.database import ReadOnlyDatabase, StoreError
from dovetail.coordinator.store.store import KeyValues
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.wire import Array, Arrays, unpack
from dovetail.tools.checkpoint_export import policy, read_job
from dovetail.tools.run_facts import (
    COLUMNS,
    HASH,
    STAGES,
    Fact,
    differences,
    read_facts,
    sample_columns,
    sample_names,
    text_rows,
)

# The name of a run, and what follows from settings: it is said by the settings.
_SETTINGS, _FOLLOWS = "job.json", ("plan.json", "run/")
_NAMES = ("metadata.", "status")
SHOWN_TOKENS = 8
SHOWN_CHARACTERS = 24


@dataclass(frozen=True)
class RunDiff:
    """`settings` says which fields of the manifest and which versions differ. `through` is the last iteration up to
    which all results that both runs keep are the same bits, and 0 if there is none. `sentence` names the first
    difference in the results, and is empty if there is none. `evidence` has lines about it."""

    settings: list[str]
    through: int
    sentence: str
    evidence: list[str]


def diff_runs(one: Path, other: Path, layers: bool = False) -> RunDiff:
    """Compare two runs that are not at work. `layers`: where they first differ in how likely a token was, run both
    models on this machine, and name the first layer that differs. Raises RunError for a folder without a whole run."""
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
    if x.what.startswith("batch of iteration"):
        evidence = _of_batch(one, other, x, layers)
    else:
        evidence = _of_texts(one, other, x) if x.kind == "samples" else [f"{_shown(x)} and {_shown(y)}"]
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


def _of_texts(one: Path, other: Path, fact: Fact) -> list[str]:
    """A line for each field of a kept text that differs."""
    a, b = (text_rows(run / fact.what)[fact.item] for run in (one, other))
    return [f"{name}: {_around(a[name], b.get(name))}" for name in a if a[name] != b.get(name)]


def _around(a: object, b: object) -> str:
    """Two values, long ones only where they differ first."""
    texts = [str(each) for each in (a, b)]
    at = next((n for n, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
    begin = max(0, at - SHOWN_CHARACTERS)
    shown = [repr(text[begin:][: 2 * SHOWN_CHARACTERS]) if isinstance(a, str) else text for text in texts]
    return " and ".join(shown)


def _versions(one: Path, other: Path) -> Iterator[str]:
    a, b = (KeyValues(ReadOnlyDatabase(run / "store.sqlite")).get("fact/versions") or {} for run in (one, other))
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield f"{name}: {json.dumps(a.get(name))} and {json.dumps(b.get(name))}"


def _of_batch(one: Path, other: Path, fact: Fact, layers: bool) -> list[str]:
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
    deep = list[str]()
    if layers and column in ("response", "rollout_logprobs"):
        prompt, response = (
            sample_columns(a)[name][sample_names(a).index(sample)].tolist() for name in ("prompt", "response")
        )
        deep = first_layer(one, other, fact.when[1], [*prompt, *response[: at + 1]])
    if column in ("prompt", "response"):
        texts = [_text(run, row, at) for run, row in zip((one, other), rows, strict=True)]
        return [
            f"token {at} is {rows[0][at]} and {rows[1][at]}: {texts[0]} and {texts[1]}",
            *_logprobs(a, b, sample, at, column),
            *deep,
        ]
    x, y = (float(row[at]) for row in rows)
    where = f"at token {at}" if len(rows[0]) > 1 else "it"
    return [f"{where}: {x!r} and {y!r}, a difference of {abs(x - y):.3g}", *deep]


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


def first_layer(one: Path, other: Path, iteration: int, tokens: Sequence[int]) -> list[str]:
    """A line on the first layer that computes the last token otherwise with the weights of the other run. Both compute
    it here, with the weights that drew the samples of `iteration`."""
    try:
        runs = [_run_layers(run, iteration, tokens) for run in (one, other)]
    except (UsageError, RunError, DataError, OSError) as error:
        return [f"the layer is not known: {error}"]
    (a, chance_a), (b, chance_b) = runs
    names = ["the embedding", *(f"layer {number}" for number in range(len(a) - 1))]
    for name, x, y in zip(names, a, b, strict=False):
        if x.shape != y.shape or not bool((x == y).all()):
            told = f", by up to {float(abs(x - y).max()):.3g}" if x.shape == y.shape else ""
            return [
                f"computed on this machine with the weights of each run, {name} is the first that differs{told}; the "
                f"first run's token has {chance_a:.6f} and {chance_b:.6f} nats"
            ]
    return [
        f"computed on this machine, all {len(a) - 1} layers have the same bits with the weights of both runs, and the "
        f"first run's token has {chance_a:.6f} nats: machines, kernels or versions differ, not the weights"
    ]


def _run_layers(run: Path, iteration: int, tokens: Sequence[int]) -> tuple[list[Any], float]:
    """What the embedding and each layer return for the last token's place, and the log-probability of the last token
    at the job's temperature, in nats. Raises UsageError, RunError, DataError and OSError."""
    import torch
    from transformers import AutoModelForCausalLM

    spec = read_job(run).spec
    lag = json.loads((run / "plan.json").read_text(encoding="utf-8")).get("lag") or 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = policy(run, iteration - 1 - lag, Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.inference_mode():
        found = model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    chances = torch.log_softmax(found.logits[0, -1].float() / (spec.generation.temperature or 1.0), dim=-1)
    return [state[0, -1].float() for state in found.hidden_states], float(chances[tokens[-1]])
