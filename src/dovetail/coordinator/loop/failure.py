"""Says why a run fails, in one sentence for the user."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from dovetail.coordinator.data.data_error import DataError, causes
from dovetail.coordinator.reporting.health import UnhealthyError
from dovetail.coordinator.rewards.calls import RewardError
from dovetail.coordinator.samples.in_flight import GenerationError
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.delivery import OutputError
from dovetail.coordinator.store.manifest_changes import ChangeError
from dovetail.coordinator.workers.trainer_group import TrainerError

# Errors whose message is a sentence for the user. For others the traceback is printed too.
EXPLAINED = (
    *(ChangeError, DataError, StoreError, OutputError),
    *(TrainerError, GenerationError, RewardError, UnhealthyError),
)
FULL = (errno.ENOSPC, errno.EDQUOT)


def sentence(error: BaseException, run_dir: Path) -> str:
    """The sentence for `error`. For an unexpected error it names the type and the place in the code that raised it."""
    if (full := disk_full(error)) is not None:
        where = full.filename if isinstance(full.filename, str) else run_dir
        return f"the disk that holds {where} is full; free some space, then resume the run"
    if isinstance(error, EXPLAINED):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError | TimeoutError | ValueError) and text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def is_final(error: Exception) -> bool:
    """Whether a restart from the store would only fail again. A busy port, a broken connection or an error of our own
    may be gone after a moment, so the coordinator is restarted, as often as the limit of restarts allows."""
    return isinstance(error, (*EXPLAINED, ValueError, TimeoutError)) or disk_full(error) is not None


def disk_full(error: BaseException) -> OSError | None:
    """The error itself or one of its causes, if it says that a disk is full. Otherwise None."""
    for seen in causes(error):
        if isinstance(seen, OSError) and seen.errno in FULL:
            return seen
        if isinstance(seen, BaseExceptionGroup):
            return next((found for part in seen.exceptions if (found := disk_full(part))), None)
    return None
