"""Memory of pods on CPUs: the models of `dovetail.planner.memory`, and what the processes hold besides. Needs no
measured machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

from dovetail.manifest.critic import shares_body
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.types import Dtype, Group, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner.machine.limits import memory_limit
from dovetail.planner.memory import Memory, Server, Training, rollout_memory, scorer_memory, training_memory
from dovetail.planner.memory.parts import GIB
from dovetail.planner.placement.configs import shapes
from dovetail.planner.scorers import scorer_models
from dovetail.planner.shape import Head, ModelShape
from dovetail.protocol.prediction import PodMemory

# What Python and its libraries hold in a trainer rank or a scorer, and in the two processes of a vLLM server.
PROCESS_BYTES = 0.75 * GIB
SERVER_BYTES = 1.9 * GIB
# On CPUs: vLLM's tokens of a step and of a block of its KV cache (dovetail.rollout.server.KV_BLOCK_TOKENS).
STEP_TOKENS = 2048
BLOCK_TOKENS = 128
# dovetail.rollout.scoring: CPU_TOKENS, MAX_TOKENS and LOGIT_BYTES.
PASS_TOKENS, PROMPT_TOKENS, LOGIT_BYTES = 2048, 8192, 512 * 2**20
# Those of a model that are there while the same process trains the other; gradients, since optimizer steps are applied
# when the weights are read next.
_STAYS = ("weights", "gradients", "optimizer", "moving average")
_GPU_ONLY = ("CUDA context", "CUDA graphs", "fragments")


def pod_memory(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    parallelism: Mapping[str, Parallelism],
    schedule: str,
    again: Collection[str] = (),
) -> list[PodMemory]:
    """Of PPO's pods, at the peak: processes do not take turns with memory, what one has had it keeps. `again`: models
    that make their activations again. Equal neighbours together. [] for jobs with GPUs or without PPO, or where a
    model's configuration is not known. Raises ConfigError."""
    known = shapes(spec, configs)
    if known is None or Stage.PPO not in spec.stages or not all(g.on_cpu for g in spec.groups):
        return []
    if any(known[m].layers < layout.pp for m, layout in parallelism.items() if m in known):
        return []
    trainer = _trainer(spec, known, parallelism, schedule, again)
    rollouts = iter(scorer_models(spec, sum(pod_count(g) for g in spec.groups if Role.ROLLOUT in g.roles)))
    found = []
    for number, group in enumerate(spec.groups):
        pods: list[dict[str, float]] = []
        for _ in range(pod_count(group)):
            parts = dict(trainer) if Role.TRAINER in group.roles else {}
            if Role.ROLLOUT in group.roles:
                parts |= _rollout(spec, known, group, next(rollouts))
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
    """A sentence for each group whose podTemplate allows, or asks for, less memory than its pods need."""
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
    return {f"{task}: {name}": float(size) for name, size in parts.items() if size and name not in _GPU_ONLY}


def _trainer(
    spec: RLHFJobSpec,
    known: Mapping[str, ModelShape],
    parallelism: Mapping[str, Parallelism],
    schedule: str,
    again: Collection[str],
) -> dict[str, float]:
    """The rank with most. Actor and critic take turns with their activations unless a schedule runs both."""
    models = [model for model in ("actor", "critic") if model in parallelism]
    ranks = []
    for stage in range(max((parallelism[model].pp for model in models), default=0)):
        stays, works = {"trainer: process": PROCESS_BYTES}, []
        for model in models:
            job = _training(spec, known[model], model, parallelism[model], stage, model in again)
            parts = _named(f"{model}_training", job)
            kept = {name: size for name, size in parts.items() if name.split(": ")[1] in _STAYS}
            stays |= kept
            works.append({name: size for name, size in parts.items() if name not in kept})
        if schedule == "Serial":
            works = [max(works, key=lambda parts: sum(parts.values()))]
        ranks.append({name: size for parts in (stays, *works) for name, size in parts.items()})
    return max(ranks, key=lambda parts: sum(parts.values()), default={})


def _training(
    spec: RLHFJobSpec, shape: ModelShape, model: str, layout: Parallelism, stage: int, recompute: bool
) -> Mapping[str, float]:
    given = getattr(spec.models, model)
    head: Head = ("lm+value" if shares_body(spec) else "lm") if model == "actor" else "value"
    # Ranks of a model's own (Dedicated) share it among fewer, but hold no other: about the same, or less.
    count = max(1, spec.ppo.mini_batch_size // (layout.dp * spec.ppo.micro_batch_size))
    job = Training(
        shape,
        head,
        layout,
        Dtype.FLOAT32 if given.dtype is Dtype.AUTO else given.dtype,
        tokens=spec.ppo.micro_batch_size * (spec.data.max_prompt_tokens + spec.generation.max_tokens),
        micro_batches=count,
        in_flight=max(1, min(layout.pp - stage, count)),
        lora=given.lora,
        recompute=recompute,
        ema="device" if model == "actor" and spec.ppo.ema is not None else None,
        gpu=False,
    )
    return training_memory(job, min(stage, layout.pp - 1)).device


def _rollout(spec: RLHFJobSpec, known: Mapping[str, ModelShape], group: Group, scores: list[Any]) -> dict[str, float]:
    """A vLLM server, which allots its KV cache at once for all sequences that it takes, and the scorer beside it."""
    longest = spec.data.max_prompt_tokens + spec.generation.max_tokens
    length = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
    dtype = next((d for d in (group.dtype, spec.models.actor.dtype) if d is not Dtype.AUTO), Dtype.FLOAT32)
    server = Server(known["actor"], dtype, 0.0, batched_tokens=STEP_TOKENS)
    generation: Memory = rollout_memory(server, spec.generation.max_concurrent, length)
    models: list[tuple[ModelShape, Head]] = [(known[m], "lm" if m == "reference" else "value") for m in scores]
    # Several prompts share a pass up to PASS_TOKENS; one prompt's samples are in a pass of their own beyond that.
    alone = spec.data.max_prompt_tokens + spec.ppo.samples_per_prompt * spec.generation.max_tokens
    tokens = max(longest, PASS_TOKENS, min(alone, PROMPT_TOKENS))
    held = Dtype.FLOAT32 if group.dtype is Dtype.AUTO else group.dtype
    scorer = scorer_memory(models, held, tokens, swapped=False, logit_bytes=LOGIT_BYTES)
    return {
        **_named("generation", generation.device),
        "generation: processes": SERVER_BYTES,
        **_named("scorer", scorer.device),
        "scorer: process": PROCESS_BYTES,
    }
