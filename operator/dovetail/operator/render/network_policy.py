"""The NetworkPolicy: only the job's own pods talk to each other."""

from __future__ import annotations

from dovetail.api import env
from dovetail.operator import names
from dovetail.operator.render.context import Context, Object


def network_policy(context: Context) -> Object:
    """Others reach only the ports of status and metrics, where everything but health and metrics asks for the token.
    What pods may connect to is left open: models and data come from anywhere."""
    mine = {"matchLabels": {names.JOB_LABEL: context.name}}
    last = env.TRAINER_METRICS_PORT + env.MAX_GPUS_PER_POD - 1
    ports: list[Object] = [
        {"protocol": "TCP", "port": port} for port in (env.COORDINATOR_PORT, env.SERVER_PORT, env.SCORER_PORT)
    ]
    ports.append({"protocol": "TCP", "port": env.TRAINER_METRICS_PORT, "endPort": last})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": context.metadata(context.name, "network"),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": mine}]}, {"ports": ports}],
        },
    }
