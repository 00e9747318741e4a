"""What every rendering function needs, and what all objects share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.kube import names
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.types import KIND, Group, RLHFJob, Role
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.protocol.plan import Plan

Object = dict[str, Any]


@dataclass(frozen=True)
class RenderContext:
    """One job to render. `job` has its defaults filled in (`dovetail.manifest.resolve`); `uid` is the RLHFJob's.
    `sizes`: pods of each group in the JobSet that runs already, which cannot change. `room`: pods of each GPU group
    that nodes have GPUs for now, as far as that is known. `images`: of each group in the JobSet that runs already."""

    job: RLHFJob
    uid: str
    plan: Plan
    settings: OperatorSettings
    sizes: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def namespace(self) -> str:
        return self.job.metadata.namespace or "default"

    def metadata(self, name: str, component: str, **more: Any) -> Object:
        """Metadata of a child that the RLHFJob owns: it goes when the job goes."""
        owner = {
            "apiVersion": self.job.api_version,
            "kind": KIND,
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
        """Pods of a group that start with the job: trainers all, rollouts the minimum."""
        started = self.sizes.get(group.name)
        if started is not None:
            return started
        return pod_count(group) if Role.TRAINER in group.roles else group.min_replicas or pod_count(group)

    def wanted(self, group: Group) -> int:
        """Pods of a group when there is room for all."""
        return max(self.guaranteed(group), group.max_replicas or pod_count(group))

    @property
    def start_timeout(self) -> int | None:
        """The seconds after which the job fails if its pods still wait. None: they wait for ever."""
        return self.job.spec.failure_policy.start_timeout_seconds or self.settings.start_timeout_seconds or None

    def queueing(self) -> dict[str, str]:
        """Labels of the RLHFJob that Kueue is to see on what it admits."""
        return {key: value for key, value in self.job.metadata.labels.items() if key.startswith(names.KUEUE)}


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, its keys in order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
