"""Places a job whose groups are CPUs of one measured machine. It takes the placement with the fewest predicted
seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dovetail.fusion.lengths import Lengths
from dovetail.manifest.checks.batching import longest_sample, micro_batch_tokens
from dovetail.manifest.critic import shares_body
from dovetail.manifest.sizes import pod_count, trained_models, trainer_world
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner.candidate import scorer_models
from dovetail.planner.costs.cpu import (
    CpuStageTimes,
    IterationWork,
    best_stage,
    chunk_seconds,
    forward_seconds,
    phases,
    training_seconds,
)
from dovetail.planner.placement.layouts import allowed_layouts
from dovetail.planner.placement.placed import Placed, worth
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.simulate.lanes import Lanes, Parts
from dovetail.protocol.files.machine_profile import Machine
from dovetail.protocol.prediction import MEASURED_NAMES, Alternative, PredictedTask, Prediction

# The number of iterations with random lengths whose mean is the prediction.
DRAWS = 8
# The fractions of the samples at which a tail may gather, if `plan.interStageFusion` is Auto.
THRESHOLDS = (None, 0.0, 0.1, 0.2, 0.3, 0.5)

# The names of the coordinator's phases in a prediction, where they differ.
PHASE_NAMES = {measured: predicted for predicted, measured in MEASURED_NAMES.items()}


def mismatch(job: PlannedJob) -> str | None:
    """A trained model whose layers or hidden size differ from those of the job's profile. None if all agree."""
    assert job.profile is not None
    for model in trained_models(job.spec) if job.shapes is not None else []:
        shape, measured = job.shape(model), job.profile.models.get(model)
        alike = measured is not None and (measured.layers, measured.hidden_size) == (shape.layers, shape.hidden)
        if model != "reward" and not alike:  # a profile has no reward model
            return model
    return None


def place(job: PlannedJob) -> Placed | None:
    """The fastest placement. It is None if a group has GPUs, if the profile has no whole iterations or has other
    models, if the job has no PPO, or if no layout divides its batches. The caller says why."""
    spec, machine = job.spec, None if job.profile is None else job.profile.machine
    if machine is None or Stage.PPO not in spec.stages or not all(g.on_cpu for g in spec.groups):
        return None
    if job.shapes is None or mismatch(job) is not None:
        return None
    ranks = trainer_world(spec)
    allowed = {m: allowed_layouts(job, m, ranks, job.shape(m).layers) for m in trained_models(spec)}
    models = [m for m in ("actor", "critic") if m in allowed]
    both = [layout for layout in allowed["actor"] if all(layout in allowed[m] for m in models)]
    if not both or not all(allowed.values()):
        return None
    found = [
        predict_iteration(spec, machine, models, layout, placement)
        for placement in _placements(spec)
        for layout in both
    ]
    plain = next((f for f in found if f.placement != "Interleaving"), found[0])
    best = min(found, key=lambda f: f.seconds)
    if not worth(best.seconds, plain.seconds, best.work.steps):
        best = plain
    return Placed(
        {m: best.layout if m in models or best.layout in allowed[m] else allowed[m][0] for m in allowed},
        _prediction(spec, machine, best, [f for f in found if f is not best]),
        lanes=lambda: predicted_lanes(spec, machine, best),
    )


PlacementName = Literal["Flattening", "Interleaving", "Separation"]


@dataclass(frozen=True)
class PredictedIteration:
    """An iteration with one placement and layout. `stages`: generation and inference of iterations whose lengths are
    drawn at random. `phases`: mean seconds by the coordinator's names."""

    placement: PlacementName
    layout: Parallelism
    stages: Sequence[CpuStageTimes]
    phases: Mapping[str, float]

    @property
    def work(self) -> IterationWork:
        return self.stages[0].work

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def note(self) -> str:
        return f"{self.layout.pp} pipeline stages" if self.layout.pp > 1 else f"{self.layout.dp} data-parallel ranks"


def _placements(spec: RLHFJobSpec) -> Iterator[PlacementName]:
    both = any(g.colocated for g in spec.groups)
    if spec.plan.placement != "Auto":
        yield spec.plan.placement
        return
    yield "Flattening" if both else "Separation"
    if sum(pod_count(g) for g in spec.groups if Role.ROLLOUT in g.roles) > 1:
        yield "Interleaving"


def predict_iteration(
    spec: RLHFJobSpec, machine: Machine, models: Sequence[str], layout: Parallelism, placement: PlacementName
) -> PredictedIteration:
    """The mean iteration over DRAWS random draws of the lengths. The trained `models` all have `layout`."""
    pinned = spec.model_copy(update={"plan": spec.plan.model_copy(update={"placement": placement})})
    rng = np.random.default_rng(spec.seed)
    works = [work_of(pinned, models, layout, *_lengths(spec, machine, rng)) for _ in range(DRAWS)]
    stages = [best_stage(work, machine) for work in works]
    found = [phases(stage, machine) for stage in stages]
    return PredictedIteration(placement, layout, stages, {n: sum(f[n] for f in found) / DRAWS for n in found[0]})


def predicted_lanes(spec: RLHFJobSpec, machine: Machine, best: PredictedIteration) -> Lanes:
    """The same iterations as two lanes that share the machine's cores. With a lag the trainers recompute the old
    log-probabilities."""
    synchronous, lagged = [], []
    for stage in best.stages:
        work, found = stage.work, phases(stage, machine)
        made = {PHASE_NAMES.get(name, name): found[name] for name in ("weights", "generation", "inference")}
        learnt = {name: found[name] for name in ("training", "other")}
        cores = stage.core_seconds / stage.end, min(work.ranks * machine.training.cores, float(machine.cores))
        parts = Parts(made, learnt, max(0.0, stage.end - stage.working), cores)
        synchronous.append(parts)
        if spec.ppo.old_log_probs == "Rollout":
            learnt = {**learnt, "training": learnt["training"] + forward_seconds(work, machine)}
        lagged.append(replace(parts, training=learnt))
    return Lanes(synchronous, lagged, machine.cores)


def _lengths(spec: RLHFJobSpec, machine: Machine, rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws the tokens of prompts and of responses, (batch,) each. Prompts are as long as the measured mean. Responses
    are as in a run of the job if there was one. Otherwise they end as the measured policy ends them, or have a long
    tail if that was not measured."""
    count, longest = spec.ppo.global_batch_size, spec.generation.max_tokens
    prompts = (min(round(machine.prompt_tokens), spec.data.max_prompt_tokens),) * count
    if machine.responses is not None:
        drawn = Lengths(*machine.responses, longest).draw(count, rng)
    elif machine.end_rate is not None:
        drawn = np.minimum(rng.geometric(machine.end_rate, count), longest)
    else:
        drawn = Lengths.long_tailed(longest).draw(count, rng)
    return prompts, tuple(int(n) for n in drawn)


def work_of(
    spec: RLHFJobSpec,
    models: Sequence[str],
    layout: Parallelism,
    prompts: tuple[int, ...],
    responses: tuple[int, ...],
) -> IterationWork:
    """The work of an iteration with these lengths. `spec.plan.placement` says which models each scorer holds."""
    rollouts = sum(pod_count(g) for g in spec.groups if Role.ROLLOUT in g.roles)
    fusion = spec.plan.inter_stage_fusion
    return IterationWork(
        prompts=prompts,
        responses=responses,
        scores=tuple(tuple(s) for s in scorer_models(spec, rollouts)),
        models=tuple(models),
        mini_batch=spec.ppo.mini_batch_size,
        micro_batch=_micro_batch(spec, layout.dp),
        epochs=spec.ppo.epochs,
        pp=layout.pp,
        dp=layout.dp,
        schedule=_schedule(spec, models, layout),
        fusion=THRESHOLDS if fusion == "Auto" else (None if fusion == "Off" else float(fusion),),
        max_concurrent=spec.generation.max_concurrent,
        values_first=shares_body(spec),
    )


def _micro_batch(spec: RLHFJobSpec, dp: int) -> int:
    """The samples of a micro-batch. If it is cut by tokens, they are as many of the longest samples as fit."""
    tokens = micro_batch_tokens(spec, Stage.PPO)
    if tokens is None:
        return spec.ppo.micro_batch_size
    return min(spec.ppo.mini_batch_size // dp, max(1, tokens // longest_sample(spec, Stage.PPO)))


def _schedule(spec: RLHFJobSpec, models: Sequence[str], layout: Parallelism) -> str:
    pin = spec.plan.intra_stage_fusion if spec.ppo.micro_batch_tokens is None else "Serial"
    if len(models) < 2 or (layout.pp == 1 and (pin != "Dedicated" or layout.dp == 1)):
        return "Serial"
    return "Fused" if pin == "Auto" else pin


def _prediction(
    spec: RLHFJobSpec, machine: Machine, best: PredictedIteration, others: Sequence[PredictedIteration]
) -> Prediction:
    named = {PHASE_NAMES.get(name, name): value for name, value in best.phases.items()}
    return Prediction(
        placement=best.placement,
        note=f"{best.note}, all processes on {machine.cores} cores",
        schedule=best.work.schedule,
        migration=None,
        iteration_seconds=best.seconds,
        synchronous_seconds=best.seconds,
        phases=named,
        samples_per_second=spec.ppo.global_batch_size / best.seconds,
        hardware="measured",
        tasks=list(_tasks(spec, machine, best)),
        memory=[],
        alternatives=[
            Alternative(placement=o.placement, note=o.note, seconds=o.seconds)
            for o in sorted(others, key=lambda o: o.seconds)
        ],
        examined=len(others) + 1,
    )


def _tasks(spec: RLHFJobSpec, machine: Machine, best: PredictedIteration) -> Iterator[PredictedTask]:
    """The tasks of the plan. Inference takes as long as on an idle machine, and training as if it were alone."""
    rollouts = "+".join(g.name for g in spec.groups if Role.ROLLOUT in g.roles)
    trainers = "+".join(g.name for g in spec.groups if Role.TRAINER in g.roles)
    work, tokens = best.work, sum(best.work.prompts) + sum(best.work.responses)

    def task(name: str, group: str, pp: int, dp: int, micro: int, taken: float) -> PredictedTask:
        return PredictedTask(
            task=name, group=group, first=0, gpus=pp * dp, pp=pp, tp=1, dp=dp, micro_batch=micro, seconds=taken
        )

    yield task("generation", rollouts, 1, work.rollouts, 1, best.phases["generation"])
    for model in dict.fromkeys(m for held in work.scores for m in held):
        holders = sum(model in held for held in work.scores)
        yield task(model, rollouts, 1, holders, 1, chunk_seconds(machine, [model], tokens / holders))
    for model in work.models:
        alone = training_seconds(replace(work, models=(model,)), machine)
        yield task(f"{model}_training", trainers, work.pp, work.dp, work.micro_batch, alone)
