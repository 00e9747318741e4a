"""A process that downloads one repository of a Hugging Face hub:
`python -P -m dovetail.coordinator.data.downloads.hub_client`.

Its input is one JSON line (`Request`). Its output is one JSON line: {"commit", "folder", "files": {name: bytes}} or
{"error": kind, "message", "endpoint"}. The process ends when its input ends. It is a separate process so that it can be
ended at a deadline, because huggingface_hub has no deadline for a whole download. The token, the hub's address and the
user's cache come from the environment, as huggingface_hub reads them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import causes
from dovetail.manifest.checks.model_contents import weight_files

# The small files are configurations, tokenizers and templates, and Python code if the manifest allows it.
SMALL = (".json", ".model", ".txt", ".jinja")
CODE = ".py"
# The kinds of errors that another attempt cannot fix. All others are `transient`.
FINAL = ("gated", "missing", "revision", "token", "forbidden", "full", "invalid")


@dataclass(frozen=True)
class Request:
    """A request to download files. If `cache_dir` is None, the user's own cache is used. If `names` is None, the small
    files are downloaded, and otherwise these files."""

    repository: str
    revision: str
    cache_dir: str | None
    code: bool = False
    names: tuple[str, ...] | None = None

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def small_files(names: Iterator[str] | list[str], code: bool) -> list[str]:
    """The files of a repository that describe its model. Files in folders belong to other formats, so they are left
    out."""
    wanted = (*SMALL, CODE) if code else SMALL
    return sorted(name for name in names if "/" not in name and name.endswith(wanted))


def download(request: Request) -> dict[str, Any]:
    """Download the files of a request. Returns the answer. Raises what huggingface_hub raises."""
    from huggingface_hub import HfApi, snapshot_download

    named = request.names is not None
    kinds = (*SMALL, CODE) if request.code else SMALL
    folder = Path(
        snapshot_download(
            request.repository,
            revision=request.revision,
            cache_dir=request.cache_dir,
            allow_patterns=list(request.names or ()) if named else [f"*{kind}" for kind in kinds],
            ignore_patterns=None if named else ["*/*"],
            max_workers=4,
        )
    )
    files: dict[str, int | None] = {}
    if not named:
        try:
            info = HfApi().model_info(request.repository, revision=folder.name, files_metadata=True)
            files = {each.rfilename: each.size for each in info.siblings or []}
        except Exception:
            # Without a network, a model in the cache is good enough.
            files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
            if not weight_files(list(files), None):
                raise
    return {"commit": folder.name, "folder": str(folder), "files": files}


def kind_of(error: BaseException) -> str:
    """The kind of an error of huggingface_hub, for the user. huggingface_hub hides some errors in others."""
    from huggingface_hub import errors

    for each in causes(error):
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return "full"
        if isinstance(each, errors.GatedRepoError):
            return "gated"
        if isinstance(each, errors.RevisionNotFoundError):
            return "revision"
        if isinstance(each, errors.RepositoryNotFoundError):
            return "missing"
        if isinstance(each, errors.HfHubHTTPError) and each.response is not None:
            status = each.response.status_code
            known = {401: "token", 403: "forbidden", 404: "missing"}.get(status)
            if known is not None:
                return known
        if isinstance(each, errors.HFValidationError):
            return "invalid"
    return "transient"


def make_room(request: Request) -> None:
    """Delete incomplete downloads. Otherwise a full disk would stay full, and the reason for the failure could not be
    written."""
    if request.cache_dir is not None:
        for path in Path(request.cache_dir).rglob("*.incomplete"):
            with contextlib.suppress(OSError):
                path.unlink()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    request = Request(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants

    answer: dict[str, Any]
    try:
        answer = download(request)
    except Exception as error:
        kind = kind_of(error)
        if kind == "full":
            make_room(request)
        answer = {"error": kind, "message": " ".join(str(error).split())[:300], "endpoint": constants.ENDPOINT}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
