"""Models of a Hugging Face hub. Each is downloaded once, and a run always uses the same commit.

A model is downloaded in two parts. The small files describe it. They come first, so that rollouts can start and an
unusable model is refused at once. The weights follow. `hub.json` in the run directory records the commit and the files
of each model, so a resumed run requests nothing that it already has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads import hub_client
from dovetail.coordinator.data.downloads.hub_client import FINAL, Request, small_files
from dovetail.coordinator.data.downloads.proof import prove
from dovetail.manifest.checks.model_contents import INDEX, weight_files
from dovetail.manifest.types import HubAccess as HubSpec
from dovetail.protocol.errors import last_said
from dovetail.protocol.files.durable import write_whole
from dovetail.protocol.process.env import HUB_CACHE

COMMITS = "hub.json"
MAIN = "main"
# The seconds to wait between attempts that bring no byte of progress. After the last one the hub counts as unreachable.
WAITS = (2.0, 4.0, 8.0, 16.0)
# This many bytes of a disk are kept free. A run needs them to write its last files and to report that the disk is full.
SPARE_BYTES = 64 << 20
GB = 1e9


@dataclass
class _Model:
    """A repository in use. `files` has the name and size in bytes of all its files at the commit. It is empty if they
    are unknown."""

    field: str
    repository: str
    revision: str
    commit: str
    folder: Path
    files: dict[str, int | None]


class Hub:
    """Downloads the repositories of a run. If `run_dir` is None, nothing is recorded. With `pods`, files go to the run
    directory, which all pods can read, unless they are in the cache that all pods mount (spec.hub.cacheClaim).
    Otherwise they go to the user's own cache on this machine. `note` is called with a sentence about the progress of a
    download. `clock` returns monotonic seconds. Methods raise DataError with a sentence for the user."""

    def __init__(
        self,
        spec: HubSpec,
        run_dir: Path | None = None,
        *,
        pods: bool = False,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spec = spec
        self._pods = pods
        self._cache = run_dir / "hub" if pods and run_dir is not None else None
        self._record = run_dir / COMMITS if run_dir is not None else None
        self._shared = Path(HUB_CACHE) if pods and spec.cache_claim else None
        self._note = note
        self._clock = clock
        self._sleep = sleep
        self._models: dict[str, _Model] = {}

    def describe(self, name: str, field: str, repository: str, revision: str | None, code: bool = False) -> Path:
        """The folder of a repository, with the files that describe the model, and later its weights. `name` is the
        model's name. `code` says whether to include the model's Python files."""
        wanted = revision or MAIN
        known = self._known().get(f"{repository}@{wanted}", {})
        model = self._from_shared(field, repository, wanted, known.get("commit")) or self._from_record(
            field, repository, wanted, known, code
        )
        if model is None:
            answer = self._fetch(
                field, Request(repository, known.get("commit") or wanted, self._cache_name, code), wanted
            )
            model = _Model(field, repository, wanted, answer["commit"], Path(answer["folder"]), answer["files"])
        self._models[name] = model
        self._remember(model)
        return model.folder

    def files(self, name: str) -> list[str]:
        """The names of all files in the model's repository. For a model in a shared cache these are the files that the
        cache has."""
        model = self._models[name]
        return sorted(model.files) or sorted(path.name for path in model.folder.iterdir())

    def prove(self, trusted: Callable[[str], bool]) -> None:
        """Prove all models that were described (`downloads.proof`), each once. `trusted` says whether a model's own
        code may run."""
        if self._record is None:
            return
        names: dict[tuple[Path, bool], list[str]] = {}
        for name, model in self._models.items():
            if name != "tokenizer":
                names.setdefault((model.folder, trusted(name)), []).append(name)
        for (folder, code), same in names.items():
            model = self._models[same[0]]
            records = [self._record.parent / "proofs" / f"{name}.json" for name in same]
            prove(folder, f"{model.field}: {model.repository}", records, code, self._note)

    def download_weights(self) -> None:
        """Download the weights of all models that were described."""
        for name, model in self._models.items():
            if not model.files:
                continue  # it is in the shared cache, and complete
            weights = weight_files(list(model.files), read_json(model.folder / INDEX))
            missing = [each for each in weights if not _complete(model.folder / each, model.files.get(each))]
            if missing and name != "tokenizer":
                self._check_room(model, missing)
                self._fetch(
                    model.field,
                    Request(model.repository, model.commit, self._cache_name, names=tuple(missing)),
                    model.revision,
                    model,
                )

    @property
    def commits(self) -> dict[str, dict[str, str]]:
        """The repository and commit of each model, by the model's name."""
        return {name: {"repository": m.repository, "commit": m.commit} for name, m in self._models.items()}

    # ------------------------------------------------------------ models on the disk

    @property
    def _cache_name(self) -> str | None:
        return None if self._cache is None else str(self._cache)

    def _from_shared(self, field: str, repository: str, revision: str, commit: str | None) -> _Model | None:
        """A model that is complete in the shared cache. None if there is none."""
        if self._shared is None:
            return None
        roots = (self._shared, self._shared / "hub")
        folders = [root / f"models--{repository.replace('/', '--')}" for root in roots]
        for folder in (each for each in folders if each.is_dir()):
            reference = folder / "refs" / revision
            found = commit or (reference.read_text().strip() if reference.is_file() else revision)
            snapshot = folder / "snapshots" / found
            if not (snapshot / "config.json").is_file():
                continue
            weights = weight_files([path.name for path in snapshot.iterdir()], read_json(snapshot / INDEX))
            if weights and all((snapshot / name).is_file() for name in weights):
                return _Model(field, repository, revision, found, snapshot, {})
        return None

    def _from_record(
        self, field: str, repository: str, revision: str, known: dict[str, Any], code: bool
    ) -> _Model | None:
        """A model whose small files an earlier process of the run has downloaded. None if there is none."""
        files, folder = known.get("files") or {}, Path(known.get("folder") or "/nonexistent")
        if not files or not all(_complete(folder / name, files[name]) for name in small_files(list(files), code)):
            return None
        return _Model(field, repository, revision, known["commit"], folder, files)

    def _known(self) -> dict[str, dict[str, Any]]:
        found = read_json(self._record) if self._record is not None else None
        return found if isinstance(found, dict) else {}

    def _remember(self, model: _Model) -> None:
        if self._record is None:
            return
        known = self._known()
        entry = {"commit": model.commit, "folder": str(model.folder), "files": model.files}
        if known.get(f"{model.repository}@{model.revision}") != entry:
            known[f"{model.repository}@{model.revision}"] = entry
            write_whole(self._record, (json.dumps(known, indent=1) + "\n").encode())

    # ------------------------------------------------------------ downloads

    def _check_room(self, model: _Model, missing: list[str]) -> None:
        """Raises DataError if the disk has too little space for the weights, so that the job fails now and not after an
        hour."""
        at = self._cache if self._cache is not None else model.folder
        needed = self._size(model, missing) - self._have(missing, model)
        free = shutil.disk_usage(at).free
        if needed + SPARE_BYTES > free:
            raise self._full(
                model.field, model.repository, f"it needs {needed / GB:.2f} GB, and {free / GB:.2f} GB are free"
            )

    def _fetch(self, field: str, request: Request, revision: str, model: _Model | None = None) -> dict[str, Any]:
        """The answer of a process that downloads. The process is started again as long as it makes progress."""
        deadline = self._clock() + self._spec.timeout_seconds
        names = list(request.names or ())
        waits, had = list(WAITS), self._have(names, model)
        while True:
            answer = self._run(request, deadline, names, model)
            if answer is None:
                raise self._late(field, request, names, model)
            if "error" not in answer:
                return answer
            have = self._have(names, model)
            if have > had:
                waits, had = list(WAITS), have
            if answer["error"] in FINAL or not waits:
                raise self._error(field, request, revision, answer)
            self._sleep(min(waits.pop(0), max(0.0, deadline - self._clock())))

    def _run(self, request: Request, deadline: float, names: list[str], model: _Model | None) -> dict[str, Any] | None:
        """The answer of one attempt. It is None if the deadline has passed."""
        # Nobody reads while the process works, and a pipe takes 64 KiB. The list of a repository's files may be longer,
        # and the disk may be full.
        with open(os.memfd_create("said"), "w+") as said, open(os.memfd_create("complaints"), "w+") as complaints:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", hub_client.__name__],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=complaints,
                text=True,
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            )
            assert process.stdin is not None
            try:
                process.stdin.write(request.line())
                process.stdin.flush()
                while self._clock() < deadline:
                    try:
                        # Its standard input stays open. It closes when this process ends, and then the download
                        # ends too.
                        process.wait(0.2)
                        break
                    except subprocess.TimeoutExpired:
                        if model is not None:
                            self._note(f"downloading {request.repository}: {self._progress(names, model)}")
                else:
                    return None
            finally:
                process.kill()
                process.wait()
                process.stdin.close()
            said.seek(0)
            complaints.seek(0)
            lines, told = said.read().splitlines(), complaints.read()
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            last = last_said(told, f"exit code {process.returncode}")
            return {"error": "transient", "message": last[:300], "endpoint": "the hub"}
        return dict(answer)

    def _size(self, model: _Model, names: list[str]) -> int:
        return sum(model.files.get(name) or 0 for name in names)

    def _have(self, names: list[str], model: _Model | None) -> int:
        """The bytes of these files that are on the disk, including incomplete files."""
        if model is None:
            return 0
        done = sum(path.stat().st_size for name in names if (path := model.folder / name).is_file())
        blobs = model.folder.parents[1] / "blobs"
        for path in blobs.glob("*.incomplete"):
            try:
                done += path.stat().st_size
            except OSError:
                continue  # it is complete now
        return done

    def _progress(self, names: list[str], model: _Model) -> str:
        return f"{self._have(names, model) / GB:.2f} of {self._size(model, names) / GB:.2f} GB"

    # ------------------------------------------------------------ error messages

    def _full(self, field: str, repository: str, why: str) -> DataError:
        if self._pods:
            fix = "name a larger claim in spec.checkpoint.volume, or make this one larger"
        else:
            fix = "free some space, or let HF_HOME name a folder on a larger disk"
        return DataError(f"{field}: the disk has no room for {repository} ({why}); {fix}")

    def _late(self, field: str, request: Request, names: list[str], model: _Model | None) -> DataError:
        got = f" ({self._progress(names, model)})" if model is not None else ""
        return DataError(
            f"{field}: {request.repository} was not downloaded within {self._spec.timeout_seconds} s{got}; raise "
            f"spec.hub.timeoutSeconds, or see why the hub is slow{self._closed()}"
        )

    def _closed(self) -> str:
        """The possible reasons why a pod cannot reach the hub."""
        return "; the chart lets pods connect to what networkPolicy.jobEgress.hub names alone" if self._pods else ""

    def _error(self, field: str, request: Request, revision: str, answer: dict[str, Any]) -> DataError:
        kind, hub, repository = answer["error"], answer["endpoint"], request.repository
        secret = self._spec.token_secret
        named = f"the key {secret.key} of the Secret {secret.name}" if secret is not None else "a Secret"
        give = f"in {named} (spec.hub.tokenSecret)" if self._pods else "with `hf auth login` or in HF_TOKEN"
        if kind == "full":
            return self._full(field, repository, "it filled up during the download")
        sentences = {
            "gated": f"{repository} is gated; ask for access on its page at {hub}, and give a token of that account "
            + give,
            "missing": f"{hub} has no {repository}, or it is private; correct the name, or give a token that may read "
            f"it {give}",
            "revision": f"{repository} has no branch, tag or commit {revision}; correct the revision",
            "token": f"{hub} does not accept the token for {repository}; give a valid one {give}",
            "forbidden": f"the token may not read {repository} at {hub}; give one that may {give}",
            "invalid": f"{repository} is no name of a repository; write owner/name",
        }
        told = sentences.get(kind)
        if told is None:
            told = f"{repository} cannot be downloaded from {hub}: {answer['message']}{self._closed()}"
        return DataError(f"{field}: {told}")


def _complete(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def read_json(path: Path) -> Any:
    """The value of a JSON file. None if the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
