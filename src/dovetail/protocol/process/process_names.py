"""The name of each process of a job, and the module that it runs. A new kind of process is added here.

Names are the same in logs, metrics, traces and messages, on one machine and in pods."""

from __future__ import annotations

from dovetail.manifest import fixed_names

COORDINATOR = fixed_names.COORDINATOR
COORDINATOR_MODULE = "dovetail.coordinator.main"
TRAINER_MODULE = "dovetail.trainer.main"
SERVER_MODULE = "dovetail.rollout.serving.vllm_server"
SCORER_MODULE = "dovetail.rollout.scoring.scorer"
# The main process of a group's pod. It starts the pod's trainer ranks, or its vLLM server and scorer.
POD_MODULE = "dovetail.pod.main"
# The main process of a sandbox's pod.
RELAY_MODULE = "dovetail.coordinator.user_code.pod_relay"

CONTAINER = fixed_names.CONTAINER

_TRAINER, _SCORER = "trainer-", "-scorer"


def trainer_name(rank: int) -> str:
    """The name of a trainer rank, such as trainer-0."""
    return f"{_TRAINER}{rank}"


def rollout_name(group: str, index: int) -> str:
    """The name of the vLLM server of pod `index` of a group, such as rollouts-0."""
    return f"{group}-{index}"


def scorer_name(rollout: str) -> str:
    """The name of the scorer beside a vLLM server, such as rollouts-0-scorer."""
    return f"{rollout}{_SCORER}"


def is_trainer(name: str) -> bool:
    """Whether a process of this name is a trainer rank."""
    return name.startswith(_TRAINER)


def is_scorer(name: str) -> bool:
    """Whether a process of this name is a scorer."""
    return name.endswith(_SCORER)


def rollout_of(scorer: str) -> str:
    """The name of the vLLM server beside a scorer."""
    return scorer.removesuffix(_SCORER)
