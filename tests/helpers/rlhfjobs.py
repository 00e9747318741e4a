"""RLHFJobs on a real API server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import kubernetes.client
import kubernetes.config
import yaml

from helpers.cluster import REPOSITORY, KubeCluster, wait_for

CRD = REPOSITORY / "helm/dovetail/files/crds/rlhfjobs.dovetail.dev.yaml"
NAME = "rlhfjobs.dovetail.dev"


def install_crd(cluster: KubeCluster, manifest: str | None = None) -> None:
    """Server-side apply of the CRD (or of another version of it); returns when the API server goes by it."""
    text = manifest or CRD.read_text(encoding="utf-8")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    # kubectl fails where there is no status yet.
    words = ("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=60s")
    wait_for("the definition", lambda: cluster.try_kubectl(*words).returncode == 0)
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in yaml.safe_load(text)["spec"]["versions"]}

    def served() -> bool:
        """A new schema is taken up some time after it was stored; what is published of it comes last."""
        for version, schema in versions.items():
            done = cluster.try_kubectl("get", "--raw", f"/openapi/v3/apis/dovetail.dev/{version}")
            if done.returncode != 0:
                return False
            shown = json.loads(done.stdout)["components"]["schemas"][f"dev.dovetail.{version}.RLHFJob"]["properties"]
            wanted = schema["properties"]["spec"]
            for key in ("properties", "x-kubernetes-validations"):
                if _outline(shown["spec"], key) != _outline(wanted, key):
                    return False
        return True

    wait_for("the schema to be served", served)


def _outline(schema: dict[str, Any], key: str) -> Any:
    found = schema.get(key)
    return sorted(found) if isinstance(found, dict) else found


def create(cluster: KubeCluster, manifest: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """`kubectl create` with strict validation."""
    text = json.dumps(manifest)
    return cluster.try_kubectl("create", "--validate=strict", "-f", "-", *words, stdin=text)


class DryRun:
    """Has the API server judge manifests: strict as kubectl, at a fiftieth of its time, for the connection is kept.
    Both methods return what it refuses the manifest for, a line for each cause; "" where it accepts."""

    def __init__(self, cluster: KubeCluster) -> None:
        api = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        self._objects = kubernetes.client.CustomObjectsApi(api)

    def create(self, manifest: dict[str, Any], namespace: str = "default") -> str:
        where = (*manifest["apiVersion"].split("/"), namespace, "rlhfjobs", manifest)
        return self._refusal(self._objects.create_namespaced_custom_object, *where)

    def apply(self, manifest: dict[str, Any], namespace: str) -> str:
        """Server-side apply, over the job that is there."""
        version = manifest["apiVersion"].split("/")
        where = (*version, namespace, "rlhfjobs", manifest["metadata"]["name"], manifest)
        how = {"field_manager": "kubectl", "force": True, "_content_type": "application/apply-patch+yaml"}
        return self._refusal(self._objects.patch_namespaced_custom_object, *where, **how)

    def _refusal(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
        try:
            call(*arguments, dry_run="All", field_validation="Strict", **options)
        except kubernetes.client.ApiException as error:
            status = json.loads(error.body)
            causes = status.get("details", {}).get("causes", [])
            return "\n".join(f"{c['field']}: {c['message']}" for c in causes) or str(status["message"])
        return ""


def sentences(stderr: str) -> list[str]:
    """What the API server found, each sentence with the whole path of the field, as `dovetail validate` writes it."""
    found = []
    for path, message in re.findall(r'([\w.\[\]]+): Invalid value: (?:"[^"\n]*": |-?[\d.]+: )?(.*)', stderr):
        # A rule inside a list starts its sentence at the item, with a field or with "has".
        rest = message.removeprefix("spec.") if path == "spec" else message
        if message.startswith("spec."):
            found.append(message)
        else:
            found += [f"{path}.{rest}", f"{path} {rest}", f"{path}: {rest}"]
    return found


def quickstart(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """The quick start's job, with these fields of the spec."""
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples/quickstart-cluster.yaml").read_text())
    document["metadata"] = {"name": name, "namespace": namespace}
    document["spec"] |= spec
    return document


def condition(cluster: KubeCluster, kind: str, name: str, namespace: str) -> dict[str, Any]:
    """A condition of that job; {} if there is none."""
    job = cluster.get("rlhfjob", name, "-n", namespace) or {}
    found = (job.get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {})


def mark_planned(cluster: KubeCluster, namespace: str, name: str, status: str = "True") -> None:
    """As the operator does once a plan holds."""
    condition = {
        "type": "Planned",
        "status": status,
        "reason": "Planned",
        "message": "by the test",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"conditions": [condition]}})
    words = ("patch", "rlhfjob", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    cluster.kubectl(*words)
