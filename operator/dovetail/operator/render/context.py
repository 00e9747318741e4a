"""The context that every rendering function needs, and the parts that all objects share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import RLHFJOB
from dovetail.manifest.job_class import RLHFJobClass
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.types import Group, RLHFJob, Role
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.protocol.plan import Plan

Object = dict[str, Any]


@dataclass(frozen=True)
class RenderContext:
    """One job to render. `job` has its defaults filled in (`dovetail.manifest.resolve`), and `uid` is the RLHFJob's.
    `sizes` has the number of pods of each group in the JobSet that already runs, which cannot change. `room` has the
    number of pods of each GPU group for which nodes have GPUs now, if that is known. `images` has the image of each
    group in the JobSet that already runs. `job_class` is the class that the job names, if it may be used."""

    job: RLHFJob
    uid: str
    plan: Plan
    settings: OperatorSettings
    sizes: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    job_class: RLHFJobClass | None = None

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def namespace(self) -> str:
        return self.job.metadata.namespace or "default"

    def metadata(self, name: str, component: str, **more: Any) -> Object:
        """Metadata of a child that the RLHFJob owns, so that it is deleted with the job."""
        owner = {
            **RLHFJOB.type_meta,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component),
            "ownerReferences": [owner],
            **more,
        }

    def labels(self, component: str) -> dict[str, str]:
        return names.labels(self.name, self.uid, component)

    def guaranteed(self, group: Group) -> int:
        """The number of pods of a group that start with the job. These are all trainers, and the minimum of
        rollouts."""
        started = self.sizes.get(group.name)
        if started is not None:
            return started
        return pod_count(group) if Role.TRAINER in group.roles else group.min_replicas or pod_count(group)

    def wanted(self, group: Group) -> int:
        """The number of pods of a group when there is room for all."""
        return max(self.guaranteed(group), group.max_replicas or pod_count(group))

    @property
    def start_timeout(self) -> int | None:
        """The seconds after which the job fails if its pods still wait. None if they wait for ever."""
        return self.job.spec.failure_policy.start_timeout_seconds or self.settings.start_timeout_seconds or None

    def queueing(self) -> dict[str, str]:
        """The labels of the RLHFJob that Kueue must see on the objects that it admits. Its class may give the
        queue."""
        queue = self.job_class.spec.queue if self.job_class else None
        given = {names.QUEUE_LABEL: queue} if queue else {}
        return given | {key: value for key, value in self.job.metadata.labels.items() if key.startswith(names.KUEUE)}


def digest(document: Any) -> str:
    """The SHA-256 of a JSON document with sorted keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
