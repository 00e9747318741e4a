"""The headless Service that gives the coordinator a name."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import SERVICE
from dovetail.operator.render.context import Object, RenderContext
from dovetail.protocol.process.env import COORDINATOR_PORT
from dovetail.protocol.process.process_names import COORDINATOR


def service(context: RenderContext) -> Object:
    """The Service. Its name resolves to the coordinator's pod even before the pod is ready. The other processes wait
    for the coordinator themselves."""
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
            "ports": [{"name": "http", "port": COORDINATOR_PORT, "targetPort": COORDINATOR_PORT, "protocol": "TCP"}],
        },
    }
