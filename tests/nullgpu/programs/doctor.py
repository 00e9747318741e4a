"""What `dovetail doctor --gpu` finds, and what a process asks first."""

from __future__ import annotations

import os
from typing import Any

from worker import Place


def finds(place: Place, visible: str, **claimed: str) -> dict[str, Any]:
    """The report. `claimed`: variables of the null GPU."""
    from dovetail.tools.doctor.finding import report
    from dovetail.tools.doctor.gpu_checks import check_gpus

    os.environ |= {"CUDA_VISIBLE_DEVICES": visible, **claimed}
    return report(check_gpus())


def asks(place: Place, **claimed: str) -> str:
    """The least capability, or why a process ends."""
    from dovetail.gpus.kernel_check import my_capability

    os.environ |= claimed
    try:
        return str(my_capability())
    except ValueError as error:
        return str(error)
