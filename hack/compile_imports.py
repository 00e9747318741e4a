"""Imports once what the processes of a job on CPUs import, so that Python compiles and keeps it at the installation. A
quarter of the installed modules is enough. Otherwise a user's first job would compile them, for 12 CPU seconds."""

from __future__ import annotations

import importlib

from dovetail.rollout.serving.preload import preload

OTHERS = (
    "dovetail.cli.entry",
    "dovetail.cli.run",
    "dovetail.coordinator.main",
    "dovetail.coordinator.rewards.worker",
    "dovetail.coordinator.sessions.agent_worker",
    "dovetail.coordinator.sessions.environment_worker",
    "dovetail.coordinator.schedules.scheduling",
    "dovetail.launch.zygote",
    "dovetail.planner.make_plan",
    "tensorboard.summary",
)


def main() -> None:
    """Import what trainers, scorers and servers share, and then what the command and the coordinator need."""
    preload()
    for name in OTHERS:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
