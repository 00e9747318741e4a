"""kopf without a memory of its own: it keeps nothing on objects, so it need not copy each to see what changed, nor
remember each.

That copying was two thirds of the operator's processor time, and what it remembers a kilobyte an object."""

from __future__ import annotations

from typing import Any

import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory


class NoDiffs(kopf.DiffBaseStorage):
    """What an object was before is nobody's business: handlers of plain events do not ask."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):
    """Handlers of plain events are called once."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any, **_: Any) -> Any:
        return essence


class NoMemories(ResourceMemories):
    """There are no memos, daemons or indices: a new memory does for every event."""

    async def recall(self, raw_body: Any, **options: Any) -> ResourceMemory:
        return await super().recall(raw_body, **options | {"ephemeral": True})
