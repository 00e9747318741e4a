"""Defines the result of placing a job, on any hardware, and describes a placement on GPUs for the plan document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dovetail.manifest.types import Parallelism, Stage
from dovetail.planner import lives
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.placement.search.search import Result
from dovetail.planner.simulate.lanes import Lanes
from dovetail.protocol.plan import Layout
from dovetail.protocol.prediction import Alternative, PredictedMemory, PredictedStage, PredictedTask, Prediction

# Splitting a model or interleaving must gain this factor over doing neither, because the cost model is not exact.
WORTH = 1.05
# The part of an optimizer step that the cost model does not count, such as launches and Python.
UNCOUNTED_SECONDS = 0.01
ALTERNATIVES = 12


class Infeasible(ValueError):
    """No layout of the job's groups can run it. The message is one sentence: what failed, and what would help."""


@dataclass(frozen=True)
class Chosen:
    """The placement of a PPO iteration on GPUs, with the costs that estimated it and the prediction."""

    candidate: Candidate
    costs: GPUCosts
    prediction: Prediction


@dataclass(frozen=True)
class Placed:
    """The placement of a job. `layouts`: the layout of each trained model on all ranks. `dedicated`: the layouts of
    actor and critic in PPO, if each has its own trainer ranks. `recompute`: the stages and models with activation
    checkpointing. `by_layer`: those to which the placement gives ZeRO-3. `prediction`: that of a PPO iteration, or None
    if nothing is predicted. `chosen`: the candidate and costs behind the prediction, on GPUs.

    `lanes()`: iterations with other lengths, for a job whose trainers and rollouts share no GPUs. `stages`: the
    predictions of DPO and of the stages before PPO, on GPUs. `warnings`: one sentence each."""

    layouts: Mapping[str, Parallelism]
    prediction: Prediction | None = None
    recompute: frozenset[tuple[Stage, str]] = frozenset()
    by_layer: frozenset[tuple[Stage, str]] = frozenset()
    dedicated: Mapping[str, Layout] = field(default_factory=dict)
    chosen: Chosen | None = None
    lanes: Callable[[], Lanes] | None = None
    stages: tuple[PredictedStage, ...] = ()
    warnings: tuple[str, ...] = ()

    def layouts_in(self, stage: Stage) -> Mapping[str, Parallelism]:
        """The layouts of the models in a stage."""
        return {**self.layouts, **self.dedicated} if stage is Stage.PPO else self.layouts

    @property
    def interleaved(self) -> bool:
        """Whether reference and reward run on halves of the rollouts."""
        return self.prediction is not None and self.prediction.placement == "Interleaving"


def worth(best: float, other: float, steps: int) -> bool:
    """Whether an iteration of `best` seconds gains more over one of `other` seconds than the cost model's error.
    `steps`: the optimizer steps of an iteration."""
    return other > WORTH * best + UNCOUNTED_SECONDS * steps


# ------------------------------------------------------------ on GPUs


def prediction(result: Result, costs: GPUCosts) -> Prediction:
    """The prediction of a result's best candidate, which must exist."""
    found = result.best
    assert found is not None
    candidate, estimate = found.candidate, found.estimate
    speed = costs.work.batch / estimate.seconds
    priced = lives.expected(estimate.phases, lives.uses(candidate, estimate.memory), costs.inventory)
    price = priced.per_thousand(costs.work.batch)
    return Prediction(
        placement=candidate.placement.value,
        note=candidate.note,
        schedule=candidate.schedule,
        migration=candidate.migration,
        iteration_seconds=estimate.seconds,
        synchronous_seconds=estimate.seconds,
        phases=dict(estimate.phases),
        samples_per_second=speed,
        samples_per_dollar=None if not price else 1000 / price,
        lost_share=priced.lost,
        hardware="measured" if costs.inventory.measured else "data sheets",
        tasks=[_task(task, share, costs) for task, share in candidate.placed],
        memory=[
            PredictedMemory(
                group=m.pool,
                first=m.range.start,
                gpus=len(m.range),
                parts=dict(m.device),
                host=dict(m.host),
                capacity=m.capacity,
            )
            for m in estimate.memory
        ],
        alternatives=[
            Alternative(
                placement=r.candidate.placement.value, note=r.candidate.note, seconds=r.seconds, problem=r.problem
            )
            for r in result.rejected[:ALTERNATIVES]
        ],
        examined=result.estimates,
    )


def _task(task: Task, share: Share, costs: GPUCosts) -> PredictedTask:
    return PredictedTask(
        task=task,
        group=share.pool,
        first=share.first,
        gpus=share.gpus,
        pp=share.pp,
        tp=share.tp,
        dp=share.dp,
        micro_batch=share.micro_batch,
        seconds=costs.option(task, share).seconds,
        details=list(_details(task, share)),
    )


def _details(task: Task, share: Share) -> list[str]:
    found = []
    if task in TRAINING and share.shards > 1:
        found.append(f"ZeRO-{share.fsdp}")
    if share.recompute:
        found.append("activation checkpointing")
    if task in INFERENCE and share.pp * share.tp > 1:
        found.append(f"split over {share.pp * share.tp} GPUs")
    if share.offload:
        where = {"generation": "asleep while others work"}.get(task, "weights wait in host memory")
        found.append("optimizer in host memory" if task in TRAINING else where)
    return found
