"""Remembers which small objects of a job were found correct. Without this, every event of a pod would render and
compare them again. It also remembers which objects were corrected, so that a quarrel about one slows down."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from dovetail.kube.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
)
from dovetail.manifest.job_class import RLHFJobClass
from dovetail.manifest.types import RLHFJob
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.reconcile.children import Children, Object
from dovetail.operator.render.context import RenderContext, digest
from dovetail.operator.render.objects import SUPPORTING
from dovetail.protocol.plan import Plan

KINDS = frozenset(SUPPORTING)
REMEMBERED = 10_000
# An object that others change again and again is corrected at once this many times. After that, each pause is twice as
# long as the last one.
AT_ONCE = 3
LONGEST_PAUSE = timedelta(minutes=10)


@dataclass(frozen=True)
class Look:
    """The inputs of one comparison. Job, plan, settings and class are compared by identity. This keeps neither job nor
    plan in memory, because they may take megabytes. `pods` has the uids of the pods that protect the NetworkPolicy.
    `versions` has the versions of the existing objects by kind."""

    uid: str
    job: weakref.ref[RLHFJob]
    plan: weakref.ref[Plan]
    settings: OperatorSettings
    job_class: RLHFJobClass | None
    room: Mapping[str, int]
    sizes: Mapping[str, int]
    started: bool
    protected: bool
    pods: frozenset[str]
    versions: Mapping[str, int]

    def same(self, other: Look) -> bool:
        return (
            self.renders_as(other)
            and self.sizes == other.sizes
            and self.started == other.started
            and self.protected == other.protected
            and self.pods == other.pods
            and self.versions == other.versions
        )

    def renders_as(self, other: Look) -> bool:
        """Whether both render the same objects, apart from those that depend on the number of pods."""
        job, plan = self.job(), self.plan()
        return (
            job is not None
            and job is other.job()
            and plan is not None
            and plan is other.plan()
            and self.settings is other.settings
            and self.job_class is other.job_class
            and self.room == other.room
        )


@dataclass
class Drift:
    """The memory for all jobs, by uid. It has the last comparison, the kinds that were correct, and whether nothing was
    left to do."""

    _seen: dict[str, tuple[Look, frozenset[str], bool]] = field(default_factory=dict)
    _settled: dict[str, tuple[str, str]] = field(default_factory=dict)  # version and digest, by the object's uid
    # How often an object was corrected in a row, when it was last, and the digest of what was wanted, by its uid.
    _corrected: dict[str, tuple[int, datetime, str]] = field(default_factory=dict)

    def settle(self, wanted: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """Remember that applying `wanted` to `there` changed nothing. Others may add items to some lists, such as the
        ports of a Service, and the API server keeps these."""
        while len(self._settled) >= REMEMBERED:
            self._settled.pop(next(iter(self._settled)))
        self._settled[str(there["metadata"]["uid"])] = str(there["metadata"]["resourceVersion"]), digest(wanted)

    def settled(self, wanted: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
        """Whether applying `wanted` would change nothing."""
        known = self._settled.get(str(there["metadata"].get("uid")))
        version = there["metadata"].get("resourceVersion")
        return known is not None and known[0] == version and known[1] == digest(wanted)

    def corrected(self, wanted: Mapping[str, Any], there: Mapping[str, Any], now: datetime) -> bool:
        """Remember that the object was corrected. Returns whether others change it again and again. The operator's own
        changes do not count, such as those of a budget with each drain."""
        uid, asked = str(there["metadata"]["uid"]), digest(wanted)
        times, last, before = self._corrected.pop(uid, (0, now, asked))
        while len(self._corrected) >= REMEMBERED:
            self._corrected.pop(next(iter(self._corrected)))
        times = times + 1 if asked == before and now - last <= 2 * LONGEST_PAUSE else 1
        self._corrected[uid] = times, now, asked
        return times >= AT_ONCE

    def pause(self, wanted: Mapping[str, Any], there: Mapping[str, Any], now: datetime) -> float:
        """The seconds until the object may be corrected again."""
        times, last, before = self._corrected.get(str(there["metadata"].get("uid")), (0, now, ""))
        if times < AT_ONCE or digest(wanted) != before:
            return 0.0
        pause = min(LONGEST_PAUSE, timedelta(seconds=2.0 ** min(times, 16)))
        return max(0.0, (last + pause - now).total_seconds())

    def forget(self, uid: str) -> None:
        """Keep nothing of a job that is gone."""
        self._seen.pop(uid, None)

    def fine(self, look: Look) -> set[str] | None:
        """The kinds whose object is unchanged since it was found correct. None if nothing has changed since nothing was
        left to do."""
        before, kinds, all_fine = self._seen.get(look.uid, (None, frozenset[str](), False))
        if before is None or not before.renders_as(look):
            return set()
        if all_fine and before.same(look):
            return None
        if before.started and not look.started:
            kinds -= {CONFIG_MAP.kind}  # that of a running job is never changed
        if (before.sizes, before.protected) != (look.sizes, look.protected):
            kinds -= {DISRUPTION_BUDGET.kind}
        if before.pods != look.pods:
            kinds -= {NETWORK_POLICY.kind}
        return {kind for kind in kinds if kind in look.versions and before.versions.get(kind) == look.versions[kind]}

    def found(self, look: Look, fine: Iterable[str], all_fine: bool) -> None:
        """Remember a comparison. `fine` has the kinds whose objects exist and are correct."""
        self._seen.pop(look.uid, None)
        while len(self._seen) >= REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._seen[look.uid] = look, frozenset(fine), all_fine


def look_at(context: RenderContext, children: Children, started: bool, protected: bool, pods: Iterable[Object]) -> Look:
    """The inputs of the comparison now. `started` says that the job has a JobSet, and `protected` that its
    pods are evicted one at a time. `pods` has those that nodes run."""
    versions: dict[str, int] = {}
    for (kind, name), thing in sorted(children.objects.items(), key=lambda item: item[0]):
        if kind in KINDS:
            metadata = thing["metadata"]
            # A budget's status changes with every pod.
            version = metadata.get("generation" if kind == DISRUPTION_BUDGET.kind else "resourceVersion")
            more = metadata.get("labels"), metadata.get("ownerReferences")
            text = json.dumps((name, metadata.get("uid"), version or uuid4().hex, *more), sort_keys=True)
            versions[kind] = hash((versions.get(kind), text))
    return Look(
        uid=context.uid,
        job=weakref.ref(context.job),
        plan=weakref.ref(context.plan),
        settings=context.settings,
        job_class=context.job_class,
        room=context.room,
        sizes=context.sizes,
        started=started,
        protected=protected,
        pods=frozenset(str(pod["metadata"]["uid"]) for pod in pods),
        versions=versions,
    )
