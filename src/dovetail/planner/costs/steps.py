"""Computes the seconds of optimizer steps in closed form, on any hardware, for 1F1B of one model and for two models
that share their ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """The times of one optimizer step of a model in a share, in seconds.

    `forward`, `backward`: a micro-batch in the slowest stage. `hop`: a message from stage to stage. `fixed`:
    collectives, the optimizer, and loading its moments from host memory. `skew`: the length of the longest micro-batch
    over that of the mean one. The longest one decides how fast a pipeline fills and drains. `samples`: the mean number
    of samples of a micro-batch."""

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
        """The seconds of the slowest stage, without bubbles."""
        return self.micro_batches * self.both

    @property
    def hops(self) -> float:
        """The seconds of waiting for boundary tensors. For every pp micro-batches they go there and back once."""
        return 2 * (self.stages - 1) * self.hop * max(1.0, self.micro_batches / self.stages)

    @property
    def alone(self) -> float:
        """The seconds of the step by 1F1B, (M + pp - 1)(f + b), with hops and fixed parts."""
        return self.work + self.bubble + self.hops + self.fixed

    @property
    def bubble(self) -> float:
        return (self.stages - 1) * self.both * self.skew


def together(
    actor: StepTimes, critic: StepTimes, schedule: str, filling: float | None = None, unsplit: bool = False
) -> float:
    """The seconds of one optimizer step of both models on the same ranks.

    Serial: the models run one after the other.
    TimeSharing: PUZZLE's equation 1, M (T1 + T2) + (P - 1) max(T1, T2), where T = f + b.
    Fused: RLHFuse's lower bound (section 7.3). The search of `dovetail.pipelines` reaches it almost or exactly. On each
    position it is the earliest arrival of work, plus all work there, plus the least time that remains afterwards. It is
    at least the time of each model alone.
    VShaped: the same bound with two half stages a rank. Work arrives and leaves in half the time, and a model alone has
    no bubbles. With `unsplit` backward passes are whole. Then no weight gradients fill the bubbles, and the search ends
    near the work of both models and half of the larger bubble.

    `filling`: a fused schedule takes TimeSharing's time, but only this fraction of the time for filling the pipeline.
    None: the bound is used."""
    serial = actor.alone + critic.alone
    if schedule == "Serial" or max(actor.stages, critic.stages) == 1:
        return serial
    rest = actor.hops + critic.hops + actor.fixed + critic.fixed
    if schedule == "TimeSharing":
        filling = 1.0
    if filling is not None:
        return min(serial, actor.work + critic.work + filling * max(actor.bubble, critic.bubble) + rest)
    positions = math.lcm(actor.stages, critic.stages)
    way = 0.5 if schedule == "VShaped" else 1.0
    bound = max(s.work + (s.bubble if way == 1.0 else 0.0) for s in (actor, critic))
    if schedule == "VShaped" and unsplit:
        bound = actor.work + critic.work + max(actor.bubble, critic.bubble) / 2
    for x in range(positions):
        i, j = x % actor.stages, critic.stages - 1 - x % critic.stages
        arrival = min(i * actor.forward * actor.skew, j * critic.forward * critic.skew)
        left = min(i * actor.backward * actor.skew, j * critic.backward * critic.skew)
        bound = max(bound, way * (arrival + left) + actor.work + critic.work)
    return min(serial, bound + max(actor.hops, critic.hops) + actor.fixed + critic.fixed)
