"""Says which run the files in a run directory belong to."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from dovetail.coordinator.store.store import Store, StoreError
from dovetail.coordinator.telemetry.summary import write_json

KEY = "run/id"
RESULTS = ("checkpoints", "experience", "models")


def new_id() -> str:
    """A new run's id. It has sixteen hexadecimal digits."""
    return secrets.token_hex(8)


def read_id(run_dir: Path) -> str | None:
    """The id in run.json. None if there is no such file. Raises StoreError."""
    path = run_dir / "run.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}); delete it, and it is made again from the store") from error


def write_id(run_dir: Path, run: str) -> None:
    """Write the id atomically."""
    write_json(run_dir / "run.json", {"id": run})


def has_store(run_dir: Path) -> bool:
    """Whether the run has a store. An empty file does not count, because SQLite would take it for a new store."""
    path = run_dir / "store.sqlite"
    return path.is_file() and path.stat().st_size > 0


def check_complete(run_dir: Path) -> None:
    """Call this before the store is opened, because opening makes an empty store. Raises StoreError if the run has
    results but no store."""
    if has_store(run_dir):
        return
    found = [f"{name}/" for name in RESULTS if (run_dir / name).is_dir() and any((run_dir / name).iterdir())]
    if found:
        raise StoreError(
            f"{run_dir} has {' and '.join(found)} of an earlier run, but its store.sqlite is missing or empty; put "
            "that file back, or begin anew in another run directory"
        )


def identify(run_dir: Path, store: Store) -> str:
    """The run's id. If run.json or the store lacks it, it is written there. Raises StoreError if they belong to two
    runs."""
    written, stored = read_id(run_dir), store.get(KEY)
    if written is not None and stored is not None and written != stored:
        raise StoreError(
            f"{run_dir} holds parts of two runs: run.json is of run {written}, store.sqlite of run {stored}; put back "
            "the file that does not belong to the models and checkpoints there, or start anew with --overwrite"
        )
    run = str(stored or written or new_id())
    if stored is None:
        store.put(KEY, run)
    if written is None:
        write_id(run_dir, run)
    return run


def check_model(folder: Path, run: str) -> None:
    """Check an exported model from which a later stage begins. Raises StoreError if it is missing or belongs to another
    run."""
    try:
        found = json.loads((folder / "dovetail.json").read_text(encoding="utf-8")).get("run", "")
    except FileNotFoundError:
        found = ""  # of a release before this file
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{folder / 'dovetail.json'} cannot be read: {error}") from error
    if not (folder / "config.json").is_file():
        raise StoreError(f"{folder} is missing, though the run has finished that stage; put the folder back")
    if found and found != run:
        raise StoreError(
            f"{folder} is of run {found}, but store.sqlite of run {run}; put back this run's folder, or start anew "
            "with --overwrite"
        )
