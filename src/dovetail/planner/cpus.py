"""The seconds of an iteration on CPUs that all processes of a machine share, from measured costs, the placement with
the fewest of them, and the memory of pods on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from operator import mul
from typing import TYPE_CHECKING, Literal

from dovetail.fusion.curve import interpolate
from dovetail.fusion.decode import Decode
from dovetail.fusion.lengths import Lengths
from dovetail.fusion.profile import StageProfile
from dovetail.fusion.scorer_queues import SimulatedScorer, Together, score
from dovetail.fusion.stage import gather
from dovetail.manifest.checks.batching import longest_sample, micro_batch_tokens
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.manifest.sizes import pod_count, relays_weights, shares_body
from dovetail.manifest.types import Dtype, Group, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner.candidate import scorer_models
from dovetail.planner.lags import DrawnIterations, Parts
from dovetail.planner.memory import (
    GIB,
    ITEMSIZE,
    generation_step_bytes,
    kept_prefix_bytes,
    scoring_step_bytes,
    stage_parameters,
    training_memory,
)
from dovetail.planner.planned_job import SEVERAL, Placed, PlannedJob, allowed_layouts, worth
from dovetail.planner.seconds import StepTimes, together
from dovetail.protocol.budgets import KV_BLOCK_TOKENS, SCORER_CPU_TOKENS, SCORER_LOGIT_BYTES, SCORER_TOKENS
from dovetail.protocol.files.machine_profile import Machine
from dovetail.protocol.prediction import MEASURED_NAMES, Alternative, PodMemory, PredictedTask, Prediction

if TYPE_CHECKING:
    import numpy as np

_TINY = 1e-9
# The fraction of the time for filling a pipeline that a fused schedule does not hide.
FILLING = 0.5


@dataclass(frozen=True)
class IterationWork:
    """The work of one iteration. `prompts`, `responses`: tokens of each sample. `scores`: the models of each rollout's
    scorer. `models`: the trained models, each on `dp` data-parallel ranks with `pp` pipeline stages. `fusion`: the
    fractions of the samples left at which generation's tail may gather; the best one counts. With 0, scorers of idle
    rollouts work, but no sample migrates. With None, scoring waits until generation has ended. `values_first`: before
    the steps, a forward pass of the actor over all samples computes the values (a critic on the actor's body)."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    scores: tuple[tuple[str, ...], ...]
    models: tuple[str, ...]
    mini_batch: int
    micro_batch: int
    epochs: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    schedule: str = "Serial"
    fusion: tuple[float | None, ...] = field(default=(None,))
    max_concurrent: int = 256
    values_first: bool = False

    @property
    def rollouts(self) -> int:
        return len(self.scores)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    @property
    def steps(self) -> int:
        """The optimizer steps of each model."""
        return self.epochs * (len(self.responses) // self.mini_batch)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one rank and model in an optimizer step."""
        return self.mini_batch // (self.dp // self.cp * self.micro_batch)

    @property
    def passes(self) -> float:
        """The number of passes over all samples, forward and backward. A forward pass alone counts as a third."""
        return self.epochs + (1 / 3 if self.values_first else 0)

    @property
    def tokens(self) -> float:
        """The tokens of one rank in all passes of a model. Micro-batches are packed, and ranks get equal parts."""
        return self.passes * (sum(self.prompts) + sum(self.responses)) / self.dp

    @property
    def executed(self) -> float:
        """The micro-batches of one rank in all passes of a model."""
        return self.passes / self.epochs * self.steps * self.micro_batches


def slowdown(busy_cores: float, cores: int) -> float:
    """The factor by which everything takes longer if the processes want more cores than there are. It is at least 1."""
    return max(1.0, busy_cores / cores)


@dataclass(frozen=True)
class CpuStageTimes:
    """A stage of generation and inference. All values are seconds. `work`: the iteration. `generated`: when the last
    response ended. `end`: when all samples were scored. `working`: how long a rollout generated or scored, as the mean
    over the rollouts. `core_seconds`: how long the machine's cores were busy, summed over the cores."""

    work: IterationWork
    generated: float
    end: float
    working: float
    core_seconds: float


def stage_times(work: IterationWork, machine: Machine, fusion: float | None) -> CpuStageTimes:
    """Simulates a stage. `fusion`: one of `IterationWork.fusion`.

    If processes want more cores than there are, all of them take longer by the same factor. So the stage is simulated
    as if each process had the machine for itself, and the time between two events is stretched afterwards."""
    costs, prompts, responses = machine.generation, work.prompts, work.responses
    steps = tuple((n, max(_TINY, costs.step + n * costs.token)) for n in (1, 2))
    profile = StageProfile(
        steps, 0.0, 0.0, max_samples=work.max_concurrent, saturation=work.max_concurrent, request_seconds=costs.sample
    )
    # The costs have a step for each token, also for the first one, which Decode takes from the prefill.
    decode = Decode([n + 1 for n in responses], prompts, [profile] * work.rollouts)
    begin = None if fusion is None else int(fusion * len(responses))
    gather(decode, begin, 1)  # the KV cache is large enough
    generated = max(decode.end)
    free = dict(enumerate(decode.idle_at if fusion is not None else [generated] * work.rollouts))
    coming = sorted((end, prompts[i] + responses[i], i) for i, end in enumerate(decode.end))
    scorers = [
        SimulatedScorer(models, (i,), _seconds_of(machine, models)) for i, models in enumerate(work.scores) if models
    ]
    passes = score(scorers, coming, free)
    spans = [(0.0, idle, costs.cores) for idle in decode.idle_at]
    spans += [(each.start, each.end, machine.scoring.cores) for each in passes]
    changes: dict[float, tuple[int, float]] = {}  # of the processes that work and of the cores that they want
    for start, end, cores in spans:
        for edge, sign in ((start, 1), (end, -1)):
            count, wanted = changes.get(edge, (0, 0.0))
            changes[edge] = count + sign, wanted + sign * cores
    edges = sorted(changes)
    processes = list(accumulate(changes[edge][0] for edge in edges))[:-1]
    cores_wanted = list(accumulate(changes[edge][1] for edge in edges))[:-1]
    taken = [
        (there - here) * slowdown(wanted, machine.cores)
        for (here, there), wanted in zip(pairwise(edges), cores_wanted, strict=True)
    ]
    clock = list(accumulate(taken, initial=costs.begin))
    generated, end = interpolate(generated, edges, clock), clock[-1]
    waited = machine.scoring.begin if fusion is None or end > generated else 0.0
    working = math.fsum(map(mul, taken, processes)) / work.rollouts
    busy = math.fsum(each * min(wanted, machine.cores) for each, wanted in zip(taken, cores_wanted, strict=True))
    return CpuStageTimes(work, generated, end + waited, working, busy)


def _seconds_of(machine: Machine, models: Sequence[str]) -> Callable[[Together], tuple[float, float]]:
    def seconds(batch: Together) -> tuple[float, float]:
        return (batch_seconds(machine, models, sum(tokens for tokens, _ in batch)),) * 2

    return seconds


def batch_seconds(machine: Machine, models: Sequence[str], tokens: float) -> float:
    """The seconds that these models need to score a batch of `tokens` tokens on an idle machine."""
    return machine.scoring.batch + tokens * sum(machine.scoring.token[m] for m in models)


def best_stage(work: IterationWork, machine: Machine) -> CpuStageTimes:
    """Simulates the stage with each threshold of `work.fusion`, and returns the one that ends first."""
    return min((stage_times(work, machine, f) for f in work.fusion), key=lambda s: s.end)


def phases(stage: CpuStageTimes, machine: Machine) -> dict[str, float]:
    """The seconds of the phases of an iteration with this stage, one after the other, by the coordinator's names."""
    work = stage.work
    return {
        "generation": stage.generated,
        "inference": stage.end - stage.generated,
        "training": training_seconds(work, machine),
        "weights": machine.weights.fixed + machine.weights.each * work.rollouts,
        "other": machine.other.fixed + machine.other.each * len(work.responses),
    }


def training_seconds(work: IterationWork, machine: Machine) -> float:
    """The seconds of all optimizer steps. The last update is part of the phase `weights`."""
    costs = machine.training
    exchange = costs.exchange if work.dp > 1 else 0.0
    passes = _passes(work, machine) * slowdown(work.ranks * costs.cores, machine.cores)
    if work.dp > 1:
        passes *= 1 + costs.straggling
    return costs.begin + work.steps * (costs.step + exchange) + passes


def forward_seconds(work: IterationWork, machine: Machine) -> float:
    """The seconds of a forward pass of the actor over all samples. It recomputes the old log-probabilities."""
    cost = machine.training.models["actor"]
    alone = (work.executed * cost.fixed + work.tokens * cost.each) / work.passes / 3 / work.pp
    return alone * slowdown(work.ranks * machine.training.cores, machine.cores)


def _passes(work: IterationWork, machine: Machine) -> float:
    """The seconds of the passes of all optimizer steps on an idle machine. The models run one after the other (Serial),
    together on the same ranks (TimeSharing, Fused), or each on ranks of its own (Dedicated)."""
    steps = []
    for model in work.models:
        cost, count = machine.training.models[model], work.steps * work.micro_batches
        each = (work.executed * cost.fixed + work.tokens * cost.each) / (work.pp * count)
        steps.append(StepTimes(work.pp, work.micro_batches, each / 3, 2 * each / 3, 0.0, 0.0))
    messages = exposed_messages(work) * machine.training.message
    if len(steps) == 1:
        return work.steps * steps[0].alone + messages
    actor, critic = steps
    if work.schedule == "Dedicated":
        divided = (max(_on(work, actor, n), _on(work, critic, work.ranks - n)) for n in range(1, work.ranks))
        return work.steps * min(divided) + messages
    return work.steps * together(actor, critic, work.schedule, FILLING) + messages


def _on(work: IterationWork, step: StepTimes, ranks: int) -> float:
    """The seconds of a step if a model has only `ranks` of the ranks."""
    longer = work.ranks / ranks
    stages = max(1, min(work.pp, ranks // work.dp))
    return replace(step, stages=stages, forward=longer * step.forward, backward=longer * step.backward).alone


def exposed_messages(work: IterationWork) -> int:
    """The number of messages that nothing hides. In each step of each model they go through all stages and back."""
    return 2 * (work.pp - 1) * work.steps * len(work.models)


# The number of iterations with random lengths whose mean is the prediction.
DRAWS = 8
# The fractions of the samples at which a tail may gather, if `plan.interStageFusion` is Auto.
THRESHOLDS = (None, 0.0, 0.1, 0.2, 0.3, 0.5)

# The names of the coordinator's phases in a prediction, where they differ.
PHASE_NAMES = {measured: predicted for predicted, measured in MEASURED_NAMES.items()}


def mismatch(job: PlannedJob) -> str | None:
    """A trained model whose layers or hidden size differ from those of the job's profile. None if all agree."""
    assert job.profile is not None
    for model in job.trained if job.shapes is not None else []:
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
    allowed = {m: allowed_layouts(job, m, job.ranks, job.shape(m).layers) for m in job.trained}
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
        draw=lambda: drawn_on_cpus(spec, machine, best),
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
    import numpy as np  # not where only GPUs are planned, as in a browser

    pinned = spec.model_copy(update={"plan": spec.plan.model_copy(update={"placement": placement})})
    rng = np.random.default_rng(spec.seed)
    works = [work_of(pinned, models, layout, *_lengths(spec, machine, rng)) for _ in range(DRAWS)]
    stages = [best_stage(work, machine) for work in works]
    found = [phases(stage, machine) for stage in stages]
    return PredictedIteration(placement, layout, stages, {n: sum(f[n] for f in found) / DRAWS for n in found[0]})


def drawn_on_cpus(spec: RLHFJobSpec, machine: Machine, best: PredictedIteration) -> DrawnIterations:
    """The same iterations, whose processes share the machine's cores. With a lag the trainers recompute the old
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
    return DrawnIterations(synchronous, lagged, machine.cores)


def _lengths(spec: RLHFJobSpec, machine: Machine, rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws the tokens of prompts and of responses, (batch,) each. Prompts are as long as the measured mean. Responses
    are as in a run of the job if there was one. Otherwise they end as the measured policy ends them, or have a long
    tail if that was not measured."""
    count, longest = spec.ppo.global_batch_size, spec.generation.max_tokens
    prompts = (min(round(machine.prompt_tokens), spec.data.max_prompt_tokens),) * count
    if machine.responses is None and machine.end_rate is not None:
        return prompts, tuple(min(int(n), longest) for n in rng.geometric(machine.end_rate, count))
    lengths = Lengths.long_tailed(longest) if machine.responses is None else Lengths(*machine.responses, longest)
    return prompts, lengths.at(rng.standard_normal(count).tolist())


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
        micro_batch=_micro_batch(spec, layout.batch_shares),
        epochs=spec.ppo.epochs,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        schedule=_schedule(spec, models, layout),
        fusion=THRESHOLDS if fusion == "Auto" else (None if fusion == "Off" else float(fusion),),
        max_concurrent=spec.generation.max_concurrent,
        values_first=shares_body(spec),
    )


def _micro_batch(spec: RLHFJobSpec, shares: int) -> int:
    """The samples of a micro-batch. If it is cut by tokens, they are as many of the longest samples as fit."""
    tokens = micro_batch_tokens(spec, Stage.PPO)
    if tokens is None:
        return spec.ppo.micro_batch_size
    return min(spec.ppo.mini_batch_size // shares, max(1, tokens // longest_sample(spec, Stage.PPO)))


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
        yield task(model, rollouts, 1, holders, 1, batch_seconds(machine, [model], tokens / holders))
    for model in work.models:
        alone = training_seconds(replace(work, models=(model,)), machine)
        yield task(f"{model}_training", trainers, work.pp, work.dp, work.micro_batch, alone)


# The memory of Python and its libraries: in a trainer rank or a scorer, and in the two processes of a vLLM server.
PROCESS_BYTES = 0.75 * GIB
SERVER_BYTES = 1.9 * GIB
# The tokens of a step of vLLM on CPUs.
STEP_TOKENS = 2048
# The parts of a model's memory that stay while the same process trains the other model. Gradients stay too, because an
# optimizer step is applied when the weights are read next.
_STAYS = ("weights", "gradients", "optimizer", "moving average", "kept versions")


def pod_memory(job: PlannedJob, placed: Placed, schedule: str, chunks: int = 1) -> list[PodMemory]:
    """The peak memory of PPO's pods. A process keeps the memory that it once had, so processes do not take turns. Equal
    neighbours are one entry. The result is empty for jobs with GPUs or without PPO, and if a model's configuration is
    not known. `chunks`: see `Plan.chunks`. Raises ConfigError."""
    spec, known = job.spec, job.shapes
    if known is None or Stage.PPO not in spec.stages or not all(g.on_cpu for g in spec.groups):
        return []
    if any(known[m].layers < layout.pp for m, layout in placed.layouts.items() if m in known):
        return []
    # Schedules choose among the numbers of stages that a rank can hold.
    counts = {1, *(count for count in SEVERAL if count <= chunks)} if spec.plan.chunks == 1 else {spec.plan.chunks}
    trainers = (_trainer(job, placed, schedule, count) for count in counts)
    trainer = max(trainers, key=lambda parts: sum(parts.values()))
    rollouts = iter(scorer_models(spec, sum(pod_count(g) for g in spec.groups if Role.ROLLOUT in g.roles)))
    found = []
    for group in spec.groups:
        pods: list[dict[str, float]] = []
        for _ in range(pod_count(group)):
            parts = dict(trainer) if Role.TRAINER in group.roles else {}
            if Role.ROLLOUT in group.roles:
                parts |= _rollout(job, group, next(rollouts))
            pods.append(parts)
        first = 0
        for parts, equal in groupby(pods):
            count = len(list(equal))
            found.append(PodMemory(group=group.name, first=first, pods=count, parts=parts))
            first += count
    return found


def _named(task: str, parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{task}: {name}": float(size) for name, size in parts.items() if size}


def _trainer(job: PlannedJob, placed: Placed, schedule: str, chunks: int) -> dict[str, float]:
    """The memory of the trainer rank that needs most. Actor and critic take turns with their activations, unless a
    schedule runs both."""
    # With Dedicated a model has fewer ranks, but they hold no other model. So a rank needs about the same, or less.
    rules, layouts = [rule for rule in job.rules if rule.stage is Stage.PPO], placed.layouts
    ranks = []
    for stage in range(max((layouts[rule.model].pp for rule in rules), default=0)):
        stays, works = {"trainer: process": PROCESS_BYTES}, []
        for rule in rules:
            share = job.share(
                rule,
                layouts[rule.model],
                recompute=(rule.stage, rule.model) in placed.recompute,
                by_layer=(rule.stage, rule.model) in placed.by_layer,
                pipelines=1 if schedule == "Dedicated" else job.pipelines(rule.stage, layouts, rule.model),
            )
            at = min(stage, share.pp - 1)
            memory = training_memory(job.training(rule, share, Dtype.FLOAT32, at, chunks), at)
            parts = _named(f"{rule.model}_training", memory.device)
            kept = {name: size for name, size in parts.items() if name.split(": ")[1] in _STAYS}
            stays |= kept
            works.append({name: size for name, size in parts.items() if name not in kept})
        if schedule == "Serial":
            works = [max(works, key=lambda parts: sum(parts.values()))]
        ranks.append({name: size for parts in (stays, *works) for name, size in parts.items()})
    return max(ranks, key=lambda parts: sum(parts.values()), default={})


def _rollout(job: PlannedJob, group: Group, scores: Sequence[str]) -> dict[str, float]:
    """The memory of a vLLM server and of the scorer beside it. The server allocates its KV cache at the start, for all
    sequences that it takes."""
    spec = job.spec
    longest = spec.data.max_prompt_tokens + spec.generation.max_tokens
    length = -(-longest // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    dtype = next((d for d in (group.dtype, spec.models.actor.dtype) if d is not Dtype.AUTO), Dtype.FLOAT32)
    actor, itemsize = job.shape("actor"), ITEMSIZE[dtype]
    generation = {
        "weights": itemsize * stage_parameters(actor, "lm", 1, 1, 0),
        # At most the copy is in float32, as the trainers hold the weights.
        "received copy": 4.0 * stage_parameters(actor, "lm", 1, 1, 0) if relays_weights(spec, group) else 0.0,
        "a step": generation_step_bytes(actor, STEP_TOKENS, itemsize),
        "KV cache": spec.generation.max_concurrent * length * actor.kv_bytes(itemsize),
    }
    models: list[tuple[ModelShape, Head]] = [(job.shape(m), "lm" if m == "reference" else "value") for m in scores]
    # Up to SCORER_CPU_TOKENS several prompts share a pass. Beyond that the samples of one prompt have a pass alone.
    alone = spec.data.max_prompt_tokens + spec.ppo.samples_per_prompt * spec.generation.max_tokens
    tokens = max(longest, SCORER_CPU_TOKENS, min(alone, SCORER_TOKENS))
    held = ITEMSIZE[Dtype.FLOAT32 if group.dtype is Dtype.AUTO else group.dtype]
    scorer = {
        "weights": sum(held * stage_parameters(shape, head, 1, 1, 0) for shape, head in models),
        "kept prefixes": sum(kept_prefix_bytes(shape, longest, held) for shape, _ in models),
        # The models run one after another.
        "a step": max(
            (scoring_step_bytes(s, head, tokens, held, logit_bytes=SCORER_LOGIT_BYTES) for s, head in models),
            default=0.0,
        ),
    }
    return {
        **_named("generation", generation),
        "generation: processes": SERVER_BYTES,
        **_named("scorer", scorer),
        "scorer: process": PROCESS_BYTES,
    }
