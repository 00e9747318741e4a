"""The calls of tools in episodes. What is stored here decides, after a death, which calls are made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.coordinator.store.database import Database, StoreError

_WHERE = "iteration=? AND prompt_index=? AND sample_index=? AND attempt=? AND turn=? AND call=?"


class CallKey(NamedTuple):
    """The place of a call: the sample whose episode it is, the attempt at this episode, the model's turn, and the call
    in that turn. Both count from 0. A resumed episode has the same keys, because its tokens are stored, too."""

    iteration: int
    prompt: int
    sample: int
    attempt: int
    turn: int
    call: int

    def __str__(self) -> str:
        """The key that an environment gets with the call (`Idempotency-Key`)."""
        return "-".join(map(str, self))


@dataclass(frozen=True)
class StoredCall:
    """A call that was stored before it was made. `observation` is what the tool answered. It is None if that is not
    known: the coordinator died before it was stored, and perhaps before the call."""

    observation: str | None


class ToolCalls:
    """The table of calls. Each method is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def intend(self, key: CallKey, name: str, arguments: Mapping[str, Any]) -> StoredCall | None:
        """Store that a call is about to be made, so that it survives a power failure. Returns None if it is new.
        Otherwise returns what is known of it. Raises StoreError if another call is stored at this place."""
        request = json.dumps([name, arguments], sort_keys=True, ensure_ascii=False)
        with self._db.transaction() as db:
            row = db.execute(f"SELECT request, observation FROM tool_calls WHERE {_WHERE}", key).fetchone()
            if row is None:
                db.execute("INSERT INTO tool_calls VALUES (?,?,?,?,?,?,?,NULL)", (*key, request))
        if row is None:
            self._db.sync()
            return None
        if row[0] != request:
            raise StoreError(
                f"call {key} was {row[0]} before the coordinator was restarted, and now it is {request}; the episode's "
                "tokens or observations were changed, so begin a new run"
            )
        return StoredCall(row[1])

    def counts(self, iteration: int) -> dict[str, int]:
        """The `calls` of an iteration by their places, and those of them that are `unanswered`."""
        with self._db.reading() as db:
            calls, answered = db.execute(
                "SELECT COUNT(*), COUNT(observation) FROM tool_calls WHERE iteration=?", (iteration,)
            ).fetchone()
        return {"calls": calls, "unanswered": calls - answered}

    def observe(self, key: CallKey, observation: str) -> None:
        """Store what the tool answered. Raises StoreError for a call that was not stored, and for a second answer that
        differs."""
        with self._db.transaction() as db:
            row = db.execute(f"SELECT observation FROM tool_calls WHERE {_WHERE}", key).fetchone()
            if row is None:
                raise StoreError(f"call {key} is not in the store, so it must not have been made")
            if row[0] is None:
                db.execute(f"UPDATE tool_calls SET observation=? WHERE {_WHERE}", (observation, *key))
            elif row[0] != observation:
                raise StoreError(f"call {key} has another observation in the store than it is given now")
