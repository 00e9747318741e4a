"""What a run computed, as facts that do not depend on when, where and how fast it ran, and how two runs differ.
`dovetail debug diff` and `make same-bits` use it."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.coordinator.store.database import ReadOnlyDatabase
from dovetail.coordinator.store.outcomes import Outcomes
from dovetail.protocol.wire import Array, unpack

STAGES = {stage: number for number, stage in enumerate(("sft", "reward", "ppo"), start=1)}
HASH = "sha256:"
STEPS = {"sft": "SFT step", "reward": "reward model step", "ppo": "PPO iteration"}
# Names of what is measured, and of who did the work.
MEASURED = re.compile(
    r"seconds|per_second|_peak_bytes$|^(began|times?|rollout|instance|incarnation|attempt|"
    r"assignments|run)$"
)
# Records that are times of clocks or files, that exist in a number that depends on them, or that are cut to them, as
# pipeline schedules are.
UNSTEADY = re.compile(
    r"^(job/seconds|run/id|folders/.*|store/.*|trainers/generation|fact/(stages\..*|fusion|versions)|ppo/fusion.*|ppo/totals|"
    r".*/began|\w+/schedules|result/(?!\w+/\d+/step$).*)$"
)


class Fact(NamedTuple):
    """`when`: (stage, step, order in the step), which sorts facts by the time at which a run knows them. `kind` and
    `what`: of what, such as "weights" and "weights of the actor after PPO iteration 2". `item`: a tensor, a metric or
    a column. `value`: a number or the beginning of a hash."""

    when: tuple[int, int, int]
    kind: str
    what: str
    item: str
    value: str

    @property
    def place(self) -> tuple[str, str]:
        return self.what, self.item


def read_facts(run: Path) -> list[Fact]:
    """Of a run that is not at work, in order of time. Raises OSError and ValueError for a folder without a whole
    run."""
    readers = (_documents, _history, _texts, _store, _outcomes, _batches, _checkpoints, _models)
    return sorted((fact for read in readers for fact in read(run)), key=lambda fact: (fact.when, fact.what))


def differences(one: Iterable[Fact], other: Iterable[Fact]) -> list[tuple[Fact | None, Fact | None]]:
    """The facts that differ, in order of time. A fact that one of them lacks is None there."""
    old, new = ({fact.place: fact for fact in facts} for facts in (one, other))
    pairs = ((old.get(place), new.get(place)) for place in {**old, **new})
    found = [(a, b) for a, b in pairs if a is None or b is None or a.value != b.value]
    return sorted(found, key=lambda pair: next(fact.when for fact in pair if fact is not None))


def difference(base: Iterable[Fact], now: Iterable[Fact]) -> str | None:
    """One sentence that names the first difference of each kind, the earliest first. None if all facts are equal."""
    old, new = ({fact.place: fact for fact in facts} for facts in (base, now))
    places = [place for place in {**old, **new} if _value(old, place) != _value(new, place)]
    if not places:
        return None
    different = sorted((new.get(place) or old[place] for place in places), key=lambda fact: fact.when)
    first = {fact.kind: fact for fact in reversed(different)}
    told = [
        f"{fact.what}: {fact.item} {_differs(_value(old, fact.place), _value(new, fact.place))}"
        for fact in sorted(first.values(), key=lambda fact: fact.when)
    ]
    return f"{'; then '.join(told)} ({len(places)} of {len(old.keys() | new.keys())} facts differ)"


def _differs(old: str, new: str) -> str:
    hashed = old.startswith(HASH) and new.startswith(HASH)
    return "differs" if hashed else f"is {old} at BASE and {new} now"


def _value(facts: dict[tuple[str, str], Fact], place: tuple[str, str]) -> str:
    return facts[place].value if place in facts else "missing"


def _steady(value: Any) -> Any:
    """The value without what is measured."""
    if isinstance(value, dict):
        return {name: _steady(each) for name, each in value.items() if not MEASURED.search(name)}
    return [_steady(each) for each in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = json.dumps(_steady(value), sort_keys=True)
    return text if len(text) <= 40 else _hash(text.encode())


def _hash(content: bytes) -> str:
    return f"{HASH}{hashlib.sha256(content).hexdigest()[:12]}"


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _anywhere(run: Path, text: str) -> Any:
    """A document without the path of the job's folder, which is the run's parent."""
    return json.loads(text.replace(str(run.resolve().parent), "FOLDER"))


def _documents(run: Path) -> Iterator[Fact]:
    for name in ("job.json", "plan.json"):
        for path, value in _leaves(_anywhere(run, (run / name).read_text(encoding="utf-8"))):
            yield Fact((0, 0, 0), name, name, path, _shown(value))


def _history(run: Path) -> Iterator[Fact]:
    for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        when = (STAGES.get(row["stage"], STAGES["ppo"]), row["step"], 3)
        for metric, value in _steady(row["metrics"]).items():
            yield Fact(when, "history", f"history row {row['stage']} {row['step']}", metric, _shown(value))


def _texts(run: Path) -> Iterator[Fact]:
    """The samples as text."""
    for path in sorted((run / "samples").glob("*.jsonl")):
        number = path.stem.rpartition("-")[2]
        step = int(number) if number.isdecimal() else 0
        for item, row in text_rows(path).items():
            yield Fact((STAGES["ppo"], step, 1), "samples", f"samples/{path.name}", item, _shown(row))


def text_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a samples file, without what is measured, by the names of their samples."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {f"prompt {row['prompt_index']}, sample {row.get('sample_index', 0)}": _steady(row) for row in rows}


def _store(run: Path) -> Iterator[Fact]:
    keys = {"iteration", "prompt_index", "sample_index"}
    with closing(sqlite3.connect(f"file:{run / 'store.sqlite'}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
        for table in tables:
            rows = [dict(row) for row in database.execute(f"SELECT * FROM {table}")]
            if table == "outcomes":  # `_outcomes`
                continue
            if table == "kv":
                for row in rows:
                    if not UNSTEADY.match(row["key"]):
                        value = _anywhere(run, row["value"])
                        if row["key"].endswith("/facts"):
                            value.pop("schedule", None)
                        yield Fact(_when(row["key"]), "store", "store row of kv", row["key"], _shown(value))
                continue
            for row in rows:
                place = ", ".join(f"{key.removesuffix('_index')} {row[key]}" for key in row if key in keys)
                for column in sorted(_steady(row).keys() - keys):
                    value = row[column]
                    item = f"{column} at {place}" if table != "steps" else f"{row['function']}'s {column} at {place}"
                    shown = _hash(value) if isinstance(value, bytes) else _shown(value)
                    yield Fact((STAGES["ppo"], row["iteration"], 0), "store", f"store rows of {table}", item, shown)


# What an iteration computes for a sample, in the order in which one follows from the other.
COLUMNS = {
    "prompt": "prompt",
    "response": "sampled tokens",
    "rollout_logprobs": "log-probabilities",
    "ref_logprobs": "log-probabilities under the reference",
    "values": "values",
    "scores": "scores",
    "advantages": "advantages",
}


def sample_columns(arrays: Mapping[str, Array]) -> dict[str, list[Array]]:
    """The parts of a batch by name in COLUMNS: for each sample, an array without padding."""
    tokens, begin, length = arrays["tokens"], arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
    found: dict[str, list[Array]] = {
        "prompt": [row[:first] for row, first in zip(tokens, begin, strict=True)],
        "response": [row[first : first + n] for row, first, n in zip(tokens, begin, length, strict=True)],
    }
    for name in COLUMNS.keys() & arrays.keys():
        found[name] = [
            np.atleast_1d(row)[: n if row.ndim else None] for row, n in zip(arrays[name], length, strict=True)
        ]
    return {name: found[name] for name in COLUMNS if name in found}


def sample_names(arrays: Mapping[str, Array]) -> list[str]:
    """Which sample each row of a batch is."""
    seen: Counter[int] = Counter()
    names = []
    for prompt in arrays["groups"].tolist():
        names.append(f"prompt {prompt}, sample {seen[prompt]}")
        seen[prompt] += 1
    return names


def _batches(run: Path) -> Iterator[Fact]:
    """The batches that are kept, sample by sample."""
    for path in sorted((run / "experience").glob("*.safetensors")):
        arrays, iteration = unpack(path.read_bytes()), int(path.stem)
        names = sample_names(arrays)
        for place, (column, rows) in enumerate(sample_columns(arrays).items()):
            for name, row in zip(names, rows, strict=True):
                when = (STAGES["ppo"], iteration, place - 1 - len(COLUMNS))
                yield Fact(
                    when,
                    COLUMNS[column],
                    f"batch of iteration {iteration}",
                    f"{COLUMNS[column]} of {name}",
                    _hash(row.tobytes()),
                )


# What is known of the samples of iterations whose batches are deleted.
RECORDED = {"text": "prompts", "response_tokens": "lengths of the responses", "reward": "rewards"}


def _outcomes(run: Path) -> Iterator[Fact]:
    """What became of the samples, also of those that are deleted."""
    for part in Outcomes(ReadOnlyDatabase(run / "store.sqlite")).parts():
        what = f"record of iteration {part.iteration} ({part.outcome})"
        for column, name in RECORDED.items():
            when = (STAGES["ppo"], part.iteration, -1)
            yield Fact(when, "record", what, name, _hash(np.ascontiguousarray(part.rows[column]).tobytes()))


def _when(key: str) -> tuple[int, int, int]:
    """Of a record whose key names a stage and a step."""
    words = key.split("/")
    stage = next((STAGES[word] for word in words if word in STAGES), len(STAGES) + 1)
    return stage, next((int(word) for word in words if word.isdecimal()), 1 << 30), 4


def _checkpoints(run: Path) -> Iterator[Fact]:
    """Weights and the optimizer's moments after each iteration, whole, however they were divided."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for path in sorted((run / "checkpoints").iterdir()):
        stage, _, number = path.name.rpartition("-")
        reader = dcp.FileSystemReader(path)
        tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that one process alone reads
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        for name, tensor in tensors.items():
            model, part, tensor_name = name.split(".", 2)
            kept = "weights" if part == "parameters" else part.replace("_", " ")
            what = f"{kept} of the {model} after {STEPS[stage]} {int(number)}"
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            value = _hash(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content)
            when = (STAGES[stage], int(number), 5 if part == "parameters" else 6)
            yield Fact(when, "weights", what, f"tensor {tensor_name}", value)


def _models(run: Path) -> Iterator[Fact]:
    """Exported weights, and the files beside them."""
    for path in sorted((run / "models").rglob("*")):
        relative = path.relative_to(run / "models")
        model = relative.parts[0]
        when = (STAGES["reward" if model == "reward" else "sft" if model == "sft" else "ppo"], 1 << 29, 7)
        if path.suffix == ".safetensors":
            content = path.read_bytes()
            (length,) = struct.unpack_from("<Q", content)
            for name, about in json.loads(content[8 : 8 + length]).items():
                if name != "__metadata__":
                    begin, end = (8 + length + offset for offset in about["data_offsets"])
                    value = _hash(f"{about['dtype']}{about['shape']}".encode() + content[begin:end])
                    yield Fact(when, "weights", f"exported weights of models/{model}", f"tensor {name}", value)
        elif path.name in ("config.json", "generation_config.json", "dovetail.json"):
            for name, value in _leaves(_steady(json.loads(path.read_text(encoding="utf-8")))):
                yield Fact(when, "exported files", f"models/{relative}", name, _shown(value))
        elif path.is_file() and path.name not in ("README.md", "model.safetensors.index.json"):
            yield Fact(when, "exported files", f"models/{relative}", "content", _hash(path.read_bytes()))
