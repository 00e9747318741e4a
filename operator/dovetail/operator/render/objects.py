"""All objects of a job, in the order in which they are applied. Long ones have a file of their own. The token's Secret
is made apart from the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD,
    POD_GROUP,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
)
from dovetail.manifest.describe.crd import GROUP, PLURAL
from dovetail.manifest.types import Role
from dovetail.operator.render import sandboxes
from dovetail.operator.render.config_map import config_map
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.gang import pod_group
from dovetail.operator.render.volume_claim import volume_claim
from dovetail.protocol.process import env
from dovetail.protocol.process.process_names import COORDINATOR


def secret(context: RenderContext, token: str) -> Object:
    """The Secret with the job's token. It is created once and never changes, because running pods hold the token."""
    return {
        **SECRET.type_meta,
        "metadata": context.metadata(names.token_secret(context.name), "token"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token}
        | ({names.SANDBOX_KEY: env.sandbox_token(token)} if sandboxes.pods(context.job.spec) else {}),
    }


def service_account(context: RenderContext) -> Object:
    """The ServiceAccount of the job's pods. No pod mounts its token unless the manifest's podTemplate says so."""
    return {
        **SERVICE_ACCOUNT.type_meta,
        "metadata": context.metadata(names.account(context.name), "pods"),
        "automountServiceAccountToken": False,
    }


def role(context: RenderContext) -> Object:
    """The Role of the job's pods and of the status API. It allows reading the job, its plan and its history, and the
    token with which the status API asks the coordinator. Pods have the token anyway. Users' programs in pods can read
    the rest; Dovetail's own programs do not."""
    texts = [names.plan_config_map(context.name), names.history_config_map(context.name)]
    token = [names.token_secret(context.name)]
    return {
        **ROLE.type_meta,
        "metadata": context.metadata(names.account(context.name), "pods"),
        "rules": [
            {"apiGroups": [GROUP], "resources": [PLURAL], "resourceNames": [context.name], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": texts, "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": token, "verbs": ["get"]},
        ],
    }


def role_binding(context: RenderContext) -> Object:
    """Gives the Role to the job's pods and to the status API."""
    account, settings = names.account(context.name), context.settings
    subjects = [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}]
    if settings.api_account:
        subjects.append({"kind": "ServiceAccount", "name": settings.api_account, "namespace": settings.namespace})
    return {
        **ROLE_BINDING.type_meta,
        "metadata": context.metadata(account, "pods"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": subjects,
    }


def service(context: RenderContext) -> Object:
    """The headless Service that gives the coordinator a name. The name resolves to the coordinator's pod even before
    the pod is ready. The other processes wait for the coordinator themselves."""
    port = env.COORDINATOR_PORT
    return {
        **SERVICE.type_meta,
        "metadata": context.metadata(names.coordinator_service(context.name), COORDINATOR),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {
                names.JOB_LABEL: context.name,
                names.UID_LABEL: context.uid,
                names.ROLE_LABEL: COORDINATOR,
            },
            "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def network_policy(context: RenderContext) -> Object:
    """Says who may connect to which ports of the job's pods. The pods reach each other on all ports. The operator and
    the status API reach the coordinator. Those that `OperatorSettings.metrics_from` names reach the ports that serve
    metrics. If it names nobody, nobody else reaches the pods. A service that plays episodes reaches the port at which
    it asks for turns, with a key for each, and so do the job's sandboxes. The pods connect to each other, and to what
    `OperatorSettings.egress` names. If it is None, they connect to anything."""
    mine = {"matchLabels": {names.JOB_LABEL: context.name}}
    dovetail = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.settings.namespace}},
        "podSelector": {
            "matchExpressions": [
                {"key": "app.kubernetes.io/component", "operator": "In", "values": ["operator", "api"]}
            ]
        },
    }
    ingress: list[Object] = [
        {"from": [{"podSelector": mine}]},
        {"from": [dovetail], "ports": [_tcp(env.COORDINATOR_PORT)]},
    ]
    if context.settings.metrics_from:
        ingress.append({"from": context.settings.metrics_from, "ports": metrics_ports(context)})
    sessions = context.job.spec.sessions
    if sessions is not None and sessions.agent is not None and sessions.agent.url is not None:
        ingress.append({"ports": [_tcp(env.AGENTS_PORT)]})
    if sandboxes.pods(context.job.spec):
        ingress.append({"from": [sandboxes.peers(context)], "ports": [_tcp(env.AGENTS_PORT)]})
    spec: Object = {"podSelector": mine, "policyTypes": ["Ingress"], "ingress": ingress}
    if context.settings.egress is not None:
        egress = [{"to": [{"podSelector": mine}]}, *context.settings.egress]
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return {**NETWORK_POLICY.type_meta, "metadata": context.metadata(context.name, "network"), "spec": spec}


def lifted(budget: Object) -> Object:
    """The budget of a job whose pods may all be evicted. A drain of a node with two trainers would wait for ever
    otherwise, because the first one gets no other node."""
    return budget | {"spec": budget["spec"] | {"minAvailable": 0}}


def while_pods_live(policy: Object, pods: Sequence[Mapping[str, Any]]) -> Object:
    """The NetworkPolicy with these pods as owners, beside the job. The garbage collector deletes an object when all its
    owners are gone, so pods that end slowly stay in the policy when their job has been deleted."""
    metadata = policy["metadata"]
    found = sorted((str(pod["metadata"]["uid"]), str(pod["metadata"]["name"])) for pod in pods)
    owners = [{**POD.type_meta, "name": name, "uid": uid} for uid, name in found]
    return policy | {"metadata": metadata | {"ownerReferences": [*metadata["ownerReferences"], *owners]}}


def metrics_ports(context: RenderContext) -> list[Object]:
    """The ports on which this job's pods serve metrics, as NetworkPolicyPorts."""
    groups = context.job.spec.groups
    ports = [_tcp(env.COORDINATOR_PORT)]
    if any(Role.ROLLOUT in group.roles for group in groups):
        ports += [_tcp(env.SERVER_PORT), _tcp(env.SCORER_PORT)]
    if ranks := max((max(1, group.gpu.per_pod) for group in groups if Role.TRAINER in group.roles), default=0):
        first = env.TRAINER_METRICS_PORT
        ports.append(_tcp(first) | ({"endPort": first + ranks - 1} if ranks > 1 else {}))
    return ports


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def disruption_budget(context: RenderContext) -> Object:
    """With this budget, drains take the job's pods one at a time. It gives the number of pods that must stay, because
    `maxUnavailable` cannot be counted for Jobs. Surplus rollouts may always be evicted, and a pod that is not ready
    never delays a drain."""
    pods = 1 + sum(context.guaranteed(group) for group in context.job.spec.groups)
    return {
        **DISRUPTION_BUDGET.type_meta,
        "metadata": context.metadata(context.name, "disruption"),
        "spec": {
            "minAvailable": pods - 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {names.JOB_LABEL: context.name},
                "matchExpressions": [{"key": names.SURPLUS_LABEL, "operator": "DoesNotExist"}],
            },
        },
    }


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
