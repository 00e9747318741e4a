"""Chooses the dtype in which a server or scorer computes. Pure."""

from __future__ import annotations

from dovetail.gpus.kernels import BFLOAT16, Capability, show
from dovetail.manifest.types import Dtype


def serving_dtype(group: Dtype, actor: Dtype, capability: Capability | None) -> Dtype:
    """The group's dtype, or else the actor's. If neither is set, it is bfloat16 on a GPU and float32 on a CPU
    (`capability` is None on a CPU). GPUs below compute capability 8.0 have no bfloat16, so they use float16. Raises
    ValueError if the group itself asks for bfloat16 there."""
    old = capability is not None and capability < BFLOAT16
    if group is not Dtype.AUTO:
        if old and group is Dtype.BFLOAT16:
            assert capability is not None
            raise ValueError(
                f"the group's dtype is bfloat16, which a GPU of compute capability {show(capability)} does not have; "
                "set it to float16 or Auto"
            )
        return group
    if actor is Dtype.AUTO:
        actor = Dtype.FLOAT32 if capability is None else Dtype.BFLOAT16
    return Dtype.FLOAT16 if old and actor is Dtype.BFLOAT16 else actor
