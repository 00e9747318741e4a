"""When instances come, get a notice and die: drawn at random, or recorded."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Clouds' notices, seconds: GKE and Azure give the first, AWS the last.
NOTICES = (30.0, 120.0)


@dataclass(frozen=True)
class Life:
    """One instance of a slot, from its start to its death, seconds. `notice`: seconds before its death at which it is
    told; None: it dies suddenly."""

    slot: int
    start: float
    death: float
    notice: float | None = None

    @property
    def told(self) -> float | None:
        return None if self.notice is None else max(self.start, self.death - self.notice)


def drawn(
    seed: int, slots: int, seconds: float, life: float, gap: float, noticed: float, notices: Sequence[float] = NOTICES
) -> list[Life]:
    """Lives that last `life` seconds on average, with `gap` seconds on average between two of a slot (both
    exponential). A share of `noticed` get a notice. All slots have an instance at the start."""
    rng, found = random.Random(seed), []
    for slot in range(slots):
        at = 0.0
        while at < seconds:
            death = at + rng.expovariate(1 / life)
            notice = rng.uniform(*notices) if rng.random() < noticed else None
            found.append(Life(slot, at, death, notice))
            at = death + rng.expovariate(1 / gap)
    return sorted(found, key=lambda each: (each.start, each.slot))


def recorded(paths: Sequence[Path], notice: float | None) -> list[Life]:
    """A file a slot, as github.com/skypilot-org/spot-traces has them: `metadata.gap_seconds`, and `data`, whether there
    was an instance at each tick."""
    found = []
    for slot, path in enumerate(paths):
        document = json.loads(path.read_text(encoding="utf-8"))
        tick, gap = 0, float(document["metadata"]["gap_seconds"])
        for there, run in itertools.groupby(bool(value) for value in document["data"]):
            ticks = len(list(run))
            if there:
                found.append(Life(slot, tick * gap, (tick + ticks) * gap, notice))
            tick += ticks
    return sorted(found, key=lambda each: (each.start, each.slot))
