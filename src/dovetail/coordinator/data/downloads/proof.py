"""Proves that Dovetail computes a hub's model rightly, before its weights are downloaded (`dovetail model check`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.protocol.errors import last_said
from dovetail.protocol.files.durable import write_whole
from dovetail.protocol.process.extras import installed_versions

# A small copy is proved in seconds. On a machine with much other work it takes minutes.
DEADLINE = 900.0


def prove(
    folder: Path,
    field: str,
    records: Sequence[Path],
    trusted: bool,
    note: Callable[[str], None],
    deadline: float = DEADLINE,
) -> None:
    """Prove the model whose config.json is in `folder`, and write what was found to `records`. A record is kept if the
    same model passed with the versions that are installed now. Raises DataError, which names `field`, if the model must
    not be trained.

    A coordinator without torch (that of a cluster) proves nothing, and the records say so."""
    versions = installed_versions()
    of = {"model": str(folder), "trusted": trusted, "versions": versions}
    kept = [_passed(record, of) for record in records]
    if all(kept):
        return
    found = next((each for each in kept if each), None)
    if found is None:
        if "torch" in versions:
            note("proving the model on a small copy")
            found = {**of, "proved": True, **_proved(folder, field, trusted, deadline)}
        else:
            found = {**of, "ok": True, "proved": False, "findings": []}
    for record in records:
        record.parent.mkdir(exist_ok=True)
        write_whole(record, json.dumps(found, indent=1).encode())
    wrong = next((each for each in found["findings"] if each["state"] == "problem"), None)
    if wrong is not None:
        mend = f"; {wrong['mend']}" if wrong["mend"] else ""
        raise DataError(f"{field}: Dovetail does not compute this model rightly: {wrong['says']}{mend}")


def _passed(record: Path, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a record says, if it is about the same model and versions, and the model passed. Otherwise None."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return found if found["ok"] and all(found[name] == value for name, value in of.items()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _proved(folder: Path, field: str, trusted: bool, deadline: float) -> dict[str, Any]:
    """The findings. The proof runs in a process of its own, because the coordinator does not import torch."""
    command = [sys.executable, "-P", "-m", "dovetail.tools.model_check", str(folder), str(int(trusted))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"{field}: its proof on a small copy did not end in {deadline:.0f} seconds") from None
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = last_said(done.stderr, f"exit code {done.returncode}")
        raise DataError(f"{field}: its proof on a small copy failed: {last[:300]}") from None
