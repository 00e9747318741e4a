"""What the search may choose: everything, what is executed today, or what a manifest leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dovetail.manifest.types import Parallelism
from dovetail.planner.candidate import Placement, Schedule, Task

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MIGRATIONS = (None, 0.1, 0.2, 0.3)
# For the best placement, once it is found.
FINE_MIGRATIONS = tuple(k / 100 for k in range(5, 100, 5))
# Most pipeline stages that serve or infer: each adds a message, and a stage's memory is small long before.
MOST_STAGES = 16


@dataclass(frozen=True)
class Limits:
    """`trainers`, `rollouts`: pools that may train, and that may generate and infer; None: all. Pools in both are
    shared by all tasks or divided between them. `whole`: a task takes all of a pool (the groups of a manifest).

    `micro_batch`: of training, None: open. `batches`: by training task, numbers of micro-batches of the model's other
    stages, which its data-parallel ranks must share evenly. `layouts`: those allowed of a training task; all if it
    is not named. `servers`: GPUs of a vLLM server by pool, open if it is not named; `within`: a server is on one
    node; `asleep`: pools whose servers leave the GPU to others, and whose scorers' weights wait in host memory.
    `inference_tp`: most tensor parallel ranks in inference; `serving_pp`, `inference_pp`: most pipeline stages of a
    vLLM server and in inference. `fsdp`, `recompute`: values allowed in training;
    `offload`: by training task, open if it is not named; `swap`: of `offload` in other pools' inference. `folded`: the
    rollouts' log-probabilities serve as the old ones.
    `shared_body`: the critic is a head on the actor. `apart`: whether actor and critic may train on GPUs of their
    own (True) or on the same (False). `together`: they have one micro-batch size and one tp, and inference runs
    beside generation, in a scorer for each server."""

    placements: tuple[Placement, ...] = tuple(Placement)
    trainers: tuple[str, ...] | None = None
    rollouts: tuple[str, ...] | None = None
    whole: bool = False
    micro_batch: int | None = None
    batches: Mapping[Task, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[Task, tuple[Parallelism, ...]] = field(default_factory=dict)
    servers: Mapping[str, int] = field(default_factory=dict)
    asleep: tuple[str, ...] = ()
    inference_tp: int = 64
    serving_pp: int = MOST_STAGES
    inference_pp: int = MOST_STAGES
    within: bool = False
    fsdp: tuple[Literal[0, 1, 2, 3], ...] = (2, 3)
    recompute: tuple[bool, ...] = (False, True)
    offload: Mapping[Task, tuple[bool, ...]] = field(default_factory=dict)
    swap: tuple[bool, ...] = (False, True)
    schedules: tuple[Schedule, ...] = ("Serial", "TimeSharing", "Fused")
    migrations: tuple[float | None, ...] = MIGRATIONS
    folded: bool = True
    shared_body: bool = False
    apart: tuple[bool, ...] = (False, True)
    together: bool = False

    def executed(self) -> Limits:
        """Only what trainers and scorers run today: FSDP2 as ZeRO-2, actor and critic with one tp, vLLM servers in a
        pod each, a scorer beside each server, whose models are whole or in pipeline stages on its pod's GPUs, where
        they stay."""
        return replace(
            self,
            inference_tp=1,
            within=True,
            fsdp=(2,),
            swap=(False,),
            together=True,
        )


def every_layout(ranks: int, degrees: Iterable[int], layers: int) -> Iterator[Parallelism]:
    """Every (pp, tp, dp) over `ranks`, tp one of `degrees`, with at most a stage a layer."""
    for tp in degrees:
        for pp in range(1, min(layers, ranks // tp) + 1):
            if ranks % (pp * tp) == 0:
                yield Parallelism(pp=pp, tp=tp, dp=ranks // (pp * tp))
