"""Decides whether the trainers learn from an iteration's first samples while others are generated (`ppo.streaming`),
and in how many parts."""

from __future__ import annotations

import math

from dovetail.manifest.critic import shares_body
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.planner.lag import COLOCATED
from dovetail.planner.placement.placed import Placed
from dovetail.planner.placement.planned_job import PlannedJob, needed
from dovetail.protocol.prediction import Prediction

# With more parts, training begins earlier and less of it is left at the end. Each part costs a command, and an
# all-gather if the weights are sharded.
MOST_PARTS = 16


def streamed(job: PlannedJob, placed: Placed) -> tuple[int, str]:
    """The number of parts, and the reason if it is 0. It is empty if the manifest does not ask for streaming."""
    spec, layouts = job.spec, placed.layouts_in(Stage.PPO)
    if spec.ppo.streaming == "Never" or Stage.PPO not in spec.stages:
        return 0, ""
    problem = obstacle(spec)
    if problem is None and placed.dedicated:
        problem = "actor and critic have trainer ranks of their own"
    if problem is None and any(layouts[model].pp > 1 for model in ("actor", "critic") if model in layouts):
        problem = "the trainers have pipeline stages, which each part would fill and empty anew"
    problem = problem or _balancing(job)
    if problem is not None:
        return 0, problem
    ppo = spec.ppo
    shares = [ppo.micro_batch_size * layouts[model].dp for model in ("actor", "critic") if model in layouts]
    least = math.lcm(ppo.samples_per_prompt, *shares)
    whole = ppo.global_batch_size // least
    parts = max((n for n in range(1, MOST_PARTS + 1) if whole % n == 0), default=0) if whole else 0
    if parts < 2 or ppo.global_batch_size % least:
        return 0, (
            f"an iteration of {ppo.global_batch_size} samples cannot be cut into parts of whole prompts and whole "
            f"micro-batches, which have at least {least} samples"
        )
    return parts, ""


def obstacle(spec: RLHFJobSpec) -> str | None:
    """Why the result of a step depends on all samples of an iteration at once, as a sentence without a full stop. It
    names the field. None if nothing in the manifest makes it so."""
    ppo = spec.ppo
    reasons = (
        (ppo.lag != 0, "spec.ppo.lag is above 0, so the next iteration is drawn while the trainers learn"),
        (
            ppo.epochs > 1 or ppo.mini_batch_size != ppo.global_batch_size,
            "an iteration has several optimizer steps; set spec.ppo.epochs to 1 and spec.ppo.miniBatchSize to "
            "spec.ppo.globalBatchSize",
        ),
        (any(group.colocated for group in spec.groups), COLOCATED),
        (ppo.dynamic_sampling > 0, "spec.ppo.dynamicSampling replaces prompts when all samples are scored"),
        (ppo.advantage_function is not None, "spec.ppo.advantageFunction sees all samples of an iteration at once"),
        (
            ppo.advantage.startswith("reinforce"),
            f"spec.ppo.advantage {ppo.advantage} normalises over all samples of an iteration",
        ),
        (
            ppo.advantage == "gae" and ppo.whiten_advantages,
            "spec.ppo.whitenAdvantages takes mean and variance of all samples of an iteration",
        ),
        (
            ppo.whiten_rewards and not (ppo.advantage == "grpo" and ppo.normalize_std),
            "spec.ppo.whitenRewards takes the variance of all samples of an iteration",
        ),
        (
            ppo.micro_batch_tokens is not None,
            "spec.ppo.microBatchTokens cuts micro-batches by the lengths of all samples",
        ),
        (ppo.right_coef > 0, "spec.ppo.rightCoef takes the mean over all right responses of an iteration"),
        (ppo.ptx_coef > 0, "spec.ppo.ptxCoef mixes demonstrations into the step"),
        (shares_body(spec), "spec.models.critic.shareActorBody adds up losses with different normalisers"),
        (
            any(m.lora is not None and m.lora.dropout > 0 for m in (spec.models.actor, spec.models.critic)),
            "the dropout of adapters is drawn by the place in the whole step",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _balancing(job: PlannedJob) -> str | None:
    for name in ("actor", "critic"):
        if not needed(job.spec, name):
            continue
        config = job.config(name) or {}
        family = MODEL_FAMILIES.get(config.get("model_type", ""))
        if family is None or family.experts is None:
            continue
        asked = getattr(job.spec.models, name).router_aux_loss_coef
        if asked or (asked is None and config.get("output_router_logits")):
            return (
                f"the load-balancing loss of the {name}'s experts is not divided by the number of tokens; set "
                f"spec.models.{name}.routerAuxLossCoef to 0"
            )
    return None


def with_streaming(found: Prediction, hidden: float) -> Prediction:
    """The prediction of a job without a lag, after `hidden` seconds of its training were hidden behind generation.

    `found`: the prediction without streaming."""
    seconds = found.iteration_seconds - hidden
    phases = {**found.phases, "training": max(0.0, found.phases["training"] - hidden)}
    lags = [row.model_copy(update={"iteration_seconds": seconds}) if row.lag == 0 else row for row in found.lags]
    return found.lasting(seconds, streamed_seconds=hidden, phases=phases, lags=lags)
