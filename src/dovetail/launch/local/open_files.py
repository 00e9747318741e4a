"""Raises the limit of open files. Some machines allow fewer than a job's processes need. They would fail one after the
other."""

from __future__ import annotations

import contextlib
import resource

from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.errors import UsageError
from dovetail.protocol.plan import Plan

# The open files of a process without samples. They are libraries, logs, and sockets of vLLM and of the trainers.
BASE_FILES = 256


def files_needed(spec: RLHFJobSpec, plan: Plan) -> int:
    """The number of open files that the coordinator needs. It needs the most of all processes, because it has a
    connection for each sample that is generated."""
    streams = len(plan.rollouts) * spec.generation.max_concurrent
    return BASE_FILES + 16 * len(plan.trainers) + min(streams, spec.ppo.global_batch_size)


def allow_files(needed: int) -> None:
    """Raise this process's limit to `needed`. The processes that it starts inherit it. Raises UsageError if that is not
    allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise UsageError(
        f"a process may have {hard} files open here and the job needs {needed}; "
        f"raise the limit (`ulimit -Hn {needed}` as root, or nofile in /etc/security/limits.conf), or lower "
        f"generation.maxConcurrent"
    )
