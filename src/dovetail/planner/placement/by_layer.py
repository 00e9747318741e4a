"""Whether a job trains under ZeRO-3 where its manifest leaves that open (`plan.zero3: Auto`)."""

from __future__ import annotations

from dataclasses import replace

from dovetail.planner.placement.placed import Chosen, Placed
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.stages_a_rank import held, most_chunks
from dovetail.protocol.prediction import Alternative, Prediction


def gathers(chosen: Chosen) -> bool:
    """Whether a model trains under ZeRO-3."""
    return any(share.gathers for share in chosen.candidate.trained)


def may_gain(plain: Chosen) -> bool:
    """Whether ZeRO-3 may be faster than `plain`, which goes without. In the same layout it never is, by the cost model.
    So there must be something that a model with less memory needs not: stages, tensor parallel ranks, ranks of its own,
    activation checkpointing, small micro-batches, or a server beside it with little room."""
    candidate, work = plain.candidate, plain.costs.work
    beside = any(share.overlaps(server) for share in candidate.trained for server in candidate.generation)
    needs = any(share.pp * share.tp > 1 or share.recompute for share in candidate.trained)
    dedicated = candidate.schedule == "Dedicated"
    return needs or beside or dedicated or work.micro_batch_tokens is not None


def taken(plain: Placed | None, why: str, found: Placed) -> Placed:
    """`found`, which gains enough over `plain`, or is all that fits (`why`: without ZeRO-3), with the other among its
    alternatives."""
    if plain is None or plain.chosen is None:
        return _with_alternative(found, None, why)
    return _with_alternative(found, plain.chosen.prediction, None) if found.by_layer else plain


def reached(job: PlannedJob, plain: Placed) -> float:
    """Seconds of an iteration without ZeRO-3, with several stages on each rank if that is faster and the job permits
    it."""
    assert plain.chosen is not None
    spec, chosen = job.spec, plain.chosen
    actor, critic = chosen.candidate.actor_training, chosen.candidate.critic_training
    open_ = spec.plan.intra_stage_fusion == "Auto" and spec.ppo.micro_batch_tokens is None and not plain.dedicated
    seconds = chosen.prediction.iteration_seconds
    if not (open_ and critic and actor[0].pp == critic[0].pp > 1):
        return seconds
    chunks = most_chunks(job, plain, "Auto")
    return seconds if chunks == 1 else min(seconds, held(chosen, chunks).seconds)


def _with_alternative(found: Placed, plain: Prediction | None, problem: str | None) -> Placed:
    chosen = found.chosen
    if chosen is None or found.prediction is None:
        return found
    placement = (plain or found.prediction).placement
    seconds = None if plain is None else plain.iteration_seconds
    other = Alternative(placement=placement, note="without ZeRO-3", seconds=seconds, problem=problem)
    # The fastest first, then those that fail.
    others = sorted([other, *found.prediction.alternatives], key=lambda a: (a.seconds is None, a.seconds or 0.0))
    prediction = found.prediction.model_copy(update={"alternatives": others})
    return replace(found, prediction=prediction, chosen=Chosen(chosen.candidate, chosen.costs, prediction))
