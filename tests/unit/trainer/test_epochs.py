"""Epochs of communicators: no two coordinators of a run use the same one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.coordinator.workers import publishing
from dovetail.coordinator.workers.publishing import Publisher, Target
from dovetail.protocol.messages import CommandResult, Publish


class Trainers:
    """They refuse each publish, which makes each epoch a new one."""

    generation = 1

    def __init__(self) -> None:
        self.epochs: list[int] = []

    async def execute(self, command: Publish, timeout: float, beside: bool = False) -> CommandResult:
        self.epochs.append(command.epoch)
        return CommandResult(id=command.id, ok=True)

    def cancel(self, command_id: str) -> None: ...


def epochs_of_a_coordinator(transfers: int) -> list[int]:
    trainers: Any = Trainers()
    session: Any = None

    async def publish() -> None:
        publisher = Publisher(trainers, session, 1.0)
        for version in range(transfers):
            await publisher.publish(version, [Target("s", "scorer", "http://x", str(version))])

    asyncio.run(publish())
    return list(trainers.epochs)


@pytest.mark.parametrize(("later", "transfers"), [(0.0, 2), (2.0, 50)])
def test_a_restarted_coordinator_reuses_no_epoch(monkeypatch: pytest.MonkeyPatch, later: float, transfers: int) -> None:
    """Its clock was set back, or the first one made many transfers a second."""
    now = publishing.time.time()
    monkeypatch.setattr(publishing.time, "time", lambda: now)
    first = epochs_of_a_coordinator(transfers)
    monkeypatch.setattr(publishing.time, "time", lambda: now + later)
    again = epochs_of_a_coordinator(transfers)
    monkeypatch.setattr(publishing.time, "time", lambda: now - transfers)
    last = epochs_of_a_coordinator(transfers)
    assert len({*first, *again, *last}) == 3 * transfers
