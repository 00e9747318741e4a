"""Says whether two RLHFJobs would make Jobs of the same names. The functions are pure.

A group's Jobs are named after the RLHFJob and the group. So job `a-b` with group `c` and job `a` with group `b-c` would
both have a Job `a-b-c-0`."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.operator.reconcile.children import Object
from dovetail.protocol.process.process_names import COORDINATOR


def parts(document: Object) -> list[str]:
    """The parts of the names of an RLHFJob's Jobs that follow its own name."""
    groups = (document.get("spec") or {}).get("groups") or []
    return [COORDINATOR, *(str(group.get("name")) for group in groups)]


def shared(document: Object, find: Callable[[str], Object | None], started: Callable[[str], bool]) -> str | None:
    """A sentence if another RLHFJob has the names that this one needs. None if the names are free. `find` returns an
    RLHFJob of the same namespace by its name. `started` says whether a job has a JobSet. Of two jobs without a JobSet
    the older one comes first."""
    name = str(document["metadata"]["name"])
    for part in parts(document):
        words = f"{name}-{part}".split("-")
        for at in range(1, len(words)):
            other, theirs = "-".join(words[:at]), "-".join(words[at:])
            there = find(other) if other != name else None
            if there is None or theirs not in parts(there):
                continue
            if started(other) or _age(there) < _age(document):
                return (
                    f"Jobs of group {part} would have the names of the Jobs of RLHFJob {other}, group {theirs} "
                    f"({name}-{part}-0). Delete this job, and create it with another name of the job or of the group."
                )
    return None


def _age(document: Object) -> tuple[str, str]:
    metadata = document["metadata"]
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("uid"))
