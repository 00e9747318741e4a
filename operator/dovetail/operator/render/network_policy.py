"""The NetworkPolicy: only the job's own pods talk to each other."""

from __future__ import annotations

from dovetail.manifest.types import Role
from dovetail.operator import names
from dovetail.operator.render.context import Context, Object
from dovetail.protocol import env

_COMPONENT = "app.kubernetes.io/component"


def network_policy(context: Context) -> Object:
    """The job's pods reach each other on all ports; operator and status API the coordinator; and who may scrape
    (`Settings.metrics_from`) the ports of metrics alone, where all but health and metrics asks for the token. What pods
    may connect to is left open: models and data come from anywhere."""
    mine = {"matchLabels": {names.JOB_LABEL: context.name}}
    ranks = max([1, *(g.gpu.per_pod for g in context.job.spec.groups if Role.TRAINER in g.roles)])
    scraped: list[Object] = [
        {"protocol": "TCP", "port": port} for port in (env.COORDINATOR_PORT, env.SERVER_PORT, env.SCORER_PORT)
    ]
    first = env.TRAINER_METRICS_PORT
    scraped.append({"protocol": "TCP", "port": first} | ({"endPort": first + ranks - 1} if ranks > 1 else {}))
    askers = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.settings.namespace}},
        "podSelector": {"matchExpressions": [{"key": _COMPONENT, "operator": "In", "values": ["operator", "api"]}]},
    }
    metrics_from = context.settings.metrics_from
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": context.metadata(context.name, "network"),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": mine}]},
                {"from": [askers], "ports": [{"protocol": "TCP", "port": env.COORDINATOR_PORT}]},
                {"ports": scraped} | ({"from": metrics_from} if metrics_from else {}),
            ],
        },
    }
