"""Remembers which of a job's small objects were found as they should be, so that they are not rendered and compared
again with every event of a pod."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from dovetail.operator.children import Children
from dovetail.operator.render.context import Context, digest

KINDS = frozenset(
    {
        *("PersistentVolumeClaim", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service", "NetworkPolicy"),
        "PodDisruptionBudget",
    }
)
REMEMBERED = 10_000


@dataclass(frozen=True)
class Look:
    """What was compared. Job, plan and settings are the very objects: others may differ."""

    context: Context
    started: bool
    running: bool
    versions: str

    def same(self, other: Look) -> bool:
        mine, theirs = self.context, other.context
        return (
            mine.job is theirs.job
            and mine.plan is theirs.plan
            and mine.settings is theirs.settings
            and mine.sizes == theirs.sizes
            and mine.room == theirs.room
            and self.started == other.started
            and self.running == other.running
            and self.versions == other.versions
        )


@dataclass
class Drift:
    """Of all jobs, by uid."""

    _fine: dict[str, Look] = field(default_factory=dict)

    def none_since(self, look: Look) -> bool:
        """Whether this is what was found fine before."""
        before = self._fine.get(look.context.uid)
        return before is not None and before.same(look)

    def found_fine(self, look: Look) -> None:
        """The children lack nothing."""
        self._fine.pop(look.context.uid, None)
        while len(self._fine) >= REMEMBERED:
            self._fine.pop(next(iter(self._fine)))
        self._fine[look.context.uid] = look


def look_at(context: Context, children: Children, started: bool, running: bool) -> Look:
    """`started`: the job has a JobSet; `running`: and a pod of it runs."""
    versions = []
    for (kind, name), thing in sorted(children.objects.items(), key=lambda item: item[0]):
        if kind in KINDS:
            metadata = thing["metadata"]
            # A budget's status changes with every pod.
            version = metadata.get("generation" if kind == "PodDisruptionBudget" else "resourceVersion")
            more = (metadata.get("labels"), metadata.get("ownerReferences"))
            versions.append((kind, name, metadata.get("uid"), version or uuid4().hex, *more))
    return Look(context, started, running, digest(versions))
