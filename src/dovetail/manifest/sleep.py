"""Servers that leave their GPUs to others."""

from __future__ import annotations

from dovetail.manifest.types import Group, Role

SLEEP = "--enable-sleep-mode"


def sleeps(group: Group) -> bool:
    """Whether the group's vLLM servers sleep while the scorers or trainers beside them work. Those beside trainers
    always do, others if `vllmArgs` says so. Only servers on GPUs can."""
    return not group.on_cpu and (Role.TRAINER in group.roles or SLEEP in group.vllm_args)
