"""The checks of `dovetail doctor --cluster`: whether the cluster of the current kubectl context can run jobs."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dovetail.gpus.gpu_products import GPU_RESOURCE, PRODUCT_LABEL, count
from dovetail.protocol.errors import last_said
from dovetail.tools.doctor.finding import Finding

SECONDS = 30.0
OURS, JOBSETS = "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io"
OPERATOR = "app.kubernetes.io/name=dovetail,app.kubernetes.io/component=operator"
INSTALL = "helm install dovetail helm/dovetail --namespace dovetail-system --create-namespace"


class KubectlFailed(Exception):
    """kubectl failed. The message is its last line."""


Ask = Callable[[Sequence[str]], Any]


def kubectl(arguments: Sequence[str]) -> Any:
    """The answer of kubectl with `-o json`, parsed. Raises KubectlFailed."""
    command = ["kubectl", *arguments, "-o", "json", f"--request-timeout={SECONDS:.0f}s"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    except FileNotFoundError as error:
        raise KubectlFailed("kubectl is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise KubectlFailed(f"kubectl gave no answer within {2 * SECONDS:.0f} s") from error
    if done.returncode:
        raise KubectlFailed(last_said(done.stderr, "kubectl gave no reason").rstrip("."))
    return json.loads(done.stdout)


def check_cluster(ask: Ask = kubectl) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. If the cluster does not answer, there is one finding only."""
    try:
        version = ask(["version"])
        server = version.get("serverVersion")
        if not server:
            raise KubectlFailed("kubectl reaches no API server")
    except KubectlFailed as error:
        mend = "install kubectl, and choose a cluster (kubectl config use-context)"
        yield Finding("cluster", "problem", str(error), mend)
        return
    yield Finding("cluster", "ok", f"the API server answers, Kubernetes {server.get('gitVersion', '?')}")
    for check in (_kinds, _operator, _nodes):
        try:
            yield from check(ask)
        except KubectlFailed as error:
            name = check.__name__.lstrip("_")
            yield Finding(name, "skipped", str(error), "ask the cluster's administrator, who may read it")


def _kinds(ask: Ask) -> Iterator[Finding]:
    names = {item["metadata"]["name"] for item in ask(["get", "customresourcedefinitions"])["items"]}
    if OURS in names:
        yield Finding("RLHFJob", "ok", "the cluster knows RLHFJobs")
    else:
        yield Finding("RLHFJob", "problem", "the cluster does not know RLHFJobs", f"install the chart: {INSTALL}")
    if JOBSETS in names:
        yield Finding("JobSet", "ok", "the JobSet controller's kind is there")
    else:
        yield Finding(
            "JobSet", "problem", "the cluster has no JobSet controller", "install it: https://jobset.sigs.k8s.io"
        )


def _operator(ask: Ask) -> Iterator[Finding]:
    items = ask(["get", "deployments", "--all-namespaces", "--selector", OPERATOR])["items"]
    if not items:
        yield Finding("operator", "problem", "no operator of Dovetail is installed", f"install the chart: {INSTALL}")
    for item in items:
        name = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
        ready, wanted = item.get("status", {}).get("readyReplicas", 0), item["spec"].get("replicas", 1)
        if ready:
            yield Finding("operator", "ok", f"{name}: {ready} of {wanted} pods are ready")
        else:
            mend = f"see why: kubectl -n {item['metadata']['namespace']} describe deployment {item['metadata']['name']}"
            yield Finding("operator", "problem", f"{name}: no pod is ready", mend)


def _nodes(ask: Ask) -> Iterator[Finding]:
    nodes = ask(["get", "nodes"])["items"]
    gpus: Counter[str] = Counter()
    for (product, each), number in count(nodes).items():
        gpus[product] += each * number
    unlabelled = [
        node["metadata"]["name"]
        for node in nodes
        if node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, "0") != "0"
        and PRODUCT_LABEL not in node["metadata"].get("labels", {})
    ]
    if gpus:
        listed = ", ".join(f"{number} x {product}" for product, number in sorted(gpus.items()))
        yield Finding("nodes", "ok", f"GPUs of nodes that are ready: {listed}", figures=dict(gpus))
    elif not unlabelled:
        mend = "install NVIDIA's GPU operator, or use groups without gpu.product"
        yield Finding("nodes", "warning", f"no node that is ready offers {GPU_RESOURCE}, so jobs run on CPUs", mend)
    if unlabelled:
        mend = "install NVIDIA's GPU feature discovery, or label the node with the name of its GPU"
        yield Finding("nodes", "problem", f"{unlabelled[0]} has GPUs but no label {PRODUCT_LABEL}", mend)
