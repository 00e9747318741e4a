"""Everything the coordinator must not forget, in `run_dir/store.sqlite`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dovetail.api.messages import Span
from dovetail.coordinator.database import Database, StoreError
from dovetail.coordinator.samples import Sample, SampleTable

__all__ = ["Store", "StoreError"]


class Store:
    """Opening it recovers from a crash: samples that were being generated are pending again, tokens kept, and
    `take_interrupted` says which requests may still run on servers.

    `samples`: the iterations' samples. Every method is one transaction; all raise StoreError with one sentence when
    the disk is full, read-only or damaged. Use from one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._db = Database(run_dir / "store.sqlite")
        self.samples = SampleTable(self._db)
        try:
            self._interrupted = self.samples.recover()
        except StoreError:
            self._db.close()
            raise

    def take_interrupted(self) -> list[Sample]:
        """Samples that were on a server when the coordinator died, as they were then; empty the second time."""
        interrupted, self._interrupted = self._interrupted, []
        return interrupted

    # ------------------------------------------------------------ records: JSON by key, `<namespace>/<name>`

    def get(self, key: str) -> Any:
        """The value put last, or None."""
        with self._db.reading() as db:
            row = db.execute("SELECT value FROM kv WHERE key=?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: object) -> None:
        """Store a JSON value; None deletes the key. Raises TypeError for what JSON cannot hold."""
        text = json.dumps(value)
        with self._db.transaction() as db:
            if value is None:
                db.execute("DELETE FROM kv WHERE key=?", (key,))
            else:
                db.execute(
                    "INSERT INTO kv VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value=excluded.value", (key, text)
                )

    def put_all(self, values: dict[str, object]) -> None:
        """Several keys in one transaction."""
        with self._db.transaction():
            for key, value in values.items():
                self.put(key, value)

    def items(self, namespace: str) -> dict[str, Any]:
        """All keys below `namespace/`."""
        prefix = namespace.rstrip("/") + "/"
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT key, value FROM kv WHERE substr(key, 1, ?)=? ORDER BY key", (len(prefix), prefix)
            ).fetchall()
        return {key: json.loads(value) for key, value in rows}

    # ------------------------------------------------------------ commands to the trainers

    def issue(self, command_id: str, command: dict[str, Any]) -> dict[str, Any] | None:
        """Note a command before it is sent; its result if it has one already. Raises StoreError if the id was used
        for another command."""
        text = json.dumps(command, sort_keys=True)
        with self._db.transaction() as db:
            row = db.execute("SELECT command, result FROM commands WHERE id=?", (command_id,)).fetchone()
            if row is None:
                db.execute("INSERT INTO commands VALUES (?,?,'issued',NULL)", (command_id, text))
                return None
        if row[0] != text:
            raise StoreError(f"command id {command_id} was used before for another command")
        return None if row[1] is None else dict(json.loads(row[1]))

    def done(self, command_id: str, result: dict[str, Any]) -> bool:
        """Store a command's result, once: False if it had one. Raises StoreError if it was never issued."""
        with self._db.transaction() as db:
            row = db.execute("SELECT status FROM commands WHERE id=?", (command_id,)).fetchone()
            if row is None:
                raise StoreError(f"a result came for command {command_id}, which was never issued")
            if row[0] == "done":
                return False
            db.execute("UPDATE commands SET status='done', result=? WHERE id=?", (json.dumps(result), command_id))
        return True

    def result(self, command_id: str) -> dict[str, Any] | None:
        """A command's stored result, or None."""
        with self._db.reading() as db:
            row = db.execute("SELECT result FROM commands WHERE id=?", (command_id,)).fetchone()
        return None if row is None or row[0] is None else dict(json.loads(row[0]))

    def open_commands(self) -> dict[str, dict[str, Any]]:
        """Commands issued and without a result, by id."""
        with self._db.reading() as db:
            rows = db.execute("SELECT id, command FROM commands WHERE status='issued' ORDER BY rowid").fetchall()
        return {command_id: json.loads(text) for command_id, text in rows}

    # ------------------------------------------------------------ history

    def record_step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a finished step; a replayed step overwrites its own."""
        with self._db.transaction() as db:
            db.execute(
                "INSERT INTO steps VALUES (?,?,?) ON CONFLICT (stage, step) DO UPDATE SET metrics=excluded.metrics",
                (stage, step, json.dumps(metrics)),
            )

    def steps(self, stage: str) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics) in order."""
        with self._db.reading() as db:
            rows = db.execute("SELECT step, metrics FROM steps WHERE stage=? ORDER BY step", (stage,)).fetchall()
        return [(step, json.loads(metrics)) for step, metrics in rows]

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Append to the timeline."""
        with self._db.transaction() as db:
            db.executemany(
                "INSERT INTO spans (iteration, span) VALUES (?,?)", [(s.iteration, s.model_dump_json()) for s in spans]
            )

    def spans(self, iteration: int | None = None) -> list[Span]:
        """Spans of an iteration (or all), in order of arrival."""
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT span FROM spans WHERE ?1 IS NULL OR iteration=?1 ORDER BY id", (iteration,)
            ).fetchall()
        return [Span.model_validate_json(text) for (text,) in rows]

    def forget_before(self, iteration: int) -> None:
        """Delete samples and spans of iterations below `iteration`."""
        with self._db.transaction() as db:
            self.samples.forget_before(iteration)
            db.execute("DELETE FROM spans WHERE iteration<?", (iteration,))

    def close(self) -> None:
        """Idempotent."""
        self._db.close()
