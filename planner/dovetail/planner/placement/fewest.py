"""How many GPUs a scorer splits its models over: as few as they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.search import Result


def fewest_stages(limits: Limits, most: int, search: Callable[[Limits], Result]) -> tuple[Result, Limits]:
    """What `search` finds with the least limit on the stages of inference models, among powers of two up to `most`,
    with which anything fits, and the limits with it; where nothing does, those of the last try.

    More stages would let more GPUs of a pod score at once. Nothing but the models of time says so yet."""
    stages = 1
    while True:
        tried = replace(limits, inference_pp=min(stages, limits.inference_pp))
        result = search(tried)
        stages *= 2
        if result.best is not None or stages > min(most, limits.inference_pp):
            return result, tried
