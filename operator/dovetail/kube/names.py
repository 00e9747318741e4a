"""Names and labels of all objects of a job. They are deterministic, so no object is created twice."""

from __future__ import annotations

import re

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.process.env import COORDINATOR_PORT, HUB_CACHE
from dovetail.protocol.process.process_names import COORDINATOR

FIELD_MANAGER = "dovetail-operator"
MANAGER = "dovetail.dev/operator"  # the default of spec.managedBy
TOKEN_KEY = "token"  # in the token's Secret
SANDBOX_KEY = "sandbox"  # in the token's Secret: the token of the sandboxes
ITERATIONS_KEY = "iterations.json"  # in the history's ConfigMap

INSTANCE_LABEL = "app.kubernetes.io/instance"
# Argo CD and Flux keep an object with these annotations when their source does not have it.
NEVER_PRUNED = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
}
JOB_LABEL = "dovetail.dev/job"
UID_LABEL = "dovetail.dev/job-uid"
GROUP_LABEL = "dovetail.dev/group"
ROLE_LABEL = "dovetail.dev/role"
# On a sandbox's pod: the job's uid. Such a pod has no label of the job's own pods, with which it has nothing in common.
SANDBOX_LABEL = "dovetail.dev/sandbox-of"
SURPLUS_LABEL = "dovetail.dev/surplus"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
CONTROLLER_UID_LABEL = "batch.kubernetes.io/controller-uid"  # Kubernetes' own label of a Job's pods
# These labels of a JobSet are hashes of the manifest's settings of pods. A part that later versions add gets its own
# label.
PODS_LABEL = "dovetail.dev/pods"
COORDINATOR_PODS_LABEL = "dovetail.dev/coordinator-pods"
PREEMPTIBLE_PODS_LABEL = "dovetail.dev/preemptible-pods"
# On a JobSet: the RLHFJobClass that the job names, and the hash of what the class gave.
CLASS_LABEL = "dovetail.dev/class"
CLASS_HASH_LABEL = "dovetail.dev/class-hash"
FOLDER = "dovetail.dev/folder"  # on a claim: the folder of the last job that used it
EARLIER_FOLDERS = "dovetail.dev/earlier-folders"  # on a claim: the folders of earlier jobs, the last one first
ROOM = "dovetail.dev/room"  # the pods of each GPU group for which nodes had room at planning
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
REPLICA_ANNOTATION = "jobset.sigs.k8s.io/job-index"
KUEUE = "kueue.x-k8s.io/"
QUEUE_LABEL = f"{KUEUE}queue-name"
# This is a label until Kueue 0.17, and an annotation since then.
WORKLOAD_LABEL = f"{KUEUE}prebuilt-workload-name"
JOB_UID_LABEL = f"{KUEUE}job-uid"  # on a Workload
ORIGIN_LABEL = f"{KUEUE}multikueue-origin"
MULTIKUEUE = f"{KUEUE}multikueue"  # in spec.managedBy
PRIORITY_LABEL = f"{KUEUE}priority-class"

VOLUME_MOUNT = "/var/dovetail"
CONFIG_MOUNT = "/etc/dovetail"
CLAIMS_MOUNT = "/var/dovetail-claims"
HUB_MOUNT = HUB_CACHE
OUTPUT_MOUNT = "/var/dovetail-output"
CODE_MOUNT = "/etc/dovetail-code"


def plan_config_map(job: str) -> str:
    """The ConfigMap with job.json and plan.json."""
    return f"{job}-plan"


def history_config_map(job: str) -> str:
    """The ConfigMap that keeps some iterations of a finished job."""
    return f"{job}-history"


def token_secret(job: str) -> str:
    """The Secret with the job's token. Every HTTP route between the job's pods requires the token."""
    return f"{job}-token"


def volume_claim(job: str) -> str:
    """The claim for the job's files if the manifest names none."""
    return f"{job}-files"


def account(job: str) -> str:
    """The name of the ServiceAccount of the job's pods. The Role and the RoleBinding of these pods and of the status
    API have the same name."""
    return f"{job}-pods"


def coordinator_service(job: str) -> str:
    """The headless Service in front of the coordinator."""
    return f"{job}-{COORDINATOR}"


def coordinator_url(job: str, namespace: str) -> str:
    """The URL at which the job's pods reach its coordinator."""
    return f"http://{coordinator_service(job)}.{namespace}.svc:{COORDINATOR_PORT}"


def sandbox(job: str, index: int) -> str:
    """A Sandbox, and its pod."""
    return f"{job}-sandbox-{index}"


def sandbox_policy(job: str) -> str:
    """The NetworkPolicy of the sandboxes."""
    return f"{job}-sandbox"


def sessions_service(job: str) -> str:
    """The Service at which sandboxes reach the coordinator. It has an address, so they need no names."""
    return f"{job}-sessions"


def surplus_job(job: str, group: str, index: int) -> str:
    """The Job of a surplus rollout, which is a rollout beyond the group's minimum. `index` is its number. The
    guaranteed rollouts have the first numbers."""
    return f"{job}-{group}-s{index}"


def run_dir(job: RLHFJob, uid: str) -> str:
    """The job's folder on its volume. If the manifest names none, an earlier RLHFJob with the same name had another
    one."""
    return f"{VOLUME_MOUNT}/{folder(job, uid)}"


def folder(job: RLHFJob, uid: str) -> str:
    """The last part of `run_dir`."""
    return job.spec.storage.folder or _sent_as(job) or workload(job.metadata.name, uid)


def workload(job: str, uid: str) -> str:
    """The Workload of a job that MultiKueue sends to another cluster. The copy there has another uid. Kueue compares
    the copy's containers with the Workload's, so what is made from the uid is made from this name instead."""
    return f"{job}-{uid[:8]}"


def sent_workload(job: RLHFJob) -> str | None:
    """The Workload that MultiKueue has made for this copy of a job. None if the job is no copy."""
    metadata = job.metadata
    return metadata.annotations.get(WORKLOAD_LABEL) or metadata.labels.get(WORKLOAD_LABEL)


def _sent_as(job: RLHFJob) -> str | None:
    """`sent_workload` if an operator made it. Anybody who may create jobs can write another name there."""
    name = sent_workload(job) or ""
    return name if re.fullmatch(re.escape(job.metadata.name) + "-[0-9a-f]{8}", name) else None


def labels(job: str, uid: str, component: str) -> dict[str, str]:
    """Labels of a child. The uid distinguishes it from the children of an earlier job with the same name."""
    return {
        "app.kubernetes.io/name": "dovetail",
        INSTANCE_LABEL: job,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        JOB_LABEL: job,
        UID_LABEL: uid,
    }
