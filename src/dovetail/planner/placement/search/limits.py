"""Says what the search may choose: everything that trainers and scorers run, or what a manifest leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import LoRA, Parallelism
from dovetail.planner.candidate import Placement, Schedule, Task

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MIGRATIONS = (None, 0.1, 0.2, 0.3)
# These are tried for the best placement, once it is found.
FINE_MIGRATIONS = tuple(k / 100 for k in range(5, 100, 5))
# The most pipeline stages of a server and in inference. Each adds a message, and far fewer make a stage's memory small.
MOST_STAGES = 16


@dataclass(frozen=True)
class Limits:
    """The choices of the search. An open choice may have any value that trainers and scorers run. Actor and critic have
    one micro-batch size and one tp. Each vLLM server has a pod, and a scorer beside it. The scorer's models are whole
    or in pipeline stages on the pod's GPUs, and stay there.

    `placements`, `schedules`, `migrations`: the allowed values of a candidate's fields.
    `trainers`, `rollouts`: the pools that may train, and those that may generate and infer. None: all pools. A pool in
    both is shared by all tasks or divided between them.
    `whole`: a task takes all of a pool, as the groups of a manifest do.
    `micro_batch`: `Share.micro_batch` of training. None: it is open.
    `batches`: by training task, the numbers of micro-batches of the model's other stages. Its data-parallel ranks must
    share them evenly.
    `layouts`: the allowed layouts by training task. A task that is not named may have any layout.
    `servers`: the GPUs of a vLLM server, by pool. It is open for a pool that is not named.
    `asleep`: the pools whose servers sleep while others use the GPU. Their scorers' weights wait in host memory then.
    `serving_pp`, `inference_pp`: the most pipeline stages of a vLLM server, and in inference.
    `fsdp`, `recompute`: the allowed values in training.
    `offload`: the allowed values by training task. It is open for a task that is not named.
    `folded`: the rollouts' log-probabilities serve as the old ones.
    `dedicated`: whether actor and critic may train on GPUs of their own (True) or on the same GPUs (False)."""

    placements: tuple[Placement, ...] = tuple(Placement)
    trainers: tuple[str, ...] | None = None
    rollouts: tuple[str, ...] | None = None
    whole: bool = False
    micro_batch: int | None = None
    batches: Mapping[Task, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[Task, tuple[Parallelism, ...]] = field(default_factory=dict)
    servers: Mapping[str, int] = field(default_factory=dict)
    asleep: tuple[str, ...] = ()
    serving_pp: int = MOST_STAGES
    inference_pp: int = MOST_STAGES
    fsdp: tuple[Literal[0, 1, 2, 3], ...] = (2,)
    recompute: tuple[bool, ...] = (False, True)
    offload: Mapping[Task, tuple[bool, ...]] = field(default_factory=dict)
    schedules: tuple[Schedule, ...] = ("Serial", "TimeSharing", "Fused")
    migrations: tuple[float | None, ...] = MIGRATIONS
    folded: bool = True
    dedicated: tuple[bool, ...] = (False, True)


def tensor_degrees(shape: ModelShape, per_node: int, lora: LoRA | None) -> list[int]:
    """The tensor-parallel degrees of a trained model. A degree stays within a node of `per_node` GPUs and cuts a layer
    into equal parts. A model with adapters is not split."""
    most = 1 if lora is not None else per_node
    return [t for t in range(1, most + 1) if per_node % t == 0 and shape.split_problem(t) is None]


def every_layout(ranks: int, degrees: Iterable[int], layers: int) -> Iterator[Parallelism]:
    """Every layout over `ranks` ranks whose tp is one of `degrees`, with at most `layers` pipeline stages."""
    for tp in degrees:
        for pp in range(1, min(layers, ranks // tp) + 1):
            if ranks % (pp * tp) == 0:
                yield Parallelism(pp=pp, tp=tp, dp=ranks // (pp * tp))
