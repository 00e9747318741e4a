"""The specification of a batch/v1 Job, for groups in the JobSet and for surplus rollouts."""

from __future__ import annotations

from dovetail.operator.render.context import Object
from dovetail.protocol.process.exit_codes import BAD_CONFIGURATION
from dovetail.protocol.process.process_names import CONTAINER

# A Job counts failures over its whole life. Those of an hour are counted by the operator, which ends the job.
NO_LIMIT = 2**31 - 1


def job_spec(template: Object, pods: int, *, hopeless: tuple[int, ...] = (BAD_CONFIGURATION,)) -> Object:
    """The specification of a Job with `pods` pods. A pod that dies is replaced, except after an exit code of
    `hopeless`."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(hopeless)}
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": NO_LIMIT,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": codes},
            ]
        },
        "template": template,
    }
