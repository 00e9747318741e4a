"""Seconds of optimizer steps in closed form, on any hardware: 1F1B of one model, and of two that share their ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step of a model in a share. `forward`, `backward`: seconds of a micro-batch in the slowest stage;
    `hop`: from stage to stage; `fixed`: collectives, optimizer and its swap. `skew`: the longest micro-batch over the
    mean one: a pipeline fills and drains at the pace of the longest. `samples`: of a micro-batch, on average."""

    stages: int
    micro_batches: int
    forward: float
    backward: float
    hop: float
    fixed: float
    skew: float = 1.0
    samples: float = 1.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def work(self) -> float:
        """Seconds of the slowest stage, without bubbles."""
        return self.micro_batches * self.both

    @property
    def hops(self) -> float:
        """Seconds of waiting for boundary tensors: there and back once for every pp micro-batches."""
        return 2 * (self.stages - 1) * self.hop * max(1.0, self.micro_batches / self.stages)

    @property
    def alone(self) -> float:
        """1F1B: (M + pp - 1)(f + b)."""
        return self.work + self.bubble + self.hops + self.fixed

    @property
    def bubble(self) -> float:
        return (self.stages - 1) * self.both * self.skew


def together(actor: StepTimes, critic: StepTimes, schedule: str, filling: float | None = None) -> float:
    """Seconds of one optimizer step of both models on the same ranks.

    TimeSharing: PUZZLE's equation 1, M (T1 + T2) + (P - 1) max(T1, T2), T = f + b. Fused: RLHFuse's lower bound
    (section 7.3), which the search of `dovetail.pipelines` reaches or nearly so: on each position the earliest
    arrival, all work, the least that then remains, and each model alone. VShaped: the same with two half stages a rank:
    it is reached and left in half the time, and a model alone has no bubbles. `filling`: a fused schedule instead takes
    TimeSharing's time with so much of the pipeline's filling, as measured. Serial: one after the other."""
    serial = actor.alone + critic.alone
    if schedule == "Serial" or max(actor.stages, critic.stages) == 1:
        return serial
    rest = actor.hops + critic.hops + actor.fixed + critic.fixed
    if schedule == "TimeSharing" or filling is not None:
        filled = max(actor.bubble, critic.bubble) * (1.0 if schedule == "TimeSharing" or filling is None else filling)
        return min(serial, actor.work + critic.work + filled + rest)
    positions = math.lcm(actor.stages, critic.stages)
    way = 0.5 if schedule == "VShaped" else 1.0
    bound = max(s.work + (s.bubble if way == 1.0 else 0.0) for s in (actor, critic))
    for x in range(positions):
        i, j = x % actor.stages, critic.stages - 1 - x % critic.stages
        arrival = min(i * actor.forward * actor.skew, j * critic.forward * critic.skew)
        left = min(i * actor.backward * actor.skew, j * critic.backward * critic.skew)
        bound = max(bound, way * (arrival + left) + actor.work + critic.work)
    return min(serial, bound + max(actor.hops, critic.hops) + actor.fixed + critic.fixed)
