"""Keeps what became of every sample, when the samples themselves are deleted: 24 bytes each, before compression."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.database import Database
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


@dataclass(frozen=True)
class FatePart:
    """Samples of an iteration that have the same outcome. `rows` is (N,) ROW."""

    iteration: int
    outcome: Fate
    rows: Rows


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


class Outcomes:
    """The table of outcomes. Each method is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, iteration: int, outcome: Fate, rows: Rows) -> None:
        with self._db.transaction() as db:
            db.execute("INSERT INTO outcomes VALUES (?,?,?)", (iteration, outcome, zlib.compress(rows.tobytes(), 1)))

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
        return [FatePart(i, Fate(outcome), np.frombuffer(zlib.decompress(rows), ROW)) for i, outcome, rows in found]
