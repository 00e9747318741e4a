"""Seconds of an iteration by phase."""

from __future__ import annotations

from dovetail.planner.costs.cpu_stage import best_stage
from dovetail.planner.costs.cpu_work import Work, slowdown
from dovetail.protocol.profile import Machine


def seconds(work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of the phases, one after the other, by the coordinator's names."""
    stage = best_stage(work, machine)
    return {
        "generation": stage.generated,
        "inference": stage.end - stage.generated,
        "training": training_seconds(work, machine),
        "weights": machine.weights.fixed + machine.weights.each * work.rollouts,
        "other": machine.other.fixed + machine.other.each * len(work.responses),
    }


def training_seconds(work: Work, machine: Machine) -> float:
    """Seconds of all optimizer steps. The last update is part of the weights' phase."""
    costs = machine.training
    exchange = costs.exchange if work.dp > 1 else 0.0
    passes = _passes(work, machine) * slowdown(work.ranks * costs.cores, machine.cores)
    if work.dp > 1:
        passes *= 1 + costs.straggling
    return costs.begin + work.steps * (costs.step + exchange) + passes


def _passes(work: Work, machine: Machine) -> float:
    """Seconds of the passes of all optimizer steps on an idle machine. With pipeline stages: 1F1B, model by model
    (Serial); both models together by PUZZLE's equation 1 (TimeSharing); with half of the pipeline's filling hidden
    too (Fused); or each model on its own ranks (Dedicated)."""
    stages = []
    for model in work.models:
        cost = machine.training.models[model]
        stages.append((work.executed * cost.fixed + work.tokens * cost.each) / work.pp)
    busy = sum(stages)
    if work.schedule == "Dedicated" and len(stages) > 1:
        return _apart(work, stages) + exposed_messages(work) * machine.training.message
    if work.pp == 1:
        return busy
    fills = {"Serial": busy, "TimeSharing": max(stages)}.get(work.schedule, max(stages) / 2) / work.micro_batches
    return busy + (work.pp - 1) * fills + exposed_messages(work) * machine.training.message


def _apart(work: Work, stages: list[float]) -> float:
    """Seconds of the slower model, if the ranks are divided in the best way."""

    def alone(stage: float, ranks: int) -> float:
        pp = max(1, min(work.pp, ranks // work.dp))
        return stage * work.ranks / ranks * (1 + (pp - 1) / work.micro_batches)

    actor, critic = stages
    return min(max(alone(actor, n), alone(critic, work.ranks - n)) for n in range(1, work.ranks))


def exposed_messages(work: Work) -> int:
    """Messages that nothing hides: there and back through the stages, in every optimizer step of each model."""
    return 2 * (work.pp - 1) * work.steps * len(work.models)
