"""When a request is given up, and when it is asked to leave its server. Pure."""

from __future__ import annotations

from dovetail.coordinator.fleet.fleet import Instance, InstanceHealth
from dovetail.coordinator.generation.work import GenerationSettings, Work


def given_up(
    work: Work, instance: Instance | None, now: float, server_heard: float, settings: GenerationSettings
) -> str | None:
    """Why a request's connection is to be dropped, if it is; "" if it did not heed being asked to end.

    `server_heard`: when any of its server's requests last got a token."""
    if instance is None or instance.incarnation != work.incarnation or instance.health is InstanceHealth.DEAD:
        return "its process is gone"
    if work.ending is not None and now - work.ending > settings.abort:
        return ""
    limit = settings.stall if now - server_heard > settings.stall else 10 * settings.stall
    if now - work.heard > limit:
        return f"no token for {now - work.heard:.0f} s"
    return None


def leaves(instance: Instance | None, quiet: float, elsewhere: bool, settings: GenerationSettings) -> str | None:
    """Why the samples of a server that still answers go on elsewhere, if they do: `drain` before its pod ends or on
    request, `suspect` when neither it nor its requests (for `quiet` seconds) were heard of and others are there."""
    if instance is None:
        return None
    if instance.draining or instance.health is InstanceHealth.RETIRED:
        return "drain"
    if instance.health is InstanceHealth.SUSPECT and elsewhere and quiet > settings.suspect:
        return "suspect"
    return None
