"""The pods in which a user's code runs apart from the job (`spec.sessions.sandbox: Pod`): Sandboxes of
kubernetes-sigs/agent-sandbox, the Service at which they ask the coordinator for work, and the NetworkPolicy that lets
them reach nothing else.

They are Sandboxes and not SandboxClaims, because a claim takes a pod of an administrator's pool, and cannot bring the
job's image, code and token."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import NETWORK_POLICY, SANDBOX, SERVICE
from dovetail.manifest.merge import merge
from dovetail.manifest.types import RLHFJobSpec
from dovetail.operator.render.context import Object, RenderContext, digest
from dovetail.operator.render.pod import CONTAINER_SECURITY, HOME, image, security, variable
from dovetail.protocol.process import env
from dovetail.protocol.process.process_names import CONTAINER, COORDINATOR, RELAY_MODULE

COMPONENT = "sandbox"
# The users of sandboxes are from here on, one for each job. The kernel limits the processes of a user on a node.
FIRST_USER = 1 << 30
SCRATCH = "1Gi"
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}


def pods(spec: RLHFJobSpec) -> int:
    """The number of a job's sandboxes."""
    return spec.sessions.sandbox_pods if spec.sessions is not None and spec.sessions.sandbox == "Pod" else 0


def sandbox_objects(context: RenderContext, address: str | None) -> list[Object]:
    """All of them. The Sandboxes come when the Service has its address."""
    count = pods(context.job.spec)
    found = [_service(context), _policy(context)] if count else []
    return [*found, *(_sandbox(context, index, address) for index in range(count) if address)]


def peers(context: RenderContext) -> Object:
    """The sandboxes' pods, as a NetworkPolicyPeer."""
    return {"podSelector": {"matchLabels": {names.SANDBOX_LABEL: context.uid}}}


def _coordinator(context: RenderContext) -> dict[str, str]:
    return {names.JOB_LABEL: context.name, names.UID_LABEL: context.uid, names.ROLE_LABEL: COORDINATOR}


def _service(context: RenderContext) -> Object:
    """Relays ask again until the coordinator answers."""
    port = env.AGENTS_PORT
    return {
        **SERVICE.type_meta,
        "metadata": context.metadata(names.sessions_service(context.name), COMPONENT),
        "spec": {
            "publishNotReadyAddresses": True,
            "selector": _coordinator(context),
            "ports": [{"name": "sessions", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def _policy(context: RenderContext) -> Object:
    """Nobody connects to a sandbox, and it connects to one port of the coordinator. It asks no name server, through
    which it could tell others what it knows."""
    target = {"podSelector": {"matchLabels": _coordinator(context)}}
    return {
        **NETWORK_POLICY.type_meta,
        "metadata": context.metadata(names.sandbox_policy(context.name), COMPONENT),
        "spec": {
            **peers(context),
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"to": [target], "ports": [{"protocol": "TCP", "port": env.AGENTS_PORT}]}],
        },
    }


def _sandbox(context: RenderContext, index: int, address: str) -> Object:
    name = names.sandbox(context.name, index)
    template = merge(
        _template(context, f"[{address}]" if ":" in address else address), context.settings.sandbox_template
    )
    return {
        **SANDBOX.type_meta,
        "metadata": context.metadata(name, COMPONENT),
        "spec": {"service": False, "podTemplate": template},
    }


def _template(context: RenderContext, host: str) -> Object:
    """The pod. It has the coordinator's image, and of the job's files the code alone, which it cannot change."""
    key = {"name": names.token_secret(context.name), "key": names.SANDBOX_KEY}
    mounts, volumes = _code(context)
    user = context.settings.pod_user
    own = security(user)
    if user:
        own["runAsUser"] = FIRST_USER + int(digest(context.uid)[:7], 16)
    container = {
        "name": CONTAINER,
        "image": image(context, None),
        "command": ["python", "-P", "-m", RELAY_MODULE],
        "env": [
            variable(env.COORDINATOR, f"http://{host}:{env.AGENTS_PORT}"),
            {"name": env.TOKEN, "valueFrom": {"secretKeyRef": key}},
            {"name": env.NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            variable("HOME", HOME),
            variable("USER", "dovetail"),
            variable("PYTHONUNBUFFERED", 1),
        ],
        "resources": RESOURCES,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
        "securityContext": CONTAINER_SECURITY,
    }
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "securityContext": own,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": SCRATCH}}, *volumes],
    }
    if context.settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in context.settings.pull_secrets]
    labels = {
        "app.kubernetes.io/name": "dovetail",
        "app.kubernetes.io/component": COMPONENT,
        names.SANDBOX_LABEL: context.uid,
    }
    return {"metadata": {"labels": labels}, "spec": spec}


def _code(context: RenderContext) -> tuple[list[Object], list[Object]]:
    """The mounts and the volumes of the code, at the place where the coordinator has it."""
    if (code := context.job.spec.models.reward.code) is None:
        return [], []
    mount: Object = {"name": "code", "mountPath": names.CODE_MOUNT, "readOnly": True}
    if code.config_map is not None:
        return [mount], [{"name": "code", "configMap": {"name": code.config_map}}]
    path = str(code.pvc).strip("/")
    claim, _, folder = path.partition("/")
    mount |= {"mountPath": f"{names.CLAIMS_MOUNT}/{path}"} | ({"subPath": folder} if folder else {})
    return [mount], [{"name": "code", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
