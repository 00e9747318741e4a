"""All objects of a job except its token's Secret, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dovetail.kube.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD_GROUP,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
)
from dovetail.operator.render.config_map import config_map
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.disruption_budget import disruption_budget
from dovetail.operator.render.gang import pod_group
from dovetail.operator.render.jobset import jobset, pods_changed
from dovetail.operator.render.network_policy import network_policy
from dovetail.operator.render.role import role
from dovetail.operator.render.role_binding import role_binding
from dovetail.operator.render.service import service
from dovetail.operator.render.service_account import service_account
from dovetail.operator.render.surplus import surplus_jobs
from dovetail.operator.render.volume_claim import volume_claim

__all__ = ["SUPPORTING", "WITH_PODS", "jobset", "pods_changed", "supporting_objects", "surplus_jobs"]

# These are made only with pods, because without pods there is nothing to evict.
WITH_PODS = {DISRUPTION_BUDGET.kind}


# The objects that pods need, one of each kind, in the order in which they are applied.
SUPPORTING: dict[str, Callable[[RenderContext], Object | None]] = {
    VOLUME_CLAIM.kind: volume_claim,
    CONFIG_MAP.kind: config_map,
    SERVICE_ACCOUNT.kind: service_account,
    ROLE.kind: role,
    ROLE_BINDING.kind: role_binding,
    SERVICE.kind: service,
    NETWORK_POLICY.kind: network_policy,
    DISRUPTION_BUDGET.kind: disruption_budget,
    POD_GROUP: pod_group,  # for any scheduler
}


def supporting_objects(context: RenderContext, but: Collection[str] = ()) -> list[Object]:
    """The objects of SUPPORTING. They cost little, so they are kept while the job is suspended. The kinds in `but` are
    left out."""
    made = (make(context) for kind, make in SUPPORTING.items() if kind not in but)
    return [thing for thing in made if thing is not None]
