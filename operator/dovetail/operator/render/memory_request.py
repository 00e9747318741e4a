"""The memory that a group's pods request, if neither the manifest nor the operator's settings say it. The functions are
pure.

It is in none of the hashes that decide whether running pods are replaced, because a new plan or a new version of the
operator may compute another number."""

from __future__ import annotations

import math

from dovetail.manifest.accelerators import SLEEP
from dovetail.manifest.types import Group, Role
from dovetail.protocol.plan import Plan

GIB = 2**30
# This is the smallest request. The prediction of a plan is rounded up to parts of a GiB.
LEAST_BYTES = GIB
STEP_BYTES = GIB / 4
# Peaks of running jobs were at most a tenth above the prediction.
MARGIN = 1.1
# This is the assumed host memory of Python, torch and the CUDA runtime in each process of a pod with GPUs.
GPU_PROCESS_BYTES = 2.0 * GIB
# torch rounds page-locked memory up to powers of two. On average that takes 1.44 times the size.
PAGE_LOCKED = 1.5
# The processes of a server beside one worker for each GPU: the API server, the engine core and the scorer.
SERVER_PROCESSES = 3


def memory_request(plan: Plan, group: Group) -> str:
    """The predicted memory of the group's largest pod, as a Kubernetes quantity."""
    wanted = _on_gpus(plan, group) if not group.on_cpu else _on_cpus(plan, group)
    steps = math.ceil(max(wanted, LEAST_BYTES) / STEP_BYTES)
    return f"{steps // 4}Gi" if steps % 4 == 0 else f"{steps * 256}Mi"


def _on_cpus(plan: Plan, group: Group) -> float:
    return MARGIN * max((pod.used for pod in plan.memory if pod.group == group.name), default=0.0)


def _on_gpus(plan: Plan, group: Group) -> float:
    """The host memory of a pod's processes and of each GPU's data there. These data are optimizer moments, models that
    are offloaded, and weights of a server that sleeps."""
    rollout, trainer = Role.ROLLOUT in group.roles, Role.TRAINER in group.roles
    processes = (trainer + rollout) * group.gpu.per_pod + SERVER_PROCESSES * rollout
    sleeps = rollout and (trainer or SLEEP in group.vllm_args)
    each = 0.0
    for found in plan.prediction.memory if plan.prediction is not None else ():
        if group.name in found.group.split("+"):
            asleep = found.parts.get("generation: weights", 0.0) if sleeps else 0.0
            each = max(each, sum(found.host.values()) + asleep)
    return processes * GPU_PROCESS_BYTES + group.gpu.per_pod * PAGE_LOCKED * each
