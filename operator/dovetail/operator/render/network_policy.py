"""The NetworkPolicy of a job. It says who may connect to its pods, and to which ports."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import NETWORK_POLICY
from dovetail.manifest.types import Role
from dovetail.operator.render.context import Object, RenderContext
from dovetail.protocol.process import env

_COMPONENT = "app.kubernetes.io/component"


def network_policy(context: RenderContext) -> Object:
    """The job's pods reach each other on all ports. The operator and the status API reach the coordinator. Those that
    `OperatorSettings.metrics_from` names reach the ports that serve metrics. If it names nobody, nobody else reaches
    the pods. The pods connect to each other, and to what `OperatorSettings.egress` names. If it is None, they connect
    to anything."""
    mine = {"matchLabels": {names.JOB_LABEL: context.name}}
    dovetail = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.settings.namespace}},
        "podSelector": {"matchExpressions": [{"key": _COMPONENT, "operator": "In", "values": ["operator", "api"]}]},
    }
    ingress: list[Object] = [
        {"from": [{"podSelector": mine}]},
        {"from": [dovetail], "ports": [_tcp(env.COORDINATOR_PORT)]},
    ]
    if context.settings.metrics_from:
        ingress.append({"from": context.settings.metrics_from, "ports": metrics_ports(context)})
    spec: Object = {"podSelector": mine, "policyTypes": ["Ingress"], "ingress": ingress}
    if context.settings.egress is not None:
        egress = [{"to": [{"podSelector": mine}]}, *context.settings.egress]
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return {**NETWORK_POLICY.type_meta, "metadata": context.metadata(context.name, "network"), "spec": spec}


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
