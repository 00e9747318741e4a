"""Says which run the files in a run directory belong to, and deletes those of a run, and no others."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import TRAINED_MODELS, Stage
from dovetail.protocol.files.durable import read_object, write_json

KEY = "run/id"
RESULTS = ("checkpoints", "experience", "models")
# These files say which run a folder is of. They are written last, and deleted last.
MARKS = ("run.json", "dovetail.json", "state.json")

# What Dovetail makes in a run's folder, as patterns of paths. Whatever no pattern matches is not the run's.
_STAGE = "|".join(stage.value for stage in Stage)
_WORDS = (
    r"(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:vocab|merges)\.txt|"
    r"chat_template\.jinja|(?:tokenizer|spiece|spm|sentencepiece(?:\.bpe)?)\.model|[\w.-]+\.tiktoken|"
    r"additional_chat_templates/[\w.-]+\.jinja"
)
_MODEL = (
    rf"(?:{_WORDS}|(?:config|generation_config|dovetail|model\.safetensors\.index)\.json|README\.md|"
    r"(?:model|part)(?:-\d+(?:-of)?-\d+)?\.safetensors|value_head/model\.safetensors)(?:\.tmp)?"
)
_RESULT = rf"models/(?:{'|'.join(TRAINED_MODELS)})|set-aside/\d+|checkpoints/(?:{_STAGE})-\d{{6,}}"
# What `dovetail export` makes from checkpoints.
_MADE = rf"cache/exports/(?:(?:{'|'.join(TRAINED_MODELS)})-\d{{6,}}|\.[\w-]+\.\d+\.tmp)"
_HELD = r"checkpoints/\.export-\w+"
_FILES = re.compile(
    r"(?:(?:run|job|plan|elapsed|hub|summary|schedule|schedule-\w+)\.json|token|report\.html)(?:\.tmp)?|"
    r"(?:events|history)\.jsonl|store\.(?:lock|sqlite(?:-wal|-shm|-journal)?)|\.reserve|"
    r"(?:tokenizer|models/actor-config|\.tokenizer\.\d+\.tmp|models/\.actor-config\.\d+\.tmp)/"
    rf"(?:{_MODEL}|prepared\.txt|[\w.-]+\.py)|"
    rf"(?:(?:models/(?:{'|'.join(TRAINED_MODELS)})|set-aside/\d+)(?:\.tmp|\.old)?|{_MADE})/{_MODEL}|"
    rf"(?:checkpoints/(?:{_STAGE})-\d{{6,}}(?:\.tmp|\.old|\.damaged)?|{_HELD})/(?:state\.json|\.metadata(?:\.tmp)?|__\d+_\d+\.distcp)|"
    r"experience/\d{6,}\.safetensors(?:\.tmp)?|traces/iteration-\d{4,}\.json(?:\.tmp)?|"
    r"samples/(?:iteration-\d{6,}|evaluation-\d{6,}|evaluation-before-sft)\.jsonl(?:\.tmp)?|"
    r"proofs/\w+\.json(?:\.tmp)?|logs/[\w.-]+\.log|tensorboard/events\.out\.tfevents\.[^/]+|trackers/(?:\w+\.json(?:\.tmp)?|wandb/(?:(?:offline-)?run-[^/]+/.+|latest-run|debug[\w-]*\.log|settings))|"
    r"cache/tokens/(?:demonstrations|preferences)\.(?:bin|json)(?:\.tmp)?|"
    r"cache/datasets/(?:.+\.(?:arrow|json|lock|parquet|incomplete)|downloads/.+)|"
    r"hub/(?:version\.txt|CACHEDIR\.TAG|\.locks/.+|models--[^/]+/(?:blobs|refs|snapshots|\.no_exist)/.+)"
)
# Libraries make links here.
_LINKED = ("hub/", "trackers/wandb/")
_FOLDERS = re.compile(
    rf"{_HELD}|cache/exports|(?:(?:{_RESULT})(?:\.tmp|\.old|\.damaged)?|{_MADE})(?:/value_head|/additional_chat_templates)?|"
    r"(?:tokenizer|models/actor-config|\.tokenizer\.\d+\.tmp|models/\.actor-config\.\d+\.tmp)(?:/additional_chat_templates)?|"
    r"models|set-aside|checkpoints|experience|traces|samples|proofs|logs|tensorboard|trackers(?:/wandb(?:/(?:offline-)?run-.+)?)?|"
    r"cache(?:/tokens|/datasets(?:/.+)?)?|hub(?:/\.locks|/models--[^/]+)?(?:/.+)?"
)


def new_id() -> str:
    """A new run's id. It has sixteen hexadecimal digits."""
    return secrets.token_hex(8)


def read_id(run_dir: Path) -> str | None:
    """The id in run.json. None if there is no such file. Raises StoreError."""
    path = run_dir / "run.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["id"]
        if not isinstance(found, str):
            raise TypeError("its id is no text")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if _stored_id(run_dir) is None:
            raise StoreError(f"{path} is of no run of Dovetail; choose another run directory") from error
        raise StoreError(f"{path} cannot be read ({error}); delete it, and it is made again from the store") from error


def run_of(run_dir: Path) -> str | None:
    """The id of the run in a folder, from run.json or the store. None if there is no run. Raises StoreError if a file
    has the name of either, and is of no run."""
    found = read_id(run_dir) or _stored_id(run_dir)
    if found is None and has_store(run_dir):
        raise StoreError(f"{run_dir / 'store.sqlite'} is of no run of Dovetail; choose another run directory")
    return found


def _stored_id(run_dir: Path) -> str | None:
    """The id in the store, which is not changed. None if there is no store of a run."""
    try:
        uri = (run_dir / "store.sqlite").resolve().as_uri() + "?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
            row = db.execute("SELECT value FROM kv WHERE key = ?", (KEY,)).fetchone()
        return None if row is None else str(json.loads(row[0]))
    except (sqlite3.Error, ValueError):
        return None


def names_taken(run_dir: Path) -> list[str]:
    """What is in a folder without a run under the names of a run's files. Empty folders don't count."""
    if not run_dir.is_dir():
        return []
    paths = sorted(path for path in run_dir.iterdir() if _is_own_name(path))
    return [path.name for path in paths if not path.is_dir() or any(path.iterdir())]


def _is_own_name(path: Path) -> bool:
    return bool(_FILES.fullmatch(path.name) or _FOLDERS.fullmatch(path.name))


def is_being_deleted(run_dir: Path) -> bool:
    """Whether a deletion of the run was interrupted."""
    return bool(read_object(run_dir / "run.json").get("deleting"))


def delete_run(run_dir: Path, run: str) -> None:
    """Delete what run `run` has made in its folder. All else stays. Raises StoreError before anything is deleted if
    something among the run's files is not the run's. If this is interrupted, `is_being_deleted` is true, and a second
    call goes on."""
    mark = run_dir / "run.json"
    tops = sorted(path for path in run_dir.iterdir() if _is_own_name(path))
    doomed = [path for top in tops for path in _own(top, top.name, run)]
    write_json(mark, {"id": run, "deleting": True})
    _delete([mark, *(path for path in doomed if path != mark)])


def delete_folder(folder: Path, run_dir: Path, run: str) -> None:
    """Delete a model or a checkpoint of run `run`. A half-deleted folder never looks like one. Raises StoreError before
    anything is deleted if something in it is not the run's."""
    name = folder.relative_to(run_dir).as_posix()
    check_own(folder, name, run)
    if not folder.exists():
        return
    if re.fullmatch(_RESULT, name):
        doomed = folder.with_name(folder.name + ".old")
        delete_folder(doomed, run_dir, run)
        folder.rename(doomed)
        folder, name = doomed, f"{name}.old"
    _delete(list(_own(folder, name, run)))


def check_own(path: Path, name: str, run: str) -> None:
    """Raises StoreError unless there is nothing at `path`, or only what run `run` has made. `name`: its place in a run
    directory."""
    if path.exists() or path.is_symlink():
        for _ in _own(path, name, run):
            pass


def _own(path: Path, name: str, run: str) -> Iterator[Path]:
    """`path`, and all that is in it, a folder before its content and its mark before the rest. Links are not followed.
    Raises StoreError that names the first path that run `run` has not made."""
    link = path.is_symlink()
    if path.is_dir() and not link:
        content = sorted(path.iterdir(), key=lambda each: (each.name not in MARKS, each.name))
        result = content and re.fullmatch(_RESULT, name)
        if not _FOLDERS.fullmatch(name) or (result and read_object(content[0]).get("run", "") != run):
            raise StoreError(_foreign(path, run))
        yield path
        for each in content:
            yield from _own(each, f"{name}/{each.name}", run)
    elif _FILES.fullmatch(name) and not (link and not name.startswith(_LINKED)):
        yield path
    else:
        raise StoreError(_foreign(path, run))


def _delete(paths: list[Path]) -> None:
    """Delete files and folders, the last one first. A folder that is not empty is an OSError."""
    for path in reversed(paths):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def _foreign(path: Path, run: str) -> str:
    other = read_object(path / "dovetail.json").get("run") or read_object(path / "state.json").get("run")
    of = f"is of run {other}, not of run {run}" if other not in (None, run) else f"is nothing that run {run} has made"
    return f"{path} {of}; nothing was deleted or replaced: move it away"


def write_id(run_dir: Path, run: str) -> None:
    """Write the id atomically."""
    write_json(run_dir / "run.json", {"id": run})


def has_store(run_dir: Path) -> bool:
    """Whether the run has a store. An empty file does not count, because SQLite would take it for a new store."""
    path = run_dir / "store.sqlite"
    return path.is_file() and path.stat().st_size > 0


def check_complete(run_dir: Path) -> None:
    """Call this before the store is opened, because opening makes an empty store. Raises StoreError if the run has
    results but no store, or if there is no run and something that a run would write."""
    if has_store(run_dir):
        return
    found = [f"{name}/" for name in RESULTS if (run_dir / name).is_dir() and any((run_dir / name).iterdir())]
    if found:
        raise StoreError(
            f"{run_dir} has {' and '.join(found)} of an earlier run, but its store.sqlite is missing or empty; put "
            "that file back, or begin anew in another run directory"
        )
    # The coordinator and those that start it have made these already.
    begun = {"events.jsonl", "job.json", "plan.json", "token", "logs", "traces"}
    taken = [name for name in names_taken(run_dir) if name not in begun]
    if taken and read_id(run_dir) is None:
        raise StoreError(
            f"{run_dir} has {', '.join(taken)}, which a run would write and which is of no run; use another folder "
            "(spec.storage.folder)"
        )


def identify(run_dir: Path, store: Store) -> str:
    """The run's id. If run.json or the store lacks it, it is written there. Raises StoreError if they belong to two
    runs."""
    written, stored = read_id(run_dir), store.get(KEY)
    if written is not None and stored is not None and written != stored:
        raise StoreError(
            f"{run_dir} holds parts of two runs: run.json is of run {written}, store.sqlite of run {stored}; put back "
            "the file that does not belong to the models and checkpoints there, or start a new run in another folder"
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
            f"{folder} is of run {found}, but store.sqlite of run {run}; put back this run's folder, or "
            "start a new run in another folder"
        )
