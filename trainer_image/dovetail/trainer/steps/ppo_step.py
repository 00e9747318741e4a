"""Trains one PPO iteration. It runs epochs of mini-batches, with one schedule for actor and critic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.manifest.resolve import old_is_current, ppo_config
from dovetail.manifest.sizes import value_coef
from dovetail.models import Outputs
from dovetail.models.config import family_facts
from dovetail.models.layers.logprobs import Entropy
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import Action, BatchPart, Step
from dovetail.protocol.wire import OF_RESPONSE, OF_SEQUENCE, Arrays, row_lengths
from dovetail.trainer.algorithms.advantages import Statistics
from dovetail.trainer.algorithms.importance import mismatch_metrics, truncated_weights
from dovetail.trainer.algorithms.kl import kl_loss
from dovetail.trainer.algorithms.losses import aggregation_weights, entropy_bonus, ptx_loss, right_loss, value_loss
from dovetail.trainer.algorithms.policy import LossInputs, policy_loss
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import (
    Packed,
    Sequences,
    micro_batch_count,
    mini_batches,
    moved_together,
    read,
    split_padded,
    unpacked,
)
from dovetail.trainer.steps.experience_batch import (
    PPOSamples,
    Targets,
    counted_samples,
    recomputes_old_logprobs,
    response_positions,
    right_samples,
    targets,
)
from dovetail.trainer.steps.sft_step import predictions
from dovetail.trainer.steps.step_context import Context, Metrics, Run, balance, cut, digest, mean

Stats = dict[str, Tensor]
PTX = ("ptx_tokens", "ptx_loss_mask")


@dataclass(frozen=True)
class Ptx:
    """Demonstrations that are mixed into the actor's loss. `mask` (N, T) bool marks the predictions to be learnt."""

    sequences: Sequences
    mask: Tensor


@dataclass(frozen=True)
class RankSchedule:
    """This rank's actions for `mini_batches` of each model. `digest` is the hash of all ranks' actions."""

    actions: list[Action]
    mini_batches: int
    digest: str


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of one optimizer step. `work` has the rows of each micro-batch, by the models on this rank.

    `counted` (N,) bool says which of the iteration's samples train the policy. If it is None, all do. `policy_tokens`
    and `policy_samples` count these in the whole mini-batch. `right` (N,) bool says which of the iteration's samples
    are right, and `right_tokens` counts their response tokens in the mini-batch. They are None and 0 without
    `rightCoef`. `ptx_rows` are its demonstrations."""

    work: dict[str, list[list[int]]]
    response_tokens: int
    policy_tokens: int
    policy_samples: int
    counted: Tensor | None
    right: Tensor | None
    right_tokens: int
    ptx_rows: list[int]
    first: bool


def prepare_step(context: Context, step: Step) -> Run:
    """Check what one rank can check about the iteration, and return the rest of it. Raises BadCommand."""
    config = ppo_config(context.spec)
    models = ["actor"] if step.train_actor else []
    shared = context.require("actor").head == "lm+value"
    if shared and not step.train_actor:
        raise BadCommand("train_actor is false, but the critic shares the actor's body and cannot train without it")
    if "critic" in context.engine.loaded:
        models.append("critic")
    if not models:
        raise BadCommand("train_actor is false and no critic is loaded: the step would train nothing")
    here = [name for name in models if name in context.engine.models]
    trusted = not recomputes_old_logprobs(context.spec, context.groups.device.type)
    recompute = not trusted and not old_is_current(context.spec)
    cuts: list[Cut] = []

    def part(index: Arrays) -> BatchPart:
        lengths = row_lengths("tokens", index)
        if lengths is None:  # what is wrong with the batch is found where it is read
            return BatchPart(whole=[*OF_SEQUENCE, *OF_RESPONSE, *PTX])
        cuts.extend(_cuts(context, step, lengths.tolist(), here))
        rows = {row for cut in cuts for parts in cut.work.values() for part in parts for row in part}
        if recompute or shared:
            micro, tokens = context.spec.ppo.micro_batch_size, step.micro_batch_tokens
            rows |= {row for part in context.passes("actor", lengths.tolist(), micro, tokens) for row in part.rows}
        return _part(context, sorted(rows))

    arrays = context.fetch(step.batch, part)
    samples = PPOSamples.read(arrays, config, own_values=shared)
    for name in here:
        context.check_vocabulary(context.model(name), samples.sequences)
    if "actor" in here:
        check_routing(context.model("actor").config, samples.sequences)
    ptx = _ptx(context, step, samples, arrays) if config.ptx_coef > 0 and step.train_actor else None
    minis = _mini_batches(context, cuts or _cuts(context, step, samples.sequences.lengths.tolist(), here), samples, ptx)
    if len(minis) % step.mini_batches or (ptx is not None and step.mini_batches > 1):
        raise BadCommand(
            f"a schedule of {step.mini_batches} mini-batches cannot be repeated for {len(minis)} optimizer steps"
            + (" with ptxCoef above 0" if ptx is not None else "")
        )
    actions = context.actions(step, {name: len(minis[0].work[name]) for name in here})
    schedule = RankSchedule(actions, step.mini_batches, digest(step.actions))
    if "critic" in models and samples.values is None and config.value_clip is not None:
        raise BadCommand("the batch has no array 'values', which the critic's clipped loss needs")
    learns_values = shared or "critic" in models

    def goals_of(samples: PPOSamples, recomputed: Tensor | None, statistics: Statistics) -> Targets:
        function, number = context.advantages, step.step
        found = targets(samples, config, step.kl_coef, recomputed, function, number, statistics)
        check_returns(learns_values, found)
        return found if recompute or shared else replace(found, current=not trusted)

    ready = None
    if not recompute and not shared and _has_all_rows(context):
        # The advantages need no collective here. So a bad batch is refused before anything has changed.
        statistics = Statistics()
        ready = goals_of(samples, None, statistics), statistics

    def run() -> Metrics:
        with_values, recomputed = samples, None
        if recompute or shared:
            with context.timeline.phase("old log-probabilities"):
                old, values = before_step(context, samples, step.micro_batch_tokens)
            with_values = replace(samples, values=values) if shared else samples
            recomputed = old if recompute else None
        goals = _shared_goals(context, lambda statistics: goals_of(with_values, recomputed, statistics), ready)
        return _train(context, samples, goals, ptx, minis, schedule, models)

    return run


def _has_all_rows(context: Context) -> bool:
    """Rank 0 reports metrics of all samples, and a function of the user sees all of them on each rank."""
    return context.groups.rank == 0 or context.advantages is not None


def _shared_goals(
    context: Context, make: Callable[[Statistics], Targets], ready: tuple[Targets, Statistics] | None
) -> Targets:
    """What `make` returns, or `ready`, which it has returned. A rank with some rows makes it with the statistics that
    rank 0 found. Raises BadCommand on every rank if it does on rank 0. This is a collective call."""
    groups = context.groups
    if context.advantages is not None:
        return make(Statistics()) if ready is None else ready[0]
    if groups.rank != 0:
        told = groups.broadcast_json(None)
        if told["error"] is not None:
            raise BadCommand(told["error"])
        return make(Statistics(told["found"]))
    statistics, error = Statistics(), None
    try:
        ready = ready or (make(statistics), statistics)
    except BadCommand as problem:
        error = problem
    groups.broadcast_json(
        {"error": error and str(error), "found": statistics.found if ready is None else ready[1].found}
    )
    if ready is None:
        assert error is not None
        raise error
    return ready[0]


def _part(context: Context, rows: list[int]) -> BatchPart:
    """The part of the batch for a rank that trains these rows."""
    whole = [*PTX, "step_rewards", "step_ends", "learnt"]
    some = ["tokens"] + ["routed_experts"] * ("actor" in context.engine.models)
    if context.advantages is not None:
        return BatchPart(whole=[*whole, *OF_SEQUENCE, *OF_RESPONSE])
    others = [name for name in OF_RESPONSE if name not in whole]
    if _has_all_rows(context):
        return BatchPart(rows=rows, some=some, whole=whole + others)
    return BatchPart(rows=rows, some=some + others, whole=whole)


def check_routing(config: Any, sequences: Sequences) -> None:
    """Raises BadCommand for experts that the actor does not have."""
    if sequences.routing is None:
        return
    experts = family_facts(config).experts
    if experts is None:
        raise BadCommand(f"the batch has 'routed_experts', but the actor, a {config.model_type} model, has no experts")
    found = list(sequences.routing.shape[2:])
    if found != (wanted := [config.num_hidden_layers, getattr(config, experts.chosen)]):
        raise BadCommand(
            f"batch array 'routed_experts' is of {found} layers and experts a token, the actor of {wanted}"
        )
    # transformers has two names for the number of experts, and both work.
    if int(sequences.routing.max()) >= getattr(config, experts.count[0]):
        raise BadCommand(f"batch array 'routed_experts' holds expert {int(sequences.routing.max())}, which is none")


def _unknown_share(samples: PPOSamples) -> float:
    """The share of tokens whose experts are not known. The last token of each sequence does not count, because nothing
    depends on its experts."""
    sequences = samples.sequences
    if samples.unknown_experts is not None:
        return int(samples.unknown_experts.sum()) / int((sequences.lengths - 1).sum())
    assert sequences.routing is not None
    counted = torch.arange(sequences.tokens.shape[1]) < sequences.lengths.unsqueeze(1) - 1
    return float((sequences.routing[:, :, 0, 0] < 0)[counted].double().mean())


def check_returns(learns_values: bool, goals: Targets) -> None:
    """Raises BadCommand if a critic is to learn and there are no returns."""
    if learns_values and goals.returns is None:
        raise BadCommand("a critic is loaded, but the batch's advantages come without returns to train it on")


def _ptx(context: Context, step: Step, samples: PPOSamples, arrays: Arrays) -> Ptx:
    sequences = Sequences.read(arrays, "ptx_")
    mask = read(arrays, "ptx_loss_mask", torch.uint8, tuple(sequences.tokens.shape))
    if "actor" in context.engine.models:
        context.check_vocabulary(context.model("actor"), sequences)
    steps = len(samples) // context.spec.ppo.mini_batch_size
    if len(sequences) < steps:
        raise BadCommand(f"{len(sequences)} ptx sequences are fewer than the {steps} mini-batches of an epoch")
    return Ptx(sequences, predictions(sequences, mask))


@dataclass(frozen=True)
class Cut:
    """The `rows` of a mini-batch, and those of each micro-batch of each model on this rank."""

    rows: list[int]
    work: dict[str, list[list[int]]]


def _cuts(context: Context, step: Step, lengths: list[int], models: list[str]) -> list[Cut]:
    """The mini-batches of an iteration whose samples have these lengths. Raises BadCommand."""
    config, seed, most = ppo_config(context.spec), context.spec.seed, step.micro_batch_tokens
    order = [*mini_batches(len(lengths), config.mini_batch_size, config.epochs, seed, step.step)]
    of_each = [[lengths[row] for row in rows] for _, rows in order]
    # One schedule runs all mini-batches, so each must have the same number of micro-batches.
    counts: dict[str, int | None] = dict.fromkeys(models)
    if most is not None:
        for name in models:
            model = context.model(name)
            counts[name] = micro_batch_count(of_each, model.dp_size, most, model.packs)
    found = []
    for (_, rows), theirs in zip(order, of_each, strict=True):
        work = {}
        for name in models:
            parts = cut(context.model(name), theirs, config.micro_batch_size, most, counts[name])
            work[name] = [[rows[i] for i in part] for part in parts]
        found.append(Cut(rows, work))
    return found


def _mini_batches(context: Context, cuts: list[Cut], samples: PPOSamples, ptx: Ptx | None) -> list[MiniBatch]:
    """Every optimizer step of the iteration. Mini-batch k of an epoch gets the k-th share of the ptx rows."""
    config = ppo_config(context.spec)
    counted, right = counted_samples(samples, config), right_samples(samples, config)
    lengths = samples.mask.sum(dim=1)
    steps = len(samples) // config.mini_batch_size
    minis = []
    for index, each in enumerate(cuts):
        rows, share = each.rows, list[int]()
        if ptx is not None:
            total, k = len(ptx.sequences), index % steps
            share = list(range(total * k // steps, total * (k + 1) // steps))
        tokens = int(lengths[rows].sum())
        theirs, of = tokens, len(rows)
        if counted is not None:
            theirs, of = int(lengths[rows][counted[rows]].sum()), int(counted[rows].sum())
        theirs_right = 0 if right is None else int(lengths[rows][right[rows]].sum())
        minis.append(MiniBatch(each.work, tokens, theirs, of, counted, right, theirs_right, share, index == 0))
    return minis


def _train(
    context: Context,
    samples: PPOSamples,
    goals: Targets,
    ptx: Ptx | None,
    minis: list[MiniBatch],
    schedule: RankSchedule,
    models: list[str],
) -> Metrics:
    totals: dict[str, float] = defaultdict(float)
    applied: dict[str, list[float]] = defaultdict(list)

    def stepped(name: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            applied[f"{name}_{key}"].append(value)

    for start in range(0, len(minis), schedule.mini_batches):
        span = minis[start : start + schedule.mini_batches]
        work = {
            m: [micro_batch(m, context, samples, goals, mini, r) for mini in span for r in mini.work[m]]
            for m in span[0].work
        }
        name = f"mini-batch {start}" if len(span) == 1 else f"mini-batches {start}-{start + len(span) - 1}"
        with context.timeline.phase(name):
            # The gradient of demonstrations must be added before the optimizer step.
            during = stepped if ptx is None else None
            # The iteration's last step is applied layer by layer while the weights are published.
            last = start + len(span) == len(minis)
            found = context.engine.run(schedule.actions, work, len(span), during, schedule.digest, defer=last)
            for model, stats in found.items():
                add_stats(totals, stats, "critic_" if model == "critic" else "")
        if ptx is not None:
            if span[0].ptx_rows:
                with context.timeline.phase(f"demonstrations {start}"):
                    add_stats(totals, _run_ptx(context, ptx, span[0], schedule.actions))
            with context.timeline.phase("optimizer"):
                for model in models:
                    stepped(model, context.engine.optimizer_step(model))
                context.engine.after_actor_step()
    metrics = goals.metrics | step_metrics(context, samples, totals, applied, models, minis[0].counted)
    if ptx is not None:
        metrics["ptx_loss"] = mean(totals, "ptx_loss", "ptx_tokens")
    metrics["optimizer_steps"] = float(len(minis))
    return metrics


def step_metrics(
    context: Context,
    samples: PPOSamples,
    totals: Mapping[str, float],
    applied: Mapping[str, Sequence[float]],
    models: Sequence[str],
    counted: Tensor | None,
) -> Metrics:
    """The metrics of a step's losses. `totals` are the sums of their statistics. `applied` has values for each
    optimizer step. `counted` (N,) bool says which samples train the policy. If it is None, all do."""
    metrics: Metrics = {}
    if counted is not None:
        metrics["counted_fraction"] = float(counted.double().mean())
    if "actor" in models:
        metrics |= {
            "policy_loss": mean(totals, "policy_loss", "tokens"),
            "ratio": mean(totals, "ratio", "tokens"),
            "approx_kl": mean(totals, "approx_kl", "tokens"),
            "entropy": mean(totals, "entropy", "tokens"),
        }
        metrics |= {name: mean(totals, name, "tokens") for name in totals if context.loss.reports(name)}
        if "right_tokens" in totals:
            right = samples.scores >= context.spec.ppo.right_score
            metrics["right_loss"] = mean(totals, "right_loss", "right_tokens")
            metrics["right_fraction"] = float(right.double().mean())
        if "kl_loss" in totals:
            metrics["kl_loss"] = mean(totals, "kl_loss", "tokens")
        if totals.get("routing_chosen"):
            metrics["routing_differs"] = mean(totals, "routing_differs", "routing_chosen")
        if samples.sequences.routing is not None or samples.unknown_experts is not None:
            metrics["routing_unknown"] = _unknown_share(samples)
        if totals.get("mismatch_tokens"):
            for name in ("mismatch_abs", "mismatch_kl", "mismatch_ratio", "mismatch_capped"):
                metrics[name] = mean(totals, name, "mismatch_tokens")
    if totals.get("value_tokens"):
        metrics["value_loss"] = mean(totals, "value_loss", "value_tokens")
        metrics["value_clipfrac"] = mean(totals, "value_clipped", "value_tokens")
        metrics["value"] = mean(totals, "value", "value_tokens")
    for name, values in applied.items():
        last = name.endswith("learning_rate")
        metrics[name] = values[-1] if last else sum(values) / len(values)
    return metrics | balance(totals) | balance(totals, "critic_")


def add_stats(totals: dict[str, float], stats: Mapping[str, float], prefix: str = "") -> None:
    """Add `stats` to the totals. `prefix` is for names that both actor and critic have."""
    for key, value in stats.items():
        totals[prefix + key if key.startswith("router_") else key] += value


# ---------------------------------------------------------------- micro-batches


def micro_batch(
    model: str, context: Context, samples: PPOSamples, goals: Targets, mini: MiniBatch, rows: list[int]
) -> MicroBatch:
    """The micro-batch of a model with these rows of the mini-batch, and its loss."""
    make = _actor_micro_batch if model == "actor" else _critic_micro_batch
    return make(context, samples, goals, mini, rows)


def _responses(samples: PPOSamples, rows: list[int]) -> tuple[Packed, Tensor]:
    """The rows, packed so that the outputs of their response tokens are wanted, and the mask (rows, R) of these
    tokens."""
    time = samples.sequences.tokens.shape[1]
    wanted = response_positions(samples.prompt_lengths[rows], samples.mask[rows], time)
    return samples.sequences.pack(rows, wanted), samples.mask[rows]


def _actor_micro_batch(
    context: Context, samples: PPOSamples, goals: Targets, mini: MiniBatch, rows: list[int]
) -> MicroBatch:
    """The policy's loss (`ppo.loss`), the entropy bonus and, if it is in the loss, the KL penalty over the response
    tokens of `rows`. If the actor has a value head, `valueCoef` times the value loss is added. So both need one
    backward pass."""
    config = context.spec.ppo
    temperature = context.spec.generation.temperature
    packed, keep = _responses(samples, rows)
    normaliser = max(1, mini.policy_tokens)
    share = aggregation_weights(
        keep.sum(dim=1),
        config.loss_aggregation,
        tokens=normaliser,
        samples=max(1, mini.policy_samples),
        longest=context.spec.generation.max_tokens,
    )

    counts = None if mini.counted is None else mini.counted[rows].unsqueeze(1).expand(keep.shape)
    right = None if mini.right is None else mini.right[rows].unsqueeze(1).expand(keep.shape)

    def loss(output: Predicted | Outputs) -> tuple[Tensor, Stats]:
        said = _said(output)
        wanted, logprobs, spread, device = said.tokens, said.logprobs, said.entropy, said.tokens.device
        numbers = [keep.nonzero()[:, 0]]
        numbers += [] if counts is None else [counts[keep].long()]
        sequence_ids, *counting = moved_together(numbers, device)
        mask = counting[0].bool() if counting else torch.ones_like(wanted, dtype=torch.bool)
        # Without a reference nothing reads its log-probabilities.
        reference = goals.old_logprobs if samples.ref_logprobs is None else samples.ref_logprobs
        tables = [goals.old_logprobs, samples.rollout_logprobs, reference, goals.advantages]
        tables += [] if goals.weights is None else [goals.weights]
        shares = [] if share is None else [share.float().unsqueeze(1).expand(keep.shape)[keep]]
        columns = moved_together([*(table[rows][keep] for table in tables), *shares], device)
        old_logprobs, rollout_logprobs, ref_logprobs, advantages, *factors = columns
        aggregated = None if share is None else factors[-1]
        sampling = None if goals.weights is None else factors[0]
        if goals.current:
            old_logprobs = logprobs.detach()
            if config.importance_sampling.mode == "Truncated":
                sampling = truncated_weights(logprobs, rollout_logprobs, mask, config.importance_sampling.cap)
        weights = aggregated if sampling is None else sampling if aggregated is None else aggregated * sampling
        inputs = LossInputs(
            tokens=wanted,
            sequence_ids=sequence_ids,
            mask=mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages,
            entropy=spread.detach(),
            config=config,
            kl_coef=goals.kl_coef,
            samples=len(rows),
        )
        total, stats = policy_loss(inputs, context.loss, normaliser=normaliser, weights=weights)
        bonus, more = entropy_bonus(
            spread, inputs.mask, normaliser=normaliser, coef=config.entropy_coef, weights=aggregated
        )
        stats |= more
        if config.kl_in_loss and samples.ref_logprobs is not None:
            penalty, more = kl_loss(
                logprobs,
                inputs.ref_logprobs,
                inputs.mask,
                normaliser=normaliser,
                coef=goals.kl_coef,
                estimator=config.kl_estimator,
                weights=weights,
            )
            total, stats = total + penalty, stats | more
        known = goals.weights is not None or "mismatch_abs" in goals.metrics
        if mini.first and goals.staleness == 0 and not known:
            # Before the first update the current weights are those with which the rollouts sampled.
            gap = mismatch_metrics(logprobs, inputs.rollout_logprobs, inputs.mask, config.importance_sampling.cap)
            stats |= {name: value for name, value in gap.items() if name != "mismatch_abs_max"}
        if config.entropy_coef > 0:
            total = total + bonus
        if right is not None:
            learnt, more = right_loss(
                logprobs,
                moved_together([right[keep]], device)[0],
                normaliser=max(1, mini.right_tokens),
                coef=config.right_coef,
            )
            total, stats = total + learnt, stats | more
        if isinstance(output, Outputs):
            values_total, more = _value_part(context, goals, mini, rows, keep)(output.values)
            total, stats = total + values_total, stats | more
        return total, stats

    entropy: Entropy = "gradient" if config.entropy_coef > 0 else "value"
    return MicroBatch(packed, loss, lambda tokens: Predictions(tokens, temperature, entropy))


def _critic_micro_batch(
    context: Context, samples: PPOSamples, goals: Targets, mini: MiniBatch, rows: list[int]
) -> MicroBatch:
    packed, keep = _responses(samples, rows)
    packed = replace(packed, routing=None)  # the batch has the experts of the actor, not of the critic
    return MicroBatch(packed, _value_part(context, goals, mini, rows, keep))


def _value_part(
    context: Context, goals: Targets, mini: MiniBatch, rows: list[int], keep: Tensor
) -> Callable[[Tensor], tuple[Tensor, Stats]]:
    """The clipped value loss times `valueCoef`, at the states in which the response tokens of `rows` were chosen."""
    returns = goals.returns
    assert returns is not None
    old_values = returns if goals.old_values is None else goals.old_values

    def loss(values: Tensor) -> tuple[Tensor, Stats]:
        old, new = moved_together([old_values[rows][keep], returns[rows][keep]], values.device)
        total, stats = value_loss(
            values,
            old,
            new,
            torch.ones_like(values, dtype=torch.bool),
            normaliser=max(1, mini.response_tokens),
            clip=context.spec.ppo.value_clip,
        )
        return value_coef(context.spec) * total, stats

    return loss


def _said(output: Predicted | Outputs) -> Predicted:
    said = output.logits if isinstance(output, Outputs) else output
    assert isinstance(said, Predicted)
    return said


def _run_ptx(context: Context, ptx: Ptx, mini: MiniBatch, actions: list[Action]) -> dict[str, float]:
    """Add the gradient of the language-model loss on the mini-batch's demonstrations to the actor's gradient.

    This is a second pass over the actor's own schedule, before the optimizer step. The sum of both gradients is the
    gradient of the mixed loss. If there are too few rows for the schedule's micro-batches, rows without weight fill
    them up."""
    model = context.engine.models.get("actor")
    if model is None:
        return context.engine.run([], {})["actor"]
    schedule = [action for action in actions if action.model == "actor"]
    count = len(mini.work["actor"])
    micro = -(-len(mini.ptx_rows) // (model.dp_size * count))
    normaliser = max(1, int(ptx.mask[mini.ptx_rows].sum()))
    work = []
    for padded in split_padded(len(mini.ptx_rows), model.dp_size, micro, at_least=count)[model.dp_rank]:
        rows = [mini.ptx_rows[i] for i in padded.rows]
        packed = ptx.sequences.pack(rows, ptx.mask[rows] & padded.weights.bool().unsqueeze(1))

        def loss(output: Predicted | Outputs) -> tuple[Tensor, Stats]:
            logprobs = _said(output).logprobs
            coef = context.spec.ppo.ptx_coef
            return ptx_loss(logprobs, torch.ones_like(logprobs, dtype=torch.bool), normaliser=normaliser, coef=coef)

        work.append(MicroBatch(packed, loss, Predictions))
    return context.engine.run(schedule, {"actor": work})["actor"]


def before_step(context: Context, samples: PPOSamples, tokens: int | None) -> tuple[Tensor, Tensor | None]:
    """Outputs of the actor at its current weights for the response tokens, each (N, R), from one forward pass.

    The first are log-probabilities (nats). The second are the values of its value head before each token, or None
    without one. If micro-batches are cut by tokens, each has at most `tokens`. This is a collective call."""
    width = samples.mask.shape[1]

    def asks(tokens: Tensor) -> Predictions:
        return Predictions(tokens, context.spec.generation.temperature)

    def of(output: Predicted | Outputs, packed: Packed, rows: list[int]) -> Tensor:
        said = _said(output)
        found = unpacked(said.logprobs, samples.mask[rows])
        if isinstance(output, Outputs):
            found = torch.cat([found, unpacked(output.values, samples.mask[rows])], dim=1)
        return found

    micro, time = context.spec.ppo.micro_batch_size, samples.sequences.tokens.shape[1]
    wanted = response_positions(samples.prompt_lengths, samples.mask, time)
    valued = context.require("actor").head != "lm"
    columns = width * (1 + valued)
    table = context.per_sequence("actor", samples.sequences, wanted, micro, columns, of, asks, tokens)
    return table[:, :width], table[:, width:] if valued else None
