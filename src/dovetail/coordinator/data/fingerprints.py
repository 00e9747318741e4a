"""Fingerprints of the data sources. They show whether data changed during a run. They are taken when the run begins,
and compared when it is resumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.data_files import content_digest, source_files
from dovetail.coordinator.data.records import Records
from dovetail.coordinator.data.sources import Rows
from dovetail.manifest.types import DataSource, RLHFJobSpec

Fingerprint = dict[str, Any]
_COMMIT = re.compile(r"@([0-9a-f]{40})/")


def fingerprint(source: DataSource, records: Records[Any], field: str, base_dir: Path) -> Fingerprint | None:
    """The fingerprint of a source as it is now. It is None for synthetic data, because the manifest determines that
    data.

    For files it has name, size in bytes and SHA-256. For hub data it has the repository, the requested revision, and
    the commit if `datasets` reports it. Raises DataError."""
    if source.path is not None:
        files = source_files(base_dir / source.path, field)
        return {"files": [{"name": p.name, "size": p.stat().st_size, "sha256": content_digest(p)} for p in files]}
    if source.hugging_face is not None:
        return {"huggingFace": source.hugging_face, "revision": source.revision, "commit": _commit(records)}
    return None


def compare(
    spec: RLHFJobSpec,
    base_dir: Path,
    known: Mapping[str, Fingerprint],
    found: Mapping[str, Fingerprint],
) -> None:
    """Compare the fingerprints. Raises DataError that names the first file or repository that has changed since the run
    began."""
    for field, now in found.items():
        before = known.get(field)
        if before is None:
            continue
        if "huggingFace" in now:
            _same_commit(field, before, now)
        else:
            _same_files(field, before, now, _folder(spec, field, base_dir))


def _folder(spec: RLHFJobSpec, field: str, base_dir: Path) -> Path:
    kind, index = field.removeprefix("spec.data.").rstrip("]").split("[")
    path: Path = base_dir / str(getattr(spec.data, kind)[int(index)].path)
    return path if path.is_dir() else path.parent


def _same_commit(field: str, before: Fingerprint, now: Fingerprint) -> None:
    old, new = before.get("commit"), now.get("commit")
    if old and new and old != new:
        raise DataError(
            f"{field}: the data set {now['huggingFace']} has changed since the run began: it was at commit {old} and "
            f"is at {new}; set {field}.revision to {old}, or start a new run"
        )
    if not (old and new) and before.get("revision") != now.get("revision"):
        raise DataError(
            f"{field}.revision may not change from {before.get('revision')} to {now.get('revision')} in a run: whether "
            "the data is the same cannot be told; undo the change, or start a new run"
        )


def _same_files(field: str, before: Fingerprint, now: Fingerprint, folder: Path) -> None:
    olds, news = ({file["name"]: file for file in each.get("files", [])} for each in (before, now))
    for name in sorted(olds.keys() | news.keys()):
        old, new = olds.get(name), news.get(name)
        if old is not None and new is not None and old["sha256"] == new["sha256"]:
            continue
        what = "is new" if old is None else "is gone" if new is None else "has changed"
        fix = "move it away" if old is None else "put the old file back"
        raise DataError(
            f"{field}.path: {folder / name} {what} since the run began, whose batches were drawn from what was there; "
            f"{fix}, or start a new run"
        )


def _commit(records: Records[Any]) -> str | None:
    """The commit of hub data. The URLs of the files that `datasets` downloaded contain it."""
    info = getattr(records.table, "info", None) if isinstance(records, Rows) else None
    checksums = getattr(info, "download_checksums", None) or {}
    commits = {match[1] for address in checksums if (match := _COMMIT.search(str(address)))}
    return commits.pop() if len(commits) == 1 else None
