"""Samples that leave a server and go on elsewhere, as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.store.samples import Key


@dataclass(frozen=True)
class Leave:
    """A sample's request was ended on purpose (`reason`: tail, drain, newcomer), or failed (failure), at `time`
    (monotonic seconds)."""

    instance: str
    reason: str
    time: float


@dataclass(frozen=True)
class Migration:
    """A sample that went on elsewhere. `mechanism`: tokens or kv; `tokens`: of prompt and response; `nbytes`: what was
    sent of them; `seconds`: from the decision to its first new token, at `ended` (since the epoch)."""

    key: Key
    source: str
    destination: str
    mechanism: str
    reason: str
    tokens: int
    nbytes: int
    seconds: float
    ended: float

    def fields(self) -> dict[str, Any]:
        """For the event log."""
        return {
            "sample": list(self.key),
            "instance": self.destination,
            "tokens": self.tokens,
            "source": self.source,
            "mechanism": self.mechanism,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
        }
