"""Proves that Dovetail computes a hub's model rightly, before its weights are downloaded (`dovetail model check`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.protocol.files.durable import write_whole

# A small copy is proved in seconds. On a machine with much other work it takes minutes.
DEADLINE = 900.0


def prove(
    folder: Path, field: str, record: Path, trusted: bool, note: Callable[[str], None], deadline: float = DEADLINE
) -> None:
    """Prove the model whose config.json is in `folder`, and write what was found to `record`. It does nothing if the
    record has the same model already. Raises DataError, which names `field`, if the model must not be trained.

    A coordinator without torch (that of a cluster) proves nothing, and the record says so."""
    if _of(record) == str(folder):
        return
    if find_spec("torch") is None:
        found: dict[str, Any] = {"ok": True, "proved": False, "findings": []}
    else:
        note("proving the model on a small copy")
        found = {"proved": True, **_proved(folder, field, trusted, deadline)}
    record.parent.mkdir(exist_ok=True)
    write_whole(record, json.dumps({"model": str(folder), **found}, indent=1).encode())
    wrong = next((each for each in found["findings"] if each["state"] == "problem"), None)
    if wrong is not None:
        mend = f"; {wrong['mend']}" if wrong["mend"] else ""
        raise DataError(f"{field}: Dovetail does not compute this model rightly: {wrong['says']}{mend}")


def _of(record: Path) -> str | None:
    """The folder of the model that a record is about, if the model passed."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return str(found["model"]) if found["ok"] else None
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
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(f"{field}: its proof on a small copy failed: {last[:300]}") from None
