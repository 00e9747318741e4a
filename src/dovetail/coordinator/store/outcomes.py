"""Keeps what became of every sample, when the samples themselves are deleted: 24 bytes each, before compression."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.database import Database
from dovetail.coordinator.store.episodes import AskedEpisode
from dovetail.coordinator.store.samples import Sample
from dovetail.protocol.wire import Array

# `prompt` is the position in the iteration. `text` is `text_of` of the prompt's tokens. `reward` is the score that was
# trained on.
ROW = np.dtype(
    [("prompt", "<i4"), ("text", "<u8"), ("prompt_tokens", "<i4"), ("response_tokens", "<i4"), ("reward", "<f4")]
)
Rows = NDArray[np.void]


class Fate(StrEnum):
    TRAINED = "trained"
    # Dynamic sampling replaced the prompt, because all its samples had the same reward.
    EQUAL_REWARDS = "equal_rewards"
    # The trainers' result could not be trusted. The run ended, and a resume draws and trains the iteration again.
    DISCARDED = "discarded"
    # The model or the environment failed the episode.
    EPISODE_DISCARDED = "episode_discarded"
    # The advantage compares the episodes of a prompt, and all others of this prompt were discarded.
    ALONE = "alone"


@dataclass(frozen=True)
class FatePart:
    """Samples of an iteration that have the same outcome. `rows` is (N,) ROW. Those of an episode have the prompt that
    the episode was asked for. A discarded one has no tokens and no reward. `cause` says in a word or two what it failed
    by."""

    iteration: int
    outcome: Fate
    rows: Rows
    cause: str = ""

    @property
    def name(self) -> str:
        """The outcome with its cause."""
        return f"{self.outcome}: {self.cause}" if self.cause else self.outcome.value


class BatchOutcome(NamedTuple):
    """What becomes of a batch. `parts` has all its samples. `counts` is {} unless these are episodes. It has the
    `branches` that are trained, the `calls` of tools, also those of discarded episodes, and those of them that are
    `unanswered`. The model wrote `kept_tokens` in the episodes, and `lost_tokens` in attempts that are not trained."""

    parts: Sequence[FatePart]
    counts: Mapping[str, int]


def counts_key(iteration: int) -> str:
    """The store's key of `BatchOutcome.counts`."""
    return f"ppo/{iteration}/episodes"


def text_of(tokens: Iterable[int] | NDArray[np.int32]) -> int:
    """A number of 64 bits that stands for a prompt's tokens."""
    content = np.ascontiguousarray(tokens, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def trained_rows(arrays: Mapping[str, Array]) -> Rows:
    """The rows of a batch, (N,) ROW. `arrays` are those of docs/architecture.md, "Batches", ppo."""
    found = np.zeros(len(arrays["scores"]), ROW)
    lengths = arrays["prompt_lengths"]
    found["prompt"], found["prompt_tokens"], found["reward"] = arrays["groups"], lengths, arrays["scores"]
    found["response_tokens"] = arrays["response_lengths"]
    found["text"] = [text_of(row[:length]) for row, length in zip(arrays["tokens"], lengths.tolist(), strict=True)]
    return found


def sample_rows(samples: Sequence[Sample]) -> Rows:
    """The rows of scored samples, (N,) ROW."""
    found = [(s.key.prompt, text_of(s.prompt_tokens), len(s.prompt_tokens), len(s.tokens), s.reward) for s in samples]
    return np.array(found, ROW)


def batch_parts(iteration: int, arrays: Mapping[str, Array], episodes: Sequence[AskedEpisode] = ()) -> list[FatePart]:
    """What becomes of the samples of a batch. `episodes` has all of the iteration, if its samples are episodes."""
    rows = trained_rows(arrays)
    if not episodes:
        return [FatePart(iteration, Fate.TRAINED, rows)]
    asked = {each.prompt: (text_of(each.tokens), len(each.tokens)) for each in episodes}
    fates: list[tuple[Fate, str]] = []
    for row, learnt in zip(rows, arrays["learnt"], strict=True):
        fates.append((Fate.TRAINED if learnt.any() else Fate.ALONE, ""))
        if row["prompt"] < 0:  # as `experience_files.episode_arrays` marks a discarded one
            found = episodes[-1 - row["prompt"]]
            row["prompt"], fates[-1] = found.prompt, (Fate.EPISODE_DISCARDED, found.ending)
        if known := asked.get(int(row["prompt"])):
            row["text"], row["prompt_tokens"] = known
    at = {fate: [n for n, each in enumerate(fates) if each == fate] for fate in sorted(set(fates))}
    return [FatePart(iteration, fate, rows[which], cause) for (fate, cause), which in at.items()]


class Outcomes:
    """The table of outcomes. Each method is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, part: FatePart) -> None:
        with self._db.transaction() as db:
            row = (part.iteration, part.name, zlib.compress(part.rows.tobytes(), 1))
            db.execute("INSERT INTO outcomes VALUES (?,?,?)", row)

    def discard(self, iteration: int) -> None:
        """Record that what the iteration drew and trained so far does not count."""
        with self._db.transaction() as db:
            db.execute("UPDATE outcomes SET outcome=? WHERE iteration=?", (Fate.DISCARDED, iteration))

    def parts(self) -> list[FatePart]:
        """All parts, in the order of their iterations, and then in the order in which they were put. None in the store
        of an earlier release."""
        with self._db.reading() as db:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name='outcomes'").fetchone() is None:
                return []
            found = db.execute("SELECT iteration, outcome, samples FROM outcomes ORDER BY iteration, rowid").fetchall()
        return [
            FatePart(i, Fate(outcome), np.frombuffer(zlib.decompress(rows), ROW), cause)
            for i, name, rows in found
            for outcome, _, cause in [name.partition(": ")]
        ]
