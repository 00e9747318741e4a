"""Audits a run from its folder: the store's record, the batches that are still kept, and the data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import ValidationError

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import Prepared, prompts_of_run
from dovetail.coordinator.loop.experience_maker import IterationPrompts
from dovetail.coordinator.reporting.audit import Audit, audit
from dovetail.coordinator.store.database import ReadOnlyDatabase, StoreError
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.outcomes import ROW, Fate, FatePart, Outcomes, text_of, trained_rows
from dovetail.coordinator.store.store import KeyValues, Store
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.wire import unpack
from dovetail.tools.rollout_dumps import Dumped, key, read_dump


@dataclass(frozen=True)
class RunAudit:
    """`texts` has the text of each prompt that the manifest asks for, by the number that stands for its tokens.
    `unread` says why the data was not read again, and is empty if it was. `batches` has the iterations whose stored
    batch was compared. `known` is the number of different prompts in the data. `disturbed` has what happened to the
    run's processes, and how often."""

    found: Audit
    texts: Mapping[int, str]
    unread: str
    batches: Sequence[int]
    known: int | None
    disturbed: Mapping[str, int]


def read_prompts(run_dir: Path) -> tuple[RLHFJob, KeyValues, list[FatePart]]:
    """The job of a run, its records, and the outcomes of its samples. Raises UsageError for a folder without a run of
    PPO, and RunError if files are damaged."""
    try:
        job = RLHFJob.model_validate_json((run_dir / "job.json").read_text(encoding="utf-8"))
        database = ReadOnlyDatabase(run_dir / "store.sqlite")
        parts = Outcomes(database).parts()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{run_dir} is no run directory: it has no job.json") from error
    except (OSError, ValidationError, StoreError) as error:
        raise RunError(f"{run_dir} cannot be read: {error}") from error
    if Stage.PPO not in job.spec.stages:
        raise UsageError(f"{run_dir} draws no samples: its stages are {', '.join(job.spec.stages)}")
    return job, KeyValues(database), parts


def audit_run(run_dir: Path) -> RunAudit:
    """Audit a run, which may be at work. Raises the errors of `read_prompts`."""
    job, records, parts = read_prompts(run_dir)
    texts: dict[int, str] = {}
    known: int | None = None
    unread = ""
    try:
        prepared = prompts_of_run(job.spec, run_dir, records.get("data/sources") or {})

        def expected(iteration: int) -> list[int]:
            numbers = []
            for text, tokens in manifest_prompts(prepared, records, iteration):
                numbers.append(text_of(tokens))
                texts[numbers[-1]] = text
            return numbers

        found = audit(job.spec, records.get, parts, expected)
        assert prepared.data.prompts is not None
        known = len({hash(record.prompt) for record in prepared.data.prompts.training_records()})
    except (DataError, OSError) as error:
        found, unread = audit(job.spec, records.get, parts), str(error)
    batches, damaged = _batches(run_dir, records, found)
    found = replace(found, problems=[*found.problems, *damaged])
    return RunAudit(found, texts, unread, batches, known, _disturbed(run_dir))


def manifest_prompts(prepared: Prepared, records: KeyValues, iteration: int) -> Iterable[tuple[str, list[int]]]:
    """The (text, token ids) of the prompts that the manifest gives an iteration, by position. Dynamic sampling's
    further prompts follow the first ones."""
    spec = prepared.spec.ppo
    drawn = IterationPrompts(
        iteration,
        prepared.prompts(iteration),
        cast(Store, records),  # only `get` is called
        lambda position, prompt: [],
        spec.dynamic_sampling,
        lambda number, count, known: prepared.further_prompts(iteration, number, count, known),
    )
    return ((record.text, record.token_ids) for record in drawn.records)


def undisturbed(path: Path) -> dict[str, Dumped]:
    """The prompts that should have been trained: those of a run's data, or those in the dump of an undisturbed run.
    Raises UsageError, and RunError for data that is not there any more."""
    if not (path / "job.json").is_file():
        return read_dump(path)
    job, records, _ = read_prompts(path)
    try:
        prompts = prompts_of_run(job.spec, path, records.get("data/sources") or {}).data.prompts
        assert prompts is not None
        return {key(record.prompt): Dumped(record.prompt, {0}) for record in prompts.training_records()}
    except (DataError, OSError) as error:
        raise RunError(f"the prompts of {path} cannot be read again: {error}") from error


def _batches(run_dir: Path, records: KeyValues, found: Audit) -> tuple[list[int], list[str]]:
    """The iterations whose stored batch was compared with the record, and a sentence on each that differs."""
    files, compared, problems = ExperienceFiles(run_dir), list[int](), list[str]()
    for part in found.parts:
        if part.outcome is not Fate.TRAINED or not files.has(part.iteration):
            continue
        compared.append(part.iteration)
        try:
            batch = unpack(files.read(part.iteration, records.get(f"ppo/{part.iteration}/batch")))
        except ValueError as error:
            problems.append(str(error))
            continue
        # An episode's record has the prompt that was asked for, and its batch has the one that the model saw.
        columns = ["prompt", "response_tokens", "reward"] if "learnt" in batch else list(ROW.names or ())
        rows = trained_rows(batch)
        trained = rows[batch["learnt"].any(axis=1)] if "learnt" in batch else rows
        if not np.array_equal(trained[columns], part.rows[columns]):
            problems.append(f"iteration {part.iteration}: the stored batch has other samples than the record")
    return compared, problems


# What events.jsonl calls them, and how they are counted in a table.
_EVENTS = {
    "coordinator.ready": "starts of the coordinator",
    "trainers.formed": "times that all trainers joined",
    "instance.registered": "starts of rollouts and scorers",
    "sample.moved": "moves of samples to other servers",
    "sample.retried": "requests for samples that failed",
    "checkpoint.damaged": "damaged checkpoints",
}


def _disturbed(run_dir: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    try:
        with (run_dir / "events.jsonl").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line).get("event")
                except (ValueError, AttributeError):
                    continue  # the last line of a run at work
                counts[event] += event in _EVENTS
    except OSError:
        return {}
    return {name: counts[event] for event, name in _EVENTS.items() if counts[event]}
