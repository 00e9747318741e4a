"""Remembers which of a job's small objects were found as they should be, so that they are not rendered and compared
again with every event of a pod."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from dovetail.kube.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
)
from dovetail.operator.children import Children
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.objects import SUPPORTING

KINDS = frozenset(SUPPORTING)
REMEMBERED = 10_000


@dataclass(frozen=True)
class Look:
    """What was compared. Job, plan and settings are the very objects: others may differ. `versions`: by kind, what is
    there."""

    context: RenderContext
    started: bool
    running: bool
    versions: Mapping[str, int]

    def same(self, other: Look) -> bool:
        return (
            self.renders_as(other)
            and self.context.sizes == other.context.sizes
            and self.started == other.started
            and self.running == other.running
            and self.versions == other.versions
        )

    def renders_as(self, other: Look) -> bool:
        """But for what depends on the pods of each group."""
        mine, theirs = self.context, other.context
        return (
            mine.job is theirs.job
            and mine.plan is theirs.plan
            and mine.settings is theirs.settings
            and mine.room == theirs.room
        )


@dataclass
class Drift:
    """Of all jobs, by uid: the last look, the kinds that were fine, and whether nothing was to be done at all."""

    _seen: dict[str, tuple[Look, frozenset[str], bool]] = field(default_factory=dict)

    def fine(self, look: Look) -> set[str] | None:
        """The kinds of which the job's object is there and as it was when it was found fine; None: nothing has changed
        since nothing was to be done."""
        before, kinds, all_fine = self._seen.get(look.context.uid, (None, frozenset[str](), False))
        if before is None or not before.renders_as(look):
            return set()
        if all_fine and before.same(look):
            return None
        if before.started and not look.started:
            kinds -= {CONFIG_MAP.kind}  # a running job's is left alone
        if before.context.sizes != look.context.sizes:
            kinds -= {DISRUPTION_BUDGET.kind}
        return {kind for kind in kinds if kind in look.versions and before.versions.get(kind) == look.versions[kind]}

    def found(self, look: Look, fine: Iterable[str], all_fine: bool) -> None:
        """`fine`: kinds that are there and as they should be."""
        self._seen.pop(look.context.uid, None)
        while len(self._seen) >= REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._seen[look.context.uid] = look, frozenset(fine), all_fine


def look_at(context: RenderContext, children: Children, started: bool, running: bool) -> Look:
    """`started`: the job has a JobSet; `running`: and a pod of it runs."""
    versions: dict[str, int] = {}
    for (kind, name), thing in sorted(children.objects.items(), key=lambda item: item[0]):
        if kind in KINDS:
            metadata = thing["metadata"]
            # A budget's status changes with every pod.
            version = metadata.get("generation" if kind == DISRUPTION_BUDGET.kind else "resourceVersion")
            more = metadata.get("labels"), metadata.get("ownerReferences")
            text = json.dumps((name, metadata.get("uid"), version or uuid4().hex, *more), sort_keys=True)
            versions[kind] = hash((versions.get(kind), text))
    return Look(context, started, running, versions)
