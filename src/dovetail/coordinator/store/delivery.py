"""Copies the trained models to the place that spec.output names."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.identity import check_own
from dovetail.manifest.types import TRAINED_MODELS, ObjectStorage, Output, Stage

# A folder without this file does not count as a model, so it is written last.
LAST = "config.json"
CHUNK = 16 << 20
# Each step's metrics, and what happened when.
HISTORY = ("history.jsonl", "events.jsonl")
# The stages that make a model; the others come from DPO and PPO.
_MADE_BY = {"sft": {Stage.SFT}, "reward": {Stage.REWARD}}
# AWS's SDK uses these words for errors that every further attempt would meet again.
_HOPELESS = (
    *("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "INVALID_SIGNATURE", "SIGNATURE_DOES_NOT_MATCH"),
    *("MISSING_AUTHENTICATION_TOKEN", "INVALID_CLIENT_TOKEN_ID", "HTTP status 403", "HTTP status 404"),
)


class OutputError(RuntimeError):
    """The models cannot be copied, and trying again would not help."""


def trained(models: Path) -> list[str]:
    """The names of the complete models in the folder `models`."""
    return [name for name in TRAINED_MODELS if (models / name / LAST).is_file()]


def check(output: Output | None, stages: Collection[Stage], run: str) -> None:
    """Write a small file where the models will go, and delete it, so that a wrong bucket or key is noticed before the
    training. Check that no model of these stages would replace what is not of run `run`. Raises OutputError, or OSError
    for an error that may pass."""
    if output is None:
        return
    with _explained(output):
        if output.path is not None:
            Path(output.path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output.path, prefix=".dovetail-"):
                pass
        elif output.s3 is not None:
            files, mark_name = _connect(output.s3), _key(output.s3, f".dovetail-{run}")
            with files.open_output_stream(mark_name) as file:
                file.write(b"Dovetail may write here.\n")
            with contextlib.suppress(OSError):  # a user who may write may lack the right to delete
                files.delete_file(mark_name)
        for name in TRAINED_MODELS:
            if not _MADE_BY.get(name, {Stage.DPO, Stage.PPO}).isdisjoint(stages):
                _check_place(output, name, run)


def deliver(output: Output | None, models: Path, run: str) -> list[str]:
    """Copy all trained models in the folder `models`, and return their names. Models that run `run` has copied before
    are replaced. Raises OutputError, or OSError for an error that may pass."""
    names = trained(models)
    if output is not None:
        with _explained(output):
            for name in names:
                _check_place(output, name, run)
                if output.path is not None:
                    _copy(models / name, Path(output.path) / name, run)
                elif output.s3 is not None:
                    _upload(models / name, output.s3, name, run)
    return names


def deliver_history(output: Output | None, run_dir: Path, run: str) -> None:
    """Copy the run's history to runs/<run> beside the models, where it outlives the run directory and the RLHFJob. The
    run's id is in the name, so nobody else's is replaced. Raises OutputError, or OSError for an error that may pass."""
    if output is None:
        return
    with _explained(output):
        for name in HISTORY:
            if not (run_dir / name).is_file():
                continue
            place = f"runs/{run}/{name}"
            if output.path is not None:
                target = Path(output.path) / place
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run_dir / name, target)
            elif output.s3 is not None:
                _put(_connect(output.s3), run_dir / name, _key(output.s3, place))


def _check_place(output: Output, name: str, run: str) -> None:
    """Raises OutputError if something is where the model goes that run `run` has not copied there."""
    try:
        if output.path is not None:
            check_own(Path(output.path) / name, f"models/{name}", run)
        elif output.s3 is not None:
            _check_bucket(output.s3, name, run)
    except StoreError as error:
        raise OutputError(f"spec.output: {error}, or set another place for this run's models") from error


def _check_bucket(storage: ObjectStorage, name: str, run: str) -> None:
    """As `check_own`, for object storage. Where the run may not ask what is there, nothing counts as there."""
    from pyarrow import fs

    with contextlib.suppress(OSError):
        folder = _key(storage, name)
        paths = [f"{folder}/{LAST}", f"{folder}/dovetail.json", _mark(storage, name, run)]
        *there, mine = (info.type != fs.FileType.NotFound for info in _connect(storage).get_file_info(paths))
        if any(there) and not mine:
            raise StoreError(f"s3://{folder} is no model that run {run} has copied; nothing was replaced: move it away")


def _mark(storage: ObjectStorage, name: str, run: str) -> str:
    """The key of an empty object that says that run `run` has copied the model."""
    return _key(storage, f".{name}.{run}")


def _copy(source: Path, target: Path, run: str) -> None:
    """Copy a model to a folder. A reader of `target` finds the old model, nothing, or the new one."""
    fresh, old = target.with_name(f".{target.name}.{run}.new"), target.with_name(f".{target.name}.{run}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, copy_function=shutil.copyfile)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _upload(source: Path, storage: ObjectStorage, name: str, run: str) -> None:
    files = _connect(storage)
    with files.open_output_stream(_mark(storage, name, run)):
        pass
    found = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path == source / LAST)
    for path in found:
        _put(files, path, _key(storage, f"{name}/{path.relative_to(source).as_posix()}"))


def _put(files: Any, path: Path, key: str) -> None:
    with path.open("rb") as read, files.open_output_stream(key) as write:
        shutil.copyfileobj(read, write, CHUNK)


def _key(storage: ObjectStorage, name: str) -> str:
    return "/".join(part for part in (storage.bucket, storage.prefix.strip("/"), name) if part)


def _connect(storage: ObjectStorage) -> Any:
    """The connection to object storage. Credentials come from the environment. Files of any size are sent in parts."""
    from pyarrow import fs  # its SDK takes a second to load

    scheme, _, server = (storage.endpoint or "https://").rstrip("/").partition("://")
    return fs.S3FileSystem(
        region=storage.region or ("us-east-1" if storage.endpoint else None),
        scheme=scheme,
        endpoint_override=server or None,
        connect_timeout=10,
        request_timeout=60,
    )


@contextlib.contextmanager
def _explained(output: Output) -> Iterator[None]:
    try:
        yield
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        raise OutputError(f"spec.output: the models cannot be copied to {output.place}: {error}") from error
    except OSError as error:
        if output.s3 is None:
            raise
        told = f"spec.output: the models cannot be copied to {output.place}: {error}"
        raise (OutputError if any(word in str(error) for word in _HOPELESS) else OSError)(told) from error
