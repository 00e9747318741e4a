"""Looks for iterations and phases that take far longer than earlier ones. The functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from dovetail.coordinator.reporting.health import Verdict

PHASE_STALLED = "PhaseStalled"
RUN_SILENT = "RunSilent"
# A phase stalls if it takes this many times its median, and also this many seconds more.
FACTOR = 6.0
LEAST_SECONDS = 1.0
# The median of fewer iterations says little.
KNOWN = 3
SILENT_SECONDS = 60.0
PREFIX = "seconds_"


def stalled_phases(rows: Sequence[Mapping[str, float]]) -> list[Verdict]:
    """Verdicts on the phases of the last row that took FACTOR times their median in the rows before it."""
    *before, last = rows or ({},)
    found = []
    for name, seconds in last.items():
        if not name.startswith(PREFIX) or seconds is None:
            continue
        usual = [row[name] for row in before if row.get(name) is not None]
        if len(usual) < KNOWN:
            continue
        middle = median(usual)
        if middle > 0 and seconds > FACTOR * middle and seconds - middle > LEAST_SECONDS:
            phase = name.removeprefix(PREFIX)
            found.append(
                Verdict(
                    PHASE_STALLED,
                    f"{phase} stalled: it took {seconds:.3g} s, {seconds / middle:.3g} times its median of "
                    f"{middle:.3g} s; the timeline of this iteration shows which process was late",
                )
            )
    return found


def silent(times: Sequence[float], now: float) -> Verdict | None:
    """A verdict if a running job has finished no step for a long time. `times` says when its steps were finished.
    `times` and `now` are in seconds since the epoch."""
    gaps = [after - before for before, after in pairwise(times)]
    if len(gaps) < KNOWN:
        return None
    usual, since = median(gaps[-20:]), now - times[-1]
    if since <= max(SILENT_SECONDS, FACTOR * usual):
        return None
    return Verdict(
        RUN_SILENT,
        f"no step has ended for {since:.0f} s, {since / usual if usual > 0 else 0:.3g} times the median of {usual:.3g} "
        "s; look at the newest events, and at the logs of the process that is named there",
    )
