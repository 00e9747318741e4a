"""Copies the trained models to the place that spec.output names."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.manifest.types import TRAINED_MODELS, ObjectStorage, Output

# A folder without this file does not count as a model, so it is written last.
LAST = "config.json"
CHUNK = 16 << 20
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


def check(output: Output | None) -> None:
    """Write a small file where the models will go, and delete it, so that a wrong bucket or key is noticed before the
    training. Raises OutputError, or OSError for an error that may pass."""
    if output is None:
        return
    with _explained(output):
        if output.path is not None:
            Path(output.path).mkdir(parents=True, exist_ok=True)
            mark = Path(output.path) / f".dovetail-{os.getpid()}"
            mark.touch()
            mark.unlink()
        elif output.s3 is not None:
            files, mark_name = _connect(output.s3), _key(output.s3, ".dovetail")
            with files.open_output_stream(mark_name) as file:
                file.write(b"Dovetail may write here.\n")
            with contextlib.suppress(OSError):  # a user who may write may lack the right to delete
                files.delete_file(mark_name)


def deliver(output: Output | None, models: Path) -> list[str]:
    """Copy all trained models in the folder `models`, and return their names. Models that were copied before are
    replaced. Raises OutputError, or OSError for an error that may pass."""
    names = trained(models)
    if output is not None:
        with _explained(output):
            for name in names:
                if output.path is not None:
                    _copy(models / name, Path(output.path) / name)
                elif output.s3 is not None:
                    _upload(models / name, output.s3, name)
    return names


def _copy(source: Path, target: Path) -> None:
    """Copy a model to a folder. A reader of `target` finds the old model, nothing, or the new one."""
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, copy_function=shutil.copyfile)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _upload(source: Path, storage: ObjectStorage, name: str) -> None:
    files = _connect(storage)
    found = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path == source / LAST)
    for path in found:
        key = _key(storage, f"{name}/{path.relative_to(source).as_posix()}")
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
