"""The kinds of objects that the operator reads or writes. This is the only list, so a new kind starts here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dovetail.manifest.describe.crd import CLASS_PLURAL, GROUP, PLURAL, STORED_VERSION
from dovetail.manifest.job_class import CLASS_KIND
from dovetail.manifest.types import KIND


@dataclass(frozen=True)
class Resource:
    """One kind of object. `watched` says that the operator watches the objects of this kind that belong to jobs."""

    kind: str
    group: str
    version: str
    plural: str
    watched: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def type_meta(self) -> dict[str, str]:
        """The first two fields of an object of this kind."""
        return {"apiVersion": self.api_version, "kind": self.kind}

    @property
    def base(self) -> str:
        """The path of the kind's group and version, where the API server lists its kinds."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The path of one object, of all in a namespace, or of all in the cluster."""
        parts = [self.base, *(["namespaces", namespace] if namespace else []), self.plural]
        return "/".join([*parts, *(p for p in (name, subresource) if p)])


RLHFJOB = Resource(KIND, GROUP, STORED_VERSION, PLURAL)
# Classes belong to no job. All are watched (`cluster/classes.py`).
RLHFJOB_CLASS = Resource(CLASS_KIND, GROUP, STORED_VERSION, CLASS_PLURAL, watched=False)
EVENT = Resource("Event", "", "v1", "events", watched=False)
# Nodes belong to no job. Some are listed, and all are watched for notices (`cluster/notices.py`).
NODE = Resource("Node", "", "v1", "nodes", watched=False)
# This kind is not watched, because the operator has no right to list Secrets.
SECRET = Resource("Secret", "", "v1", "secrets", watched=False)
# This kind is not watched. It is read while a job waits in a queue of Kueue, and made for jobs that MultiKueue sends
# elsewhere.
WORKLOAD = Resource("Workload", "kueue.x-k8s.io", "v1beta2", "workloads", watched=False)
# Pods of kubernetes-sigs/agent-sandbox. This kind is watched only if the chart allows it (`jobs.sandboxes`).
SANDBOX = Resource("Sandbox", "agents.x-k8s.io", "v1beta1", "sandboxes", watched=False)
JOBSET = Resource("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets")
JOB = Resource("Job", "batch", "v1", "jobs")
POD = Resource("Pod", "", "v1", "pods")
CONFIG_MAP = Resource("ConfigMap", "", "v1", "configmaps")
SERVICE = Resource("Service", "", "v1", "services")
VOLUME_CLAIM = Resource("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
SERVICE_ACCOUNT = Resource("ServiceAccount", "", "v1", "serviceaccounts")
ROLE = Resource("Role", "rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDING = Resource("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
NETWORK_POLICY = Resource("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
DISRUPTION_BUDGET = Resource("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
# The kinds that a job owns, except its Secret.
CHILDREN = (
    JOBSET,
    JOB,
    POD,
    CONFIG_MAP,
    SERVICE,
    VOLUME_CLAIM,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
)


class Gang(StrEnum):
    """Schedulers that start pods together, as the chart's `jobs.gangScheduler` names them."""

    KUBERNETES = "Kubernetes"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    YUNIKORN = "YuniKorn"
    KAI = "KAI"


POD_GROUP = "PodGroup"
# An operator knows at most one of them.
POD_GROUPS: dict[str, Resource] = {
    Gang.KUBERNETES: Resource(POD_GROUP, "scheduling.k8s.io", "v1alpha2", "podgroups"),
    Gang.VOLCANO: Resource(POD_GROUP, "scheduling.volcano.sh", "v1beta1", "podgroups"),
    Gang.COSCHEDULING: Resource(POD_GROUP, "scheduling.x-k8s.io", "v1alpha1", "podgroups"),
}
BY_KIND = {
    resource.kind: resource for resource in (*CHILDREN, RLHFJOB, RLHFJOB_CLASS, EVENT, NODE, SECRET, WORKLOAD, SANDBOX)
}
