"""How many GPUs a scorer splits its models over: as few as they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.search import Rejected, Result


def fewest_stages(limits: Limits, most: int, search: Callable[[Limits], Result]) -> tuple[Result, Limits]:
    """What `search` finds with the fewest pipeline stages of inference models with which anything fits, and the limits
    of that search. Powers of two up to `most` are tried; if nothing fits with any, the last try is returned. The result
    also rejects fewer stages, with the reason.

    More stages would let more GPUs of a pod score at once, but so far only the models of time say so."""
    failed: list[tuple[int, Result]] = []
    stages = 1
    while True:
        tried = replace(limits, inference_pp=min(stages, limits.inference_pp))
        result = search(tried)
        if result.best is not None:
            result.rejected += [why for count, other in failed for why in _why(count, other, result)]
        elif 2 * stages <= min(most, limits.inference_pp):
            failed.append((stages, result))
            stages *= 2
            continue
        return result, tried


def _why(stages: int, failed: Result, found: Result) -> list[Rejected]:
    """The reason, of the kind of placement that was found."""
    assert found.best is not None
    kind = (found.best.candidate.placement, found.best.note)
    how = "inference models whole" if stages == 1 else f"inference models on at most {stages} GPUs"
    same = [r for r in failed.rejected if r.problem is not None and (r.placement, r.note) == kind]
    return [Rejected(r.placement, "; ".join(n for n in (r.note, how) if n), None, r.problem) for r in same]
