"""The samples of PPO iterations and their table. Each sample is generated exactly once, whatever process dies.

    pending -> generating -> generated -> scored -> in_batch -> trained
                  |  ^ migrating: its request is being ended, and it will continue on another server

Tokens are stored as they stream in. Every assignment of a sample to a server has a number (`attempt`). Tokens that an
older assignment still sends are refused, so no token is stored twice."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.database import Database, StoreError

# SQLite reads this limit as no limit.
ALL = -1
_TABLES = ("chunks", "samples", "rewards", "steps", "experts", "tool_calls", "episodes", "turn_requests", "lost_tokens")
WHERE = "iteration=? AND prompt_index=? AND sample_index=?"
# The samples of an iteration. Those below 0 are turns of episodes that are being played (`store.episodes`).
_OF = "iteration=? AND sample_index>=0"

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class State(StrEnum):
    PENDING = "pending"
    GENERATING = "generating"
    MIGRATING = "migrating"
    GENERATED = "generated"
    SCORED = "scored"
    IN_BATCH = "in_batch"
    TRAINED = "trained"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.GENERATING}),
    State.GENERATING: frozenset({State.PENDING, State.MIGRATING, State.GENERATED}),
    State.MIGRATING: frozenset({State.PENDING, State.GENERATING, State.GENERATED}),
    State.GENERATED: frozenset({State.SCORED}),
    State.SCORED: frozenset({State.IN_BATCH}),
    State.IN_BATCH: frozenset({State.TRAINED}),
    State.TRAINED: frozenset(),
}
ORDER = (State.GENERATED, State.SCORED, State.IN_BATCH, State.TRAINED)


class IllegalTransition(StoreError):
    """The sample cannot go from its state to the new one."""


class Key(NamedTuple):
    iteration: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class NewSample:
    """A sample to be drawn. `prompt_tokens` has the token ids (P,). The seed is 0 <= `seed` < 2**63. `fields` has the
    prompt record's other fields, as JSON values."""

    prompt: int
    sample: int
    prompt_tokens: Sequence[int] | Tokens
    seed: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A stored sample. `tokens` (R,) int32 and `logprobs` (R,) float32 (nats) are the response so far. It is complete
    from `generated` on.

    `instance`, `incarnation` and `attempt` describe the latest assignment. `first_version` is the version of the
    weights of the first token that was kept, and `weight_version` that of the latest assignment. They are equal unless
    the weights changed in between."""

    key: Key
    state: State
    prompt_tokens: Tokens
    seed: int
    fields: dict[str, Any]
    tokens: Tokens
    logprobs: Floats
    attempt: int = 0
    instance: str | None = None
    incarnation: str | None = None
    first_version: int | None = None
    weight_version: int | None = None
    finish_reason: str | None = None
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    reward: float | None = None
    critic_version: int | None = None

    @property
    def finished(self) -> bool:
        """Whether an end token or a stop string ended the response, and not the limit of its length."""
        return self.finish_reason == "stop"


@dataclass(frozen=True)
class Assignment:
    """Give a sample to an instance with its first `keep` response tokens. Stored tokens after these are generated
    again, because stop strings need that (`generation.migrations.StopStrings`)."""

    key: Key
    instance: str
    incarnation: str
    weight_version: int | None
    keep: int


@dataclass(frozen=True)
class Delta:
    """Response tokens from position `start` on, streamed for the assignment `attempt`. The last delta has the
    `finish_reason`. `experts` has the number of a token, counted over prompt and response, and the experts of the
    tokens from there on, as a numpy file (`store.experts`)."""

    key: Key
    attempt: int
    start: int
    tokens: Sequence[int] | Tokens
    logprobs: Sequence[float] | Floats
    finish_reason: str | None = None
    experts: tuple[int, bytes] | None = None


@dataclass(frozen=True)
class ScoreRow:
    """The scores of one sample. `ref_logprobs` (nats) and `values` are (R,) float32. Each is None if it is not wanted.
    `reward` is in the scorer's units."""

    key: Key
    ref_logprobs: Floats | None
    values: Floats | None
    reward: float | None
    critic_version: int | None = None


def _int32(values: Sequence[int] | Tokens) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def _float32(values: Sequence[float] | Floats) -> bytes:
    return np.asarray(values, "<f4").tobytes()


_INSERT = (
    "INSERT INTO samples (iteration, prompt_index, sample_index, state, prompt, seed, fields) VALUES (?,?,?,?,?,?,?)"
)


def _new_rows(iteration: int, samples: Sequence[NewSample]) -> list[tuple[Any, ...]]:
    """The rows of pending samples in order. Raises StoreError."""
    for sample in samples:
        if not 0 <= sample.seed < 2**63:
            raise StoreError(f"seed {sample.seed} of prompt {sample.prompt} is not in [0, 2**63)")
        if len(sample.prompt_tokens) == 0:
            raise StoreError(f"prompt {sample.prompt} of iteration {iteration} has no tokens")
    return [
        (iteration, s.prompt, s.sample, State.PENDING, _int32(s.prompt_tokens), s.seed, json.dumps(s.fields))
        for s in sorted(samples, key=lambda s: (s.prompt, s.sample))
    ]


class SampleTable:
    """The table of samples. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # ------------------------------------------------------------ life of an iteration

    def begin_iteration(self, iteration: int, samples: Sequence[NewSample]) -> bool:
        """Store an iteration's samples as pending. Returns False if they are stored already, in any state. Raises
        StoreError if the iteration was begun with other prompts or seeds."""
        if not samples:
            raise StoreError(f"iteration {iteration} has no prompts")
        rows = _new_rows(iteration, samples)
        with self._db.transaction() as db:
            # An episode has changed the prompt of its sample.
            stored = db.execute(
                "SELECT prompt_index, sample_index, COALESCE(asked, prompt), seed FROM samples LEFT JOIN episodes"
                f" USING (iteration, prompt_index, sample_index) WHERE {_OF} ORDER BY 1, 2",
                (iteration,),
            ).fetchall()
            if stored:
                if stored != [(r[1], r[2], r[4], r[5]) for r in rows]:
                    raise StoreError(
                        f"iteration {iteration} was begun with other prompts or seeds than it is given now"
                    )
                return False
            db.executemany(_INSERT, rows)
        return True

    def begin_turn(self, key: Key, prompt: Sequence[int], seed: int) -> Sample:
        """Store a turn of an episode as pending, unless it is stored. Returns it."""
        with self._db.transaction() as db:
            if db.execute(f"SELECT 1 FROM samples WHERE {WHERE}", key).fetchone() is None:
                rows = _new_rows(key.iteration, [NewSample(key.prompt, key.sample, prompt, seed)])
                db.executemany(_INSERT, rows)
        return self.get(key)

    def replace_prompts(self, iteration: int, gone: Iterable[int], samples: Sequence[NewSample]) -> None:
        """Delete the prompts `gone` of an iteration with all their data, and store other samples as pending."""
        rows = _new_rows(iteration, samples)
        with self._db.transaction() as db:
            for prompt in gone:
                for table in _TABLES:
                    db.execute(f"DELETE FROM {table} WHERE iteration=? AND prompt_index=?", (iteration, prompt))
            db.executemany(_INSERT, rows)

    def recover(self) -> list[Sample]:
        """Call it after a crash. Samples that were being generated become pending again, with their tokens. Returns
        these samples as they were before, so that their requests can be aborted."""
        busy = (State.GENERATING, State.MIGRATING)
        with self._db.transaction() as db:
            interrupted = self._select(db, "state IN (?,?)", busy)
            db.execute(f"UPDATE samples SET state='{State.PENDING}' WHERE state IN (?,?)", busy)
        return interrupted

    def advance(self, iteration: int, state: State, most: int | None = None) -> bool:
        """Move the samples of an iteration to IN_BATCH or TRAINED, or only `most` of them. Returns whether all are
        there. Samples that are there already, or beyond, stay."""
        if state not in (State.IN_BATCH, State.TRAINED):
            raise IllegalTransition(f"an iteration cannot be advanced to {state}")
        before = ORDER[ORDER.index(state) - 1]
        with self._db.transaction() as db:
            counts = self._counts(db, iteration)
            early = {s: n for s, n in counts.items() if s not in ORDER or ORDER.index(s) < ORDER.index(before)}
            if early or not counts:
                found = ", ".join(f"{n} are {s}" for s, n in early.items()) or "it has no samples"
                raise IllegalTransition(f"iteration {iteration} cannot become {state}: {found}")
            limit = ALL if most is None else most
            chosen = "SELECT rowid FROM samples WHERE iteration=? AND state=? LIMIT ?"
            moved = db.execute(
                f"UPDATE samples SET state=? WHERE rowid IN ({chosen})", (state, iteration, before, limit)
            ).rowcount
        return moved == counts.get(before, 0)

    def forget_before(self, iteration: int, most: int | None = None) -> bool:
        """Delete all iterations of training, which count from 1, below `iteration`, or only `most` rows of each table.
        Returns whether all are deleted."""
        left, limit = False, ALL if most is None else most
        with self._db.transaction() as db:
            for table in _TABLES:
                chosen = f"SELECT rowid FROM {table} WHERE iteration BETWEEN 1 AND ? LIMIT ?"
                cursor = db.execute(f"DELETE FROM {table} WHERE rowid IN ({chosen})", (iteration - 1, limit))
                left |= cursor.rowcount == most
        return not left

    def forget(self, iteration: int) -> None:
        """Delete one iteration, so that its prompts can be answered again."""
        with self._db.transaction() as db:
            for table in _TABLES:
                db.execute(f"DELETE FROM {table} WHERE iteration=?", (iteration,))

    # ------------------------------------------------------------ generation

    def assign(self, assignments: Sequence[Assignment]) -> list[int]:
        """Move samples from pending or migrating to generating, for all assignments or none. Returns the attempt
        numbers in order."""
        attempts = []
        with self._db.transaction() as db:
            for a in assignments:
                state, attempt, kept, first = self._row(db, a.key, "state, attempt, kept, first_version")
                self._check(a.key, State(state), State.GENERATING)
                if not 0 <= a.keep <= kept:
                    raise StoreError(f"{a.key}: asked to keep {a.keep} tokens of {kept}")
                if a.keep < kept:
                    self._truncate(db, a.key, a.keep)
                db.execute(
                    "UPDATE samples SET state=?, attempt=?, instance=?, incarnation=?, weight_version=?, kept=?,"
                    f" first_version=? WHERE {WHERE}",
                    (
                        State.GENERATING,
                        attempt + 1,
                        a.instance,
                        a.incarnation,
                        a.weight_version,
                        a.keep,
                        first if a.keep else a.weight_version,
                        *a.key,
                    ),
                )
                attempts.append(attempt + 1)
        return attempts

    def record(self, deltas: Iterable[Delta]) -> list[bool]:
        """Append streamed tokens, and finish responses whose delta has a reason, in one transaction. Returns one bool
        for each delta: False if it is dropped because its assignment is over. Raises StoreError for a gap or an overlap
        within the current assignment."""
        accepted = []
        with self._db.transaction() as db:
            for delta in deltas:
                if len(delta.tokens) != len(delta.logprobs) or not self._append(db, delta):
                    state, attempt, kept = self._row(db, delta.key, "state, attempt, kept")
                    if delta.attempt != attempt or state not in (State.GENERATING, State.MIGRATING):
                        accepted.append(False)
                        continue
                    raise StoreError(
                        f"{delta.key}: {len(delta.tokens)} tokens and {len(delta.logprobs)} log-probabilities for"
                        f" position {delta.start}, but {kept} tokens are stored"
                    )
                if delta.experts is not None:
                    db.execute("INSERT INTO experts VALUES (?,?,?,?,?,?)", (*delta.key, delta.attempt, *delta.experts))
                accepted.append(True)
        return accepted

    def migrate(self, keys: Iterable[tuple[Key, int]]) -> None:
        """Move the sample of each (key, attempt) from generating to migrating. Its stream may still deliver tokens
        until it ends."""
        self._leave(keys, State.MIGRATING)

    def release(self, keys: Iterable[tuple[Key, int]]) -> None:
        """Move the sample of each (key, attempt) from generating or migrating to pending, with its tokens. Assignments
        that are over are skipped."""
        self._leave(keys, State.PENDING)

    def _leave(self, keys: Iterable[tuple[Key, int]], state: State) -> None:
        with self._db.transaction() as db:
            for key, attempt in keys:
                now, current = self._row(db, key, "state, attempt")
                if current == attempt and state in TRANSITIONS[State(now)]:
                    db.execute(f"UPDATE samples SET state=? WHERE {WHERE}", (state, *key))

    def score(self, rows: Iterable[ScoreRow]) -> int:
        """Move samples from generated to scored. Returns the number of samples. Samples that already have scores keep
        them. Raises StoreError for lengths that do not fit the response, and for values that are not finite."""
        done = 0
        with self._db.transaction() as db:
            for row in rows:
                state, kept = self._row(db, row.key, "state, kept")
                if State(state) in ORDER[1:]:
                    continue
                self._check(row.key, State(state), State.SCORED)
                for name, array in (("ref_logprobs", row.ref_logprobs), ("values", row.values)):
                    if array is not None and (len(array) != kept or not np.isfinite(array).all()):
                        raise StoreError(f"{row.key}: {name} must be {kept} finite numbers, one per response token")
                if row.reward is not None and not math.isfinite(row.reward):
                    raise StoreError(f"{row.key}: its reward is {row.reward}, not a finite number")
                db.execute(
                    "UPDATE samples SET state=?, ref_logprobs=?, value_estimates=?, reward=?,"
                    f" critic_version=? WHERE {WHERE}",
                    (
                        State.SCORED,
                        None if row.ref_logprobs is None else _float32(row.ref_logprobs),
                        None if row.values is None else _float32(row.values),
                        row.reward,
                        row.critic_version,
                        *row.key,
                    ),
                )
                done += 1
        return done

    def add_rewards(
        self,
        function: str,
        rewards: Mapping[Key, float],
        steps: Mapping[Key, Sequence[tuple[int, float]]] | None = None,
    ) -> None:
        """Store the results of one call of a reward function. `steps` has for each step of a response the number of
        characters up to its end, and its reward."""
        with self._db.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO steps VALUES (?,?,?,?,?)",
                [(*key, function, json.dumps(found)) for key, found in (steps or {}).items()],
            )
            db.executemany(
                "INSERT OR REPLACE INTO rewards VALUES (?,?,?,?,?)",
                [(*key, function, reward) for key, reward in rewards.items()],
            )

    # ------------------------------------------------------------ queries

    def rewards(self, iteration: int) -> dict[Key, dict[str, float]]:
        """The rewards that functions returned so far, by sample and function."""
        found: dict[Key, dict[str, float]] = {}
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT prompt_index, sample_index, function, reward FROM rewards WHERE iteration=?", (iteration,)
            )
            for prompt, sample, function, reward in rows:
                found.setdefault(Key(iteration, prompt, sample), {})[function] = reward
        return found

    def steps(self, iteration: int) -> dict[Key, dict[str, list[tuple[int, float]]]]:
        """The steps that functions returned, by sample and function."""
        found: dict[Key, dict[str, list[tuple[int, float]]]] = {}
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT prompt_index, sample_index, function, steps FROM steps WHERE iteration=? ORDER BY 1, 2, 3",
                (iteration,),
            )
            for prompt, sample, function, steps in rows:
                of_sample = found.setdefault(Key(iteration, prompt, sample), {})
                of_sample[function] = [(end, reward) for end, reward in json.loads(steps)]
        return found

    def experts(self, iteration: int, prompts: Sequence[int] | None = None) -> dict[Key, list[tuple[int, bytes]]]:
        """The reports of servers on the experts of a sample's tokens, in order. Each has its first token and a numpy
        file. If `prompts` is given, only these prompts are included."""
        found: dict[Key, list[tuple[int, bytes]]] = {}
        where = "iteration=?" + ("" if prompts is None else f" AND prompt_index IN ({','.join('?' * len(prompts))})")
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT prompt_index, sample_index, start, npy FROM experts WHERE {where} ORDER BY 1, 2, attempt",
                (iteration, *(prompts or ())),
            )
            for prompt, sample, start, npy in rows:
                found.setdefault(Key(iteration, prompt, sample), []).append((start, npy))
        return found

    def samples(self, iteration: int, *states: State) -> list[Sample]:
        """An iteration's samples in order of (prompt, sample). If `states` are given, only samples in one of these are
        included."""
        where = _OF + (f" AND state IN ({','.join('?' * len(states))})" if states else "")
        with self._db.reading() as db:
            return self._select(db, where, (iteration, *states))

    def lengths(self, iteration: int) -> list[int]:
        """The response tokens of an iteration's samples so far, in order of (prompt, sample)."""
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT kept FROM samples WHERE {_OF} ORDER BY prompt_index, sample_index", (iteration,)
            ).fetchall()
        return [kept for (kept,) in rows]

    def scored_rewards(self, iteration: int) -> dict[Key, float | None]:
        """The reward of each sample of an iteration. Raises StoreError unless all of them are scored."""
        with self._db.reading() as db:
            self._all_scored(self._counts(db, iteration), iteration)
            rows = db.execute(
                f"SELECT prompt_index, sample_index, reward FROM samples WHERE {_OF} ORDER BY 1, 2", (iteration,)
            ).fetchall()
        return {Key(iteration, prompt, sample): reward for prompt, sample, reward in rows}

    def get(self, key: Key) -> Sample:
        """One sample. Raises StoreError for an unknown key."""
        with self._db.reading() as db:
            found = self._select(db, WHERE, key)
        if not found:
            raise StoreError(f"{key} is not in the store")
        return found[0]

    def counts(self, iteration: int) -> dict[State, int]:
        """The number of samples by state."""
        with self._db.reading() as db:
            return self._counts(db, iteration)

    def experience(self, iteration: int) -> list[Sample]:
        """The scored samples of an iteration. Raises StoreError unless all of them are scored."""
        samples = self.samples(iteration)
        self._all_scored(Counter(s.state for s in samples), iteration)
        return samples

    # ------------------------------------------------------------ inner parts

    @staticmethod
    def _all_scored(counts: Mapping[State, int], iteration: int) -> None:
        total = sum(counts.values())
        missing = sum(number for state, number in counts.items() if state not in ORDER[1:])
        if missing or not total:
            raise StoreError(f"iteration {iteration}: {missing or 'all'} of {total} samples are not scored")

    @staticmethod
    def _row(db: sqlite3.Connection, key: Key, columns: str) -> tuple[Any, ...]:
        row = db.execute(f"SELECT {columns} FROM samples WHERE {WHERE}", key).fetchone()
        if row is None:
            raise StoreError(f"{key} is not in the store")
        return tuple(row)

    @staticmethod
    def _check(key: Key, old: State, new: State) -> None:
        if new not in TRANSITIONS[old]:
            raise IllegalTransition(f"{key} is {old}: it cannot become {new}")

    @staticmethod
    def _counts(db: sqlite3.Connection, iteration: int) -> dict[State, int]:
        rows = db.execute(f"SELECT state, COUNT(*) FROM samples WHERE {_OF} GROUP BY state", (iteration,))
        return {State(state): n for state, n in rows}

    @staticmethod
    def _chunks(db: sqlite3.Connection, key: Key) -> tuple[bytes, bytes]:
        rows = db.execute(f"SELECT tokens, logprobs FROM chunks WHERE {WHERE} ORDER BY start", key).fetchall()
        return b"".join(r[0] for r in rows), b"".join(r[1] for r in rows)

    def _append(self, db: sqlite3.Connection, delta: Delta) -> bool:
        """Store a delta's tokens, and finish the response if it has a reason. Returns False, and stores nothing, unless
        the tokens follow those stored for the current assignment."""
        tokens, logprobs = _int32(delta.tokens), _float32(delta.logprobs)
        where = f"{WHERE} AND attempt=? AND kept=? AND state IN (?,?)"
        current = (*delta.key, delta.attempt, delta.start, State.GENERATING, State.MIGRATING)
        kept = delta.start + len(delta.tokens)
        if delta.finish_reason is None:
            if not db.execute(f"UPDATE samples SET kept=? WHERE {where}", (kept, *current)).rowcount:
                return False
            if tokens:
                db.execute("INSERT INTO chunks VALUES (?,?,?,?,?,?)", (*delta.key, delta.start, tokens, logprobs))
            return True
        before = self._chunks(db, delta.key) if delta.start else (b"", b"")
        whole = before[0] + tokens, before[1] + logprobs
        if not db.execute(
            f"UPDATE samples SET kept=?, state=?, response=?, logprobs=?, finish_reason=? WHERE {where}",
            (kept, State.GENERATED, *whole, delta.finish_reason, *current),
        ).rowcount:
            return False
        if delta.start:
            db.execute(f"DELETE FROM chunks WHERE {WHERE}", delta.key)
        return True

    def _truncate(self, db: sqlite3.Connection, key: Key, keep: int) -> None:
        tokens, logprobs = self._chunks(db, key)
        db.execute(f"DELETE FROM chunks WHERE {WHERE}", key)
        if keep:
            db.execute("INSERT INTO chunks VALUES (?,?,?,?,?,?)", (*key, 0, tokens[: 4 * keep], logprobs[: 4 * keep]))

    def _select(self, db: sqlite3.Connection, where: str, arguments: Sequence[Any]) -> list[Sample]:
        rows = db.execute(
            "SELECT iteration, prompt_index, sample_index, state, prompt, seed, fields, response, logprobs, attempt,"
            " instance, incarnation, first_version, weight_version, finish_reason, ref_logprobs,"
            f" value_estimates, reward, critic_version FROM samples WHERE {where}"
            " ORDER BY iteration, prompt_index, sample_index",
            tuple(arguments),
        ).fetchall()
        return [self._sample(db, row) for row in rows]

    def _sample(self, db: sqlite3.Connection, row: tuple[Any, ...]) -> Sample:
        key = Key(*row[:3])
        state, prompt, seed, fields, response, logprobs = row[3:9]
        if response is None:  # a sample without an attempt has none
            response, logprobs = self._chunks(db, key) if row[9] else (b"", b"")
        return Sample(
            key,
            State(state),
            np.frombuffer(prompt, "<i4"),
            seed,
            json.loads(fields),
            np.frombuffer(response, "<i4"),
            np.frombuffer(logprobs, "<f4"),
            attempt=row[9],
            instance=row[10],
            incarnation=row[11],
            first_version=row[12],
            weight_version=row[13],
            finish_reason=row[14],
            ref_logprobs=None if row[15] is None else np.frombuffer(row[15], "<f4"),
            values=None if row[16] is None else np.frombuffer(row[16], "<f4"),
            reward=row[17],
            critic_version=row[18],
        )
