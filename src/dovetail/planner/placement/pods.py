"""Computes the memory of pods on CPUs. It needs no measured machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from dovetail.manifest.checks.pod_templates import memory_limit
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.manifest.sizes import pod_count, relays_weights
from dovetail.manifest.types import Dtype, Group, Role, Stage
from dovetail.planner.candidate import scorer_models
from dovetail.planner.costs.memory import (
    GIB,
    ITEMSIZE,
    generation_step_bytes,
    kept_prefix_bytes,
    scoring_step_bytes,
    stage_parameters,
    training_memory,
)
from dovetail.planner.placement.placed import Placed
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.stages_a_rank import SEVERAL
from dovetail.protocol.budgets import KV_BLOCK_TOKENS, SCORER_CPU_TOKENS, SCORER_LOGIT_BYTES, SCORER_TOKENS
from dovetail.protocol.prediction import PodMemory

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
    for number, group in enumerate(spec.groups):
        pods: list[dict[str, float]] = []
        for _ in range(pod_count(group)):
            parts = dict(trainer) if Role.TRAINER in group.roles else {}
            if Role.ROLLOUT in group.roles:
                parts |= _rollout(job, group, next(rollouts))
            pods.append(parts)
        first = 0
        limit = memory_limit(group.pod_template)
        for parts, equal in groupby(pods):
            count = len(list(equal))
            found.append(
                PodMemory(
                    group=group.name,
                    first=first,
                    pods=count,
                    parts=parts,
                    limit=limit.size if limit else None,
                    field=f"spec.groups[{number}].podTemplate: {limit.name}" if limit else "",
                )
            )
            first += count
    return found


def too_small(found: list[PodMemory]) -> Iterator[str]:
    """A sentence for each group whose podTemplate limits or requests less memory than its pods need."""
    for group, pods in groupby(found, key=lambda each: each.group):
        worst = max(pods, key=lambda each: each.used)
        if worst.limit is None or worst.used <= worst.limit:
            continue
        largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in largest)
        yield (
            f"a pod of group {group} is expected to need {worst.used / GIB:.3g} GiB of memory (most: {parts}), but "
            f"{worst.field} is {worst.limit / GIB:.3g} GiB; raise it"
        )


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
