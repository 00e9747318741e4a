"""A PPO step that learns its samples part by part, so that it can begin while others are still drawn (`ppo.streaming`).

The rows of the step's batch are cut into equal parts, in their order. Each part has its own advantages, micro-batches
and gradient. The gradients are added up in the order of the parts, and one optimizer step follows. A part depends on no
other part. So the bits are the same whether a part is learnt early (`Accumulate`) or with the step. Losses are first
divided by numbers that are known beforehand. When all samples are there, the gradient is scaled to the right ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dovetail.manifest.resolve import old_is_current
from dovetail.manifest.reward import ppo_config
from dovetail.manifest.types import PPO
from dovetail.models.config import balance_coefficient
from dovetail.protocol.messages import Accumulate, Step
from dovetail.protocol.wire import Arrays
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.packed_batches import read
from dovetail.trainer.steps.experience_batch import PPOSamples, counted_samples, recomputes_old_logprobs, targets
from dovetail.trainer.steps.ppo_step import (
    MiniBatch,
    RankSchedule,
    add_stats,
    before_step,
    check_returns,
    check_routing,
    micro_batch,
    step_metrics,
)
from dovetail.trainer.steps.step_context import Context, Metrics, Run, cut, digest

TOKENS, RESPONSES = (
    ("tokens", "routed_experts"),
    ("rollout_logprobs", "ref_logprobs", "values", "advantages", "returns", "step_rewards", "step_ends"),
)
STEPS = ("step_rewards", "step_ends")


@dataclass
class HeldParts:
    """The parts of the next step whose gradient the ranks hold. `step` is its number. `digests` has the digest of each
    part. `totals` are statistics of the losses. `old` has the log-probabilities of each part that the trainer has
    computed itself, (n, r). They are None if the rollout's are used."""

    step: int = 0
    digests: list[str] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    old: list[Tensor | None] = field(default_factory=list)

    def clear(self) -> None:
        """Drop the records of all parts. The caller drops the gradient."""
        self.step, self.digests, self.totals, self.old = 0, [], defaultdict(float), []


@dataclass(frozen=True)
class StreamedPart:
    """A part that was checked. `samples` has only its rows. `digest` covers its arrays, and the step's settings of its
    loss."""

    samples: PPOSamples
    digest: str


def rows_of(arrays: Arrays, start: int, stop: int) -> Arrays:
    """These rows of a PPO batch, with as little padding as they need. So the arrays do not depend on the other rows of
    the batch. Arrays of steps are left out if none of the rows has a step, because other rows may be the reason why the
    batch has them."""
    prompts, responses = (arrays[name][start:stop].astype(np.int64) for name in ("prompt_lengths", "response_lengths"))
    width, longest = int((prompts + responses).max()), int(responses.max())
    found = {}
    for name, array in arrays.items():
        rows = array[start:stop]
        found[name] = rows[:, :width] if name in TOKENS else rows[:, :longest] if name in RESPONSES else rows
    if not any(found[name].any() for name in STEPS if name in found):
        found = {name: rows for name, rows in found.items() if name not in STEPS}
    return found


def digest_of(arrays: Arrays) -> str:
    """A hash of the arrays' names, dtypes, shapes and contents."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hashed.update(f"{name} {array.dtype} {array.shape};".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()


def prepare_part(context: Context, held: HeldParts, command: Accumulate) -> Run:
    """Check what one rank can check about the part, and return the rest of the work. Raises BadCommand."""
    step = command.step
    _check_parts(context, step)
    models = _models(context, step)
    arrays = context.fetch(command.batch)
    rows = context.spec.ppo.global_batch_size // step.parts
    part = _part(context, step, models, arrays, 0, rows)
    if _rows(arrays) != rows:
        raise BadCommand(f"batch {command.batch} has {_rows(arrays)} rows, a part has {rows}")
    schedule = _schedule(context, step, models, rows)

    def run() -> Metrics:
        if held.step != step.step:
            _forget(context, held, step)
        if command.part < len(held.digests):
            return {}
        if command.part > len(held.digests):
            raise BadCommand(f"part {command.part} cannot follow the {len(held.digests)} parts that were learnt")
        _learn(context, held, step, models, schedule, part)
        return {"samples": float(rows)}

    return run


def prepare_step(context: Context, held: HeldParts, step: Step) -> Run:
    """Check what one rank can check about the iteration, and return the rest of it. Raises BadCommand."""
    config = ppo_config(context.spec)
    _check_parts(context, step)
    models = _models(context, step)
    arrays = context.fetch(step.batch)
    count = _rows(arrays)
    if count != context.spec.ppo.global_batch_size:
        raise BadCommand(f"batch {step.batch} has {count} samples, expected ppo.globalBatchSize")
    rows = count // step.parts
    parts = [_part(context, step, models, arrays, start, start + rows) for start in range(0, count, rows)]
    samples = PPOSamples.read(arrays, config)
    schedule = _schedule(context, step, models, rows)

    def run() -> Metrics:
        known = len(held.digests)
        if held.step != step.step or held.digests != [part.digest for part in parts[:known]]:
            _forget(context, held, step)
        early = len(held.digests)
        for part in parts[early:]:
            _learn(context, held, step, models, schedule, part)
        metrics = _finish(context, held, step, models, samples)
        return metrics | {"streamed_fraction": early / step.parts}

    return run


def _rows(arrays: Arrays) -> int:
    return len(read(arrays, "response_lengths", torch.int64, (None,)))


def _models(context: Context, step: Step) -> list[str]:
    models = ["actor"] if step.train_actor else []
    models += ["critic"] if "critic" in context.engine.loaded else []
    if not models:
        raise BadCommand("train_actor is false and no critic is loaded: the step would train nothing")
    return models


def _check_parts(context: Context, step: Step) -> None:
    ppo = context.spec.ppo
    if not step.parts or ppo.global_batch_size % step.parts:
        raise BadCommand(f"{ppo.global_batch_size} samples cannot be cut into {step.parts} equal parts")
    if ppo.global_batch_size != ppo.mini_batch_size or ppo.epochs != 1 or step.mini_batches != 1:
        raise BadCommand("an iteration of several optimizer steps cannot be learnt part by part")
    added = ppo.ptx_coef > 0 or ppo.right_coef > 0
    if context.require("actor").head != "lm" or added or step.micro_batch_tokens is not None:
        raise BadCommand("this job's steps cannot be learnt part by part; see spec.ppo.streaming")
    for name, model in context.engine.models.items():
        if balance_coefficient(model.config, getattr(context.spec.models, name).router_aux_loss_coef):
            raise BadCommand(
                f"the load-balancing loss of the {name}'s experts cannot be learnt part by part; set "
                f"spec.models.{name}.routerAuxLossCoef to 0, or spec.ppo.streaming to Never"
            )


def _schedule(context: Context, step: Step, models: list[str], rows: int) -> RankSchedule:
    counts = {name: rows // (context.model(name).dp_size * context.spec.ppo.micro_batch_size) for name in models}
    return RankSchedule(context.actions(step, counts), 1, digest(step.actions))


def _part(context: Context, step: Step, models: list[str], arrays: Arrays, start: int, stop: int) -> StreamedPart:
    config = ppo_config(context.spec)
    mine = rows_of(arrays, start, stop)
    samples = PPOSamples.read(mine, config)
    for name in models:
        context.check_vocabulary(context.model(name), samples.sequences)
    if "actor" in models:
        check_routing(context.model("actor").config, samples.sequences)
    if "critic" in models and samples.values is None and config.value_clip is not None:
        raise BadCommand("the batch has no array 'values', which the critic's clipped loss needs")
    # A manifest may get another ppo.kl.coef between a part and its step.
    return StreamedPart(samples, f"{digest_of(mine)} {step.kl_coef!r} {step.train_actor}")


def _forget(context: Context, held: HeldParts, step: Step) -> None:
    """Drop all parts and begin the step again."""
    held.clear()
    context.engine.drop_gradients()
    held.step = step.step


def _nominal(context: Context) -> int:
    """The divisor of token means while the token count is unknown. It is the token count of the longest possible
    responses."""
    return context.spec.ppo.global_batch_size * context.spec.generation.max_tokens


def _learn(
    context: Context, held: HeldParts, step: Step, models: list[str], schedule: RankSchedule, part: StreamedPart
) -> None:
    """Add the part's gradient. This is a collective call. Raises BadCommand."""
    config, samples = ppo_config(context.spec), part.samples
    old, trusted = None, not recomputes_old_logprobs(context.spec, context.groups.device.type)
    if not trusted and not old_is_current(context.spec):
        with context.timeline.phase("old log-probabilities"):
            old, _ = before_step(context, samples, None)
    goals = targets(samples, config, step.kl_coef, old, None, step.step)
    goals = replace(goals, current=not trusted and old is None)
    check_returns("critic" in models, goals)
    lengths = samples.sequences.lengths.tolist()
    work = {}
    for name in models:
        model = context.model(name)
        work[name] = cut(lengths, model.dp_size, config.micro_batch_size, None)[model.dp_rank]
    nominal = _nominal(context)
    all_samples = context.spec.ppo.global_batch_size
    mini = MiniBatch(work, nominal, nominal, all_samples, counted_samples(samples, config), None, 0, [], True)
    batches = {m: [micro_batch(m, context, samples, goals, mini, rows) for rows in work[m]] for m in models}
    number = len(held.digests)
    with context.timeline.phase(f"part {number}"):
        found = context.engine.run(schedule.actions, batches, 1, None, schedule.digest)
    for trained, stats in found.items():
        add_stats(held.totals, stats, "critic_" if trained == "critic" else "")
    held.digests.append(part.digest)
    held.old.append(old)


def _finish(context: Context, held: HeldParts, step: Step, models: list[str], samples: PPOSamples) -> Metrics:
    """Make one optimizer step with the gradient of all parts. It is applied layer by layer while the weights are
    published. This is a collective call."""
    config = ppo_config(context.spec)
    counted = counted_samples(samples, config)
    applied: dict[str, list[float]] = defaultdict(list)
    factors = normalisers(config, _nominal(context), samples.response_lengths, counted)
    if config.loss_aggregation != "Token":
        # These statistics were weighted for the nominal number of tokens.
        for name in {"policy_loss", "kl_loss"} & held.totals.keys():
            held.totals[name] *= factors["actor"] * held.totals["tokens"] / _nominal(context)
    with context.timeline.phase("optimizer"):
        for model in models:
            context.engine.scale_gradient(model, factors[model])
            for key, value in context.engine.optimizer_step(model, defer=True).items():
                applied[f"{model}_{key}"].append(value)
    tables = [each for each in held.old if each is not None]
    old = _joined(tables, samples.mask.shape[1]) if tables else None
    goals = targets(samples, config, step.kl_coef, old, None, step.step)
    metrics = goals.metrics | step_metrics(context, samples, held.totals, applied, models, counted)
    held.clear()
    return metrics | {"optimizer_steps": 1.0}


def normalisers(config: PPO, nominal: int, lengths: Tensor, counted: Tensor | None) -> dict[str, float]:
    """The factor for the gradient of each model, now that all samples are known. `lengths` (N,): response tokens.
    `counted` (N,) bool: the samples that train the policy, or None for all."""
    theirs = lengths if counted is None else lengths[counted]
    if config.loss_aggregation == "Token":
        policy = nominal / max(1, int(theirs.sum()))
    else:
        policy = len(lengths) / max(1, len(theirs))
    return {"actor": policy, "critic": nominal / max(1, int(lengths.sum()))}


def _joined(tables: list[Tensor], width: int) -> Tensor:
    """The tables (n, r), padded to the width and joined by rows, (N, width)."""
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
