"""The settings of an administrator for all jobs. They are `DOVETAIL_*` variables of the operator's pod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dovetail.gpus.gpu_products import ANY, GPU, HardwareError, described, image_errors
from dovetail.gpus.kernels import DEFAULT_ARCHITECTURES, read_capability
from dovetail.kube.resources import Gang
from dovetail.manifest.types import RLHFJobSpec

_IMAGE = "dovetail/{}:0.1.0"


@dataclass(frozen=True)
class OperatorSettings:
    """The operator's settings. `api_account` is the status API's ServiceAccount in `namespace`. If it is empty, there
    is no API. The images are for groups that name none. `*_capabilities` are the compute capabilities for which these
    have kernels, such as 8.0. Empty stands for those of Dovetail's own images, and `any` turns the check off.
    `pod_template` is a strategic merge patch of every pod, applied before the group's own. Empty `namespaces` means
    all. `volume_*` describe the claim of a job whose manifest names none. An empty class means the cluster's default.
    Times are in seconds, and sizes are Kubernetes quantities. If `nodes_seconds` is 0, nodes are not looked at. Every
    `conflict_seconds` a job looks whether a name that it needs is free. A pod that has found no node for
    `stranded_seconds` is not waited for: drains go on, and a gang that lacks it is queued again. `gpu_products` are
    GPUs that the administrator describes. `metrics_from` has the NetworkPolicyPeers that may scrape jobs. If it is
    empty, nobody may. `egress` has the NetworkPolicyEgressRules for connections of jobs' pods to others. If it is None,
    they may connect to anything. `pod_user` is the number of the user and group of jobs' pods. If it is 0, the platform
    chooses. `notice_taints` are more taints of nodes that will end soon, besides those of `render/spot.py`. `gang` is
    the scheduler that starts a job's pods together (`render/gang.py`). If it is empty, pods start one by one, except in
    jobs in Kueue's queues. `start_timeout_seconds` is for jobs that name none. If it is 0, they wait for ever.
    `multi_kueue` says whether to make the Workloads of jobs that MultiKueue sends to other clusters. `sandboxes` says
    whether jobs may have Sandboxes, and `sandbox_template` is a strategic merge patch of their pods."""

    namespace: str = "dovetail-system"
    namespaces: tuple[str, ...] = ()
    identity: str = "operator"
    api_account: str = ""
    coordinator_image: str = _IMAGE.format("operator")
    trainer_image: str = _IMAGE.format("trainer")
    rollout_image: str = _IMAGE.format("rollout")
    trainer_capabilities: tuple[str, ...] = ()
    rollout_capabilities: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    pod_template: dict[str, Any] = field(default_factory=dict)
    surplus_priority_class: str = ""
    volume_size: str = "100Gi"
    volume_class: str = ""
    volume_access_mode: str = "ReadWriteMany"
    workers: int = 8
    planner_seconds: float = 60.0
    progress_seconds: float = 5.0
    nodes_seconds: float = 60.0
    conflict_seconds: float = 15.0
    stranded_seconds: float = 300.0
    health_port: int = 8080
    gpu_products: dict[str, GPU] = field(default_factory=dict)
    metrics_from: list[dict[str, Any]] = field(default_factory=list)
    egress: list[dict[str, Any]] | None = None
    pod_user: int = 65532
    notice_taints: tuple[str, ...] = ()
    gang: str = ""
    start_timeout_seconds: int = 0
    multi_kueue: bool = False
    sandboxes: bool = False
    sandbox_template: dict[str, Any] = field(default_factory=dict)

    def image_errors(self, spec: RLHFJobSpec) -> list[str]:
        """One sentence for each group of a job whose image is one of these, and has no kernels for the group's GPU."""
        trainer, rollout = map(_architectures, (self.trainer_capabilities, self.rollout_capabilities))
        return image_errors(spec, trainer, rollout, self.gpu_products)

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> OperatorSettings:
        """Read the settings from the environment. A variable that is not set keeps its default. Raises ValueError, or
        OSError for a pod template that cannot be read."""
        given = {key.removeprefix("DOVETAIL_").lower(): value for key, value in environ.items() if value}
        values: dict[str, Any] = {}
        for name, default in OperatorSettings().__dict__.items():
            if name not in given:
                continue
            text = given[name]
            if name == "pod_template":
                values[name] = _template(name, f"{text} is", Path(text).read_text(encoding="utf-8"))
            elif name == "sandbox_template":
                values[name] = _template(name, "it is", text)
            elif name == "gpu_products":
                values[name] = _products(text)
            elif name == "metrics_from":
                values[name] = _objects(name, text, "NetworkPolicyPeers")
            elif name == "egress":
                values[name] = _objects(name, text, "NetworkPolicyEgressRules")
            elif name == "gang" and text not in tuple(Gang):
                raise ValueError(f"DOVETAIL_GANG is {text!r}; use one of {', '.join(Gang)}")
            elif name.endswith("_capabilities"):
                values[name] = _capabilities(name, text)
            elif isinstance(default, bool):
                values[name] = text == "true"
            elif isinstance(default, tuple):
                values[name] = tuple(part.strip() for part in text.split(",") if part.strip())
            else:
                try:
                    values[name] = type(default)(text)
                except ValueError as error:
                    raise ValueError(f"DOVETAIL_{name.upper()} is {text!r}, not a number") from error
        return OperatorSettings(**values)


def _capabilities(name: str, text: str) -> tuple[str, ...]:
    given = tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        for part in given:
            if part != ANY:
                read_capability(part)
    except ValueError as error:
        raise ValueError(f"DOVETAIL_{name.upper()}: {error}") from error
    return given


def _architectures(given: tuple[str, ...]) -> tuple[str, ...]:
    if not given or ANY in given:
        return given or DEFAULT_ARCHITECTURES
    return tuple("sm_{}{}".format(*read_capability(text)) for text in given)


def _template(name: str, what: str, text: str) -> dict[str, Any]:
    """A pod template in YAML. `what` begins the sentence if it is none."""
    variable = f"DOVETAIL_{name.upper()}"
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{variable}: {what} no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{variable}: {what} no object with metadata and spec")
    # This is imported here, because the planner's process does not need it.
    from dovetail.operator.template_mistakes import first_mistake

    if (problem := first_mistake(document, "jobs")) is not None:
        raise ValueError(f"{variable}: {problem}")
    return document


def _products(text: str) -> dict[str, GPU]:
    """The GPUs that DOVETAIL_GPU_PRODUCTS describes."""
    try:
        return described(yaml.safe_load(text))
    except (HardwareError, yaml.YAMLError) as error:
        raise ValueError(f"DOVETAIL_GPU_PRODUCTS: {error}") from error


def _objects(name: str, text: str, kind: str) -> list[dict[str, Any]]:
    """A JSON list of objects of this kind."""
    items = yaml.safe_load(text)
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise ValueError(f"DOVETAIL_{name.upper()} is {text!r}, not a list of {kind}")
    return items
