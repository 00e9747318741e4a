"""Fingerprints of the data sources and of model folders. They show whether these changed during a run. They are taken
when the run begins, and compared when it is resumed; those of models also before each load."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.data_files import content_digest, source_files
from dovetail.coordinator.data.downloads.hub import read_json
from dovetail.coordinator.data.records import Records
from dovetail.coordinator.data.sources import Rows
from dovetail.coordinator.store.store import KeyValues
from dovetail.manifest.checks.model_contents import INDEX, weight_files
from dovetail.manifest.types import DataSource, RLHFJobSpec
from dovetail.protocol.process.env import ACTOR_CONFIG

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


# What is read of a model's or tokenizer's folder, beside weights.
_READ = re.compile(
    r"(?:generation_)?config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|"
    r"chat_template\..*|[^/]+\.(?:py|model|tiktoken|jinja)|model\.safetensors\.index\.json"
)
# A file that was written just before it was read may be written again within the same tick of the clock of its times.
_TICK_NS = 100_000_000


class ModelFolders:
    """Shows whether the folders that the job's processes load are what they were when the run first had them. A file is
    read whole once. Later it is read again only if its size, times or inode differ.

    `sources` has the models' folders by name. The run's own folders, such as models/sft, are below `run_dir`. Call it
    in the thread of the store."""

    def __init__(self, run_dir: Path, sources: Mapping[str, object], records: KeyValues) -> None:
        self._run_dir, self._records = run_dir, records
        self._names = {path: f"spec.models.{name}" for name, path in sources.items() if isinstance(path, Path)}

    async def check_all(self) -> None:
        """Check all sources and the run's own folders, and remember those that are new. Raises DataError."""
        trained = (self._run_dir / "models" / name for name in ("sft", "reward"))
        known = (folder for folder in trained if self._records.get(self._key(folder)) is not None)
        await self.check([*self._names, *self.for_rollouts, *known])

    @property
    def for_rollouts(self) -> list[Path]:
        """The folders from which rollouts start."""
        return [self._run_dir / "tokenizer", self._run_dir / ACTOR_CONFIG]

    async def check(self, folders: Iterable[Path | None]) -> None:
        """Check these folders, and remember those that are new. Raises DataError that names the first file that is not
        what it was."""
        for folder in dict.fromkeys(folder for folder in folders if folder is not None):
            known = self._records.get(self._key(folder))
            found = await asyncio.to_thread(self._look, folder, known)
            if found != known:
                self._records.put(self._key(folder), found)

    async def remember(self, folder: Path) -> None:
        """Take a folder that the run has just written as it is."""
        self._records.put(self._key(folder), await asyncio.to_thread(self._look, folder, None))

    def _name(self, folder: Path) -> str:
        return self._names.get(folder) or os.path.relpath(folder, self._run_dir)

    def _key(self, folder: Path) -> str:
        return f"folders/{self._name(folder)}"

    def _look(self, folder: Path, known: Mapping[str, Any] | None) -> dict[str, Any]:
        """The marks of the folder's files. Raises DataError if `known` has others."""
        described = folder not in self._names  # at its end the run writes such files into its models
        names = {
            path.relative_to(folder).as_posix()
            for path in (*folder.glob("*"), *folder.glob("*/*.jinja"))
            if _READ.fullmatch(path.name) and not (described and path.name.startswith(("chat_template", "generation_")))
        }
        names |= {*weight_files([path.name for path in folder.glob("*")], read_json(folder / INDEX))}
        names |= {path.relative_to(folder).as_posix() for path in folder.glob("value_head/model.safetensors")}

        def one(name: str) -> dict[str, Any] | None:
            before = None if known is None else known.get(name)
            return None if known is not None and before is None else _mark(folder / name, before)

        with ThreadPoolExecutor(4) as pool:
            found = dict(zip(sorted(names), pool.map(one, sorted(names)), strict=True))
        if known is not None:
            self._same(folder, known, found)
        return {name: mark for name, mark in found.items() if mark is not None}

    def _same(self, folder: Path, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for name in sorted({*found, *known}):
            now, before = found.get(name), known.get(name)
            if before is not None and now is not None and now["sha256"] == before["sha256"]:
                continue
            what = "is new" if before is None else "is gone" if now is None else "has changed"
            raise DataError(
                f"{self._name(folder)}: {folder / name} {what} since the run began, which has loaded what was there; "
                f"{'move it away' if before is None else 'put the old file back'}, or start a new run"
            )


def _mark(path: Path, before: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a file is now. None if it is gone. It is not read if it has the size, times and inode of `before`."""
    began = time.time_ns()
    try:
        about = path.stat()
        stat = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        if before is not None and before["stat"] == stat:
            return dict(before)
        digest = content_digest(path)
    except FileNotFoundError:
        return None
    fresh = began - max(about.st_mtime_ns, about.st_ctime_ns) < _TICK_NS
    return {"stat": None if fresh else stat, "sha256": digest}
