"""What OpenShift's SecurityContextConstraints `restricted-v2` makes of a pod: it fills in what is left open, and
refuses what is beyond it. Written from "Managing security context constraints" of OpenShift's documentation."""

from __future__ import annotations

import copy
from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"),
    *("projected", "secret"),
}
CAPABILITIES = {"NET_BIND_SERVICE"}
# As the annotation openshift.io/sa.scc.uid-range of a namespace.
USERS = range(1000650000, 1000660000)
LEVEL = "s0:c26,c5"


def admit(spec: dict[str, Any], users: range = USERS) -> tuple[dict[str, Any], list[str]]:
    """The pod's spec as it would run, and why it is refused; no reason: it is admitted."""
    spec, why = copy.deepcopy(spec), []
    why += [f"{key} is true" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        why += [f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name"} - VOLUMES]
    pod = spec.setdefault("securityContext", {})
    if pod.setdefault("fsGroup", users[0]) not in users:
        why.append(f"fsGroup {pod['fsGroup']} is not of the namespace")
    why += _level("pod", pod)
    why += _seccomp("pod", pod)
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        name, own = container["name"], container.setdefault("securityContext", {})
        user = own.setdefault("runAsUser", pod.get("runAsUser", users[0]))
        if user not in users:
            why.append(f"{name}: runAsUser {user} is not of the namespace")
        why += [f"{name}: {key}" for key in ("privileged", "allowPrivilegeEscalation") if own.get(key)]
        own["allowPrivilegeEscalation"] = False
        capabilities = own.setdefault("capabilities", {})
        why += [f"{name}: adds {each}" for each in set(capabilities.get("add", [])) - CAPABILITIES]
        capabilities["drop"] = sorted({*capabilities.get("drop", []), "ALL"})
        why += [f"{name}: host port {port['hostPort']}" for port in container.get("ports", []) if "hostPort" in port]
        why += _level(name, own) + _seccomp(name, own)
    return spec, why


def _level(name: str, context: dict[str, Any]) -> list[str]:
    asked = context.setdefault("seLinuxOptions", {"level": LEVEL})
    return [] if asked == {"level": LEVEL} else [f"{name}: seLinuxOptions {asked}"]


def _seccomp(name: str, context: dict[str, Any]) -> list[str]:
    kind = context.setdefault("seccompProfile", {"type": "RuntimeDefault"})["type"]
    return [] if kind == "RuntimeDefault" else [f"{name}: seccomp profile {kind}"]
