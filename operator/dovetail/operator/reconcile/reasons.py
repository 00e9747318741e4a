"""The reasons of conditions and events. All words that programs may act on are in this file."""

from __future__ import annotations

# Healthy, which also has the coordinator's verdicts (docs/health.md) as reasons
HEALTHY = "IterationHealthy"

# Planned
PLANNED = "Planned"
REPLANNED = "Replanned"
PLAN_OFF = "PlanOff"
PLANNING = "Planning"
INVALID_SPEC = "InvalidSpec"
INFEASIBLE = "PlanInfeasible"
CLASS_MISSING = "ClassMissing"
CLASS_UNREADABLE = "ClassUnreadable"
CLASS_INVALID = "ClassInvalid"
CLASS_REFUSES = "ClassRefuses"
PLANNER_TIMEOUT = "PlannerTimeout"
PLANNER_FAILED = "PlannerFailed"

# Suspended
SUSPENDED = "SuspendedByUser"
QUEUED = "WaitingForQuota"
NOT_SUSPENDED = "NotSuspended"

# Scheduled, Running, Degraded
ALL_SCHEDULED = "AllPodsScheduled"
CREATING = "CreatingPods"
UNSCHEDULABLE = "Unschedulable"
CLAIM_MISSING = "VolumeClaimMissing"
PODS_REFUSED = "PodsRefused"
ALL_READY = "AllPodsReady"
STARTING = "PodsStarting"
NOT_PLANNED = "NotPlanned"
STOPPED = "Suspended"
FINISHED = "JobFinished"
AS_EXPECTED = "AsExpected"
APPLY_FAILED = "ObjectRejected"
KIND_MISSING = "KindMissing"
NAME_CONFLICT = "NameConflict"
STARTED_ANEW = "StartedAnew"
REQUEUED = "Requeued"
WORKLOAD_ENDED = "WorkloadEnded"

# Events about pods
IMAGE_PULL = "ImagePullFailed"
CONFIG_MISSING = "SecretOrConfigMapMissing"
MOUNT_FAILED = "MountFailed"
NODE_LOST = "NodeNotReady"
OUT_OF_MEMORY = "OOMKilled"
EVICTED = "PodEvicted"
POD_FAILED = "PodFailed"
TRAINER_FAILED = "TrainerFailed"
ROLLOUT_FAILED = "RolloutFailed"
COORDINATOR_FAILED = "CoordinatorFailed"

# Completed, Failed
COMPLETED = "AllStagesDone"
IN_PROGRESS = "InProgress"
TRIED_AGAIN = "TriedAgain"
DEADLINE_EXCEEDED = "DeadlineExceeded"
JOBSET_FAILED = "JobSetFailed"
