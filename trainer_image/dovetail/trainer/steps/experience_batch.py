"""A PPO batch as tensors, and what its losses need.

Rank 0 has all samples. It computes the metrics, and what whitening and group baselines need of all samples
(`Statistics`). Another rank has the rows that it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Dtype, RLHFJobSpec, Role
from dovetail.protocol.experience import Experience
from dovetail.protocol.wire import BRANCH, LEARNT, Arrays
from dovetail.trainer.algorithms.advantages import (
    Statistics,
    compute_advantages,
    equal_groups,
    equal_steps,
    final_scores,
)
from dovetail.trainer.algorithms.importance import mismatch_metrics, staleness_metrics, truncated_weights
from dovetail.trainer.algorithms.kl import kl_estimate
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.functions import UserAdvantages
from dovetail.trainer.packed_batches import Sequences, read
from dovetail.trainer.steps.step_context import Metrics, variance


@dataclass(frozen=True)
class PPOSamples:
    """One iteration's samples. In (N, R) float32 tensors, entry r is for response token r. `mask` is (N, R) bool.

    `mask` has the response tokens that are learnt: those that the model sampled, and not those that it was told in the
    midst of its response.

    `step_ends` (N, R) bool marks the tokens that end a step. `step_rewards` has the step's reward at this token. Both
    are None if there are no steps. `unknown_experts` (N,) counts the tokens of a sample whose experts are not known.
    Log-probabilities are in nats.

    A rank may have the tokens, and entries of (N, R) tensors, of its own rows only. The others are 0 then."""

    sequences: Sequences
    prompt_lengths: Tensor
    response_lengths: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    scores: Tensor
    groups: Tensor
    finished: Tensor
    advantages: Tensor | None
    returns: Tensor | None
    step_rewards: Tensor | None = None
    step_ends: Tensor | None = None
    unknown_experts: Tensor | None = None

    @staticmethod
    def read(arrays: Arrays, config: PPO, own_values: bool = False) -> PPOSamples:
        """The samples in a batch's arrays. With `own_values` the trainer computes the values, so the batch needs none.
        Raises BadCommand that names the array, if it is missing, has a wrong shape or is not finite inside the mask."""
        tokens = read(arrays, "tokens", torch.int64, (None, None))
        n = tokens.shape[0]
        prompts = read(arrays, "prompt_lengths", torch.int64, (n,))
        responses = read(arrays, "response_lengths", torch.int64, (n,))
        if n and int(prompts.min()) < 1:
            raise BadCommand("every prompt needs at least one token: batch array 'prompt_lengths' holds a 0")
        sequences = Sequences.checked(tokens, prompts + responses, "prompt_lengths + response_lengths")
        if "routed_experts" in arrays:
            routing = read(arrays, "routed_experts", torch.int16, (*tokens.shape, None, None))
            sequences = replace(sequences, routing=routing)
        rollout = read(arrays, "rollout_logprobs", torch.float32, (n, None))
        width = rollout.shape[1]
        if int(responses.min()) < 0 or int(responses.max()) > width:
            raise BadCommand(f"batch array 'response_lengths' must lie in 0..{width}, the width of rollout_logprobs")
        mask = torch.arange(width) < responses.unsqueeze(1)
        if "learnt" in arrays:
            marks = read(arrays, "learnt", torch.uint8, (n, width))
            branches = mask & (marks == BRANCH)
            mask &= marks == LEARNT
            if bool(branches.any()):
                sequences = replace(sequences, branches=_at_sequences(branches, prompts, tokens.shape[1]))
        if not bool(mask.any()):
            raise BadCommand("no sample of the batch has a response token to learn")

        def per_token(name: str, needed: bool) -> Tensor | None:
            if name not in arrays and not needed:
                return None
            array = read(arrays, name, torch.float32, (n, width))
            if not bool(torch.isfinite(array[mask]).all()):
                raise BadCommand(f"batch array {name!r} holds a value that is not finite")
            return torch.where(mask, array, 0.0)

        custom = config.advantage_function is not None
        needs_values = config.advantage == "gae" and not custom and not own_values and "advantages" not in arrays
        scores = read(arrays, "scores", torch.float32, (n,))
        if not bool(torch.isfinite(scores).all()):
            raise BadCommand("batch array 'scores' holds a value that is not finite")
        samples = PPOSamples(
            sequences=sequences,
            prompt_lengths=prompts,
            response_lengths=responses,
            mask=mask,
            rollout_logprobs=_present(per_token("rollout_logprobs", True)),
            ref_logprobs=per_token("ref_logprobs", config.reads_reference),
            values=per_token("values", needs_values),
            scores=scores,
            groups=read(arrays, "groups", torch.int64, (n,)),
            finished=read(arrays, "finished", torch.bool, (n,)),
            advantages=per_token("advantages", False),
            returns=per_token("returns", False),
            step_rewards=per_token("step_rewards", "step_ends" in arrays),
            step_ends=read(arrays, "step_ends", torch.uint8, (n, width)).bool() & mask
            if "step_ends" in arrays
            else None,
            unknown_experts=read(arrays, "unknown_experts", torch.int64, (n,)) if "unknown_experts" in arrays else None,
        )
        if samples.returns is not None and samples.advantages is None:
            raise BadCommand("the batch has 'returns' without 'advantages'; give both")
        return samples

    def __len__(self) -> int:
        return len(self.sequences)

    def arrays(self, old_logprobs: Tensor) -> Arrays:
        """The batch's arrays, with the log-probabilities (N, R) of the policy at the iteration's start."""
        whole = torch.equal(self.mask.sum(dim=1), self.response_lengths)
        tables = {
            "tokens": self.sequences.tokens.int(),
            "prompt_lengths": self.prompt_lengths.int(),
            "response_lengths": self.response_lengths.int(),
            "rollout_logprobs": self.rollout_logprobs,
            "ref_logprobs": self.ref_logprobs,
            "values": self.values,
            "scores": self.scores,
            "groups": self.groups.int(),
            "finished": self.finished,
            "old_logprobs": old_logprobs,
            "routed_experts": self.sequences.routing,
            "step_rewards": self.step_rewards,
            "step_ends": self.step_ends,
            "learnt": None if whole else self.mask.to(torch.uint8),
        }
        return {name: table.numpy() for name, table in tables.items() if table is not None}


def _at_sequences(marks: Tensor, prompt_lengths: Tensor, time: int) -> Tensor:
    """(N, time) bool: `marks` (N, R) of response tokens, at their places in the sequences."""
    places = torch.arange(time) - prompt_lengths.unsqueeze(1)
    return (places >= 0) & (places < marks.shape[1]) & marks.gather(1, places.clamp(0, marks.shape[1] - 1))


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def response_positions(prompt_lengths: Tensor, mask: Tensor, time: int) -> Tensor:
    """(B, time) bool: the positions that predict the response tokens of `mask` (B, R). Each is the one before its
    token."""
    return _at_sequences(mask, prompt_lengths - 1, time)


def counted_samples(samples: PPOSamples, config: PPO) -> Tensor | None:
    """(N,) bool: the samples that train the policy, or None if all do (`maskTruncated`, `dropEqualGroups`)."""
    if not (config.mask_truncated or config.drop_equal_groups):
        return None
    counted = torch.ones(len(samples), dtype=torch.bool)
    if config.mask_truncated:
        counted &= samples.finished
    if config.drop_equal_groups:
        scores = final_scores(config, samples.scores, samples.finished, samples.response_lengths)
        equal = equal_groups(scores, samples.groups)
        if samples.step_rewards is not None and samples.step_ends is not None:
            equal &= equal_steps(samples.step_rewards, samples.step_ends, samples.groups)
        counted &= ~equal
    return counted


def right_samples(samples: PPOSamples, config: PPO) -> Tensor | None:
    """(N,) bool: the samples whose score says that they are right (`rightScore`). It is None if `rightCoef` is 0."""
    return samples.scores >= config.right_score if config.right_coef > 0 else None


def recomputes_old_logprobs(spec: RLHFJobSpec, device_type: str) -> bool:
    """Whether the denominator of the policy ratio comes from a forward pass of the trainer (`ppo.oldLogProbs`).

    `Auto` uses the rollout's log-probabilities if both sides compute the same numbers. This needs float32 on both
    sides, and no top-k or top-p. Otherwise rounding and the truncated distribution would change the ratio. With a lag
    the rollout's weights are older, so its log-probabilities are never the denominator."""
    if spec.ppo.lag > 0:
        return True
    if spec.ppo.old_log_probs != "Auto":
        return spec.ppo.old_log_probs == "Recompute"
    trainer = spec.models.actor.dtype
    exact = trainer is Dtype.FLOAT32 or (trainer is Dtype.AUTO and device_type == "cpu")
    for group in spec.groups:
        if Role.ROLLOUT in group.roles:
            on_cpu = group.gpu.product is None
            exact = exact and (group.dtype is Dtype.FLOAT32 or (group.dtype is Dtype.AUTO and on_cpu))
    generation = spec.generation
    return not (exact and generation.top_k == 0 and generation.top_p == 1.0)


@dataclass(frozen=True)
class Targets:
    """The inputs of the losses besides the model's outputs. Tensors are (N, R) float32.

    `old_logprobs` and `advantages` are for the policy, `returns` and `old_values` for the critic, `weights` for
    truncated importance sampling. With `current` the old log-probabilities are those that the step itself computes, and
    so are the weights. `kl_coef` is the coefficient of a KL penalty in the loss. `metrics` are those of the
    batch. `staleness` says by how many iterations the weights that sampled are older than the trainer's."""

    old_logprobs: Tensor
    advantages: Tensor
    returns: Tensor | None
    old_values: Tensor | None
    weights: Tensor | None
    kl_coef: float
    metrics: Metrics
    staleness: int = 0
    current: bool = False


def targets(
    samples: PPOSamples,
    config: PPO,
    kl_coef: float,
    recomputed: Tensor | None,
    function: UserAdvantages | None = None,
    iteration: int = 1,
    statistics: Statistics | None = None,
) -> Targets:
    """Advantages and the other inputs of the losses, over the global batch. Rows that the samples do not have are of no
    use, and neither are then the metrics; `statistics` has what was found over all.

    `recomputed` (N, R) are the log-probabilities at the trainer's current weights. With None the rollout's are used.
    `function` is the function of `advantageFunction`. `iteration` is 1 for the first. Advantages in the batch take
    precedence. Raises BadCommand if a setting and the batch do not fit, and if the function fails."""
    mask = samples.mask
    staleness = config.staleness(iteration)
    old = samples.rollout_logprobs if recomputed is None else recomputed
    weights = None
    metrics: Metrics = {}
    if recomputed is not None:
        cap = config.importance_sampling.cap
        if config.importance_sampling.mode == "Truncated":
            weights = truncated_weights(recomputed, samples.rollout_logprobs, mask, cap)
        if config.lag > 0:
            metrics["staleness"] = float(staleness)
            metrics |= staleness_metrics(recomputed, samples.rollout_logprobs, mask, weights, cap)
        if staleness == 0:  # otherwise the gap also contains what was learnt meanwhile, and is no error
            metrics |= mismatch(recomputed, samples.rollout_logprobs, mask, cap)
    advantages, returns, rewards = _advantages(samples, config, kl_coef, function, old, iteration, statistics)
    clip = None if config.reward_clip == "Auto" or samples.advantages is not None else config.reward_clip
    metrics |= {
        "reward": float(samples.scores.double().mean()),
        "reward_clipped": 0.0 if clip is None else float((samples.scores.abs() > clip).double().mean()),
        "reward_std": float(samples.scores.double().std()) if len(samples) > 1 else 0.0,
        "kl_coef": kl_coef,
        "response_length": float(samples.response_lengths.double().mean()),
        "finished_fraction": float(samples.finished.double().mean()),
        "advantage_std": variance(advantages[mask]) ** 0.5,
        "samples": float(len(samples)),
        "tokens": float(mask.sum()),
    }
    if samples.ref_logprobs is not None:
        kl = kl_estimate(old, samples.ref_logprobs, mask, "k1").sum(dim=1).double()
        metrics["kl"] = float(kl.mean())
        metrics["kl_ci95"] = 1.96 * float(kl.std()) / len(samples) ** 0.5 if len(samples) > 1 else 0.0
    if rewards is not None and not config.kl_in_loss:
        metrics["reward_with_kl"] = float(rewards.double().sum(dim=1).mean())
    if samples.step_rewards is not None and samples.step_ends is not None:
        ends = int(samples.step_ends.sum())
        metrics["steps"] = ends / len(samples)
        metrics["step_reward"] = float(samples.step_rewards.double().sum()) / max(1, ends)
    if returns is not None and samples.values is not None:
        spread = variance(returns[mask])
        left = variance((returns - samples.values)[mask])
        metrics["explained_variance"] = 1.0 - left / spread if spread > 0 else 0.0
    return Targets(old, advantages, returns, samples.values, weights, kl_coef, metrics, staleness)


def _advantages(
    samples: PPOSamples,
    config: PPO,
    kl_coef: float,
    function: UserAdvantages | None,
    old: Tensor,
    iteration: int,
    statistics: Statistics | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Advantages, returns and the rewards from which they were computed, each (N, R). Raises BadCommand."""
    if samples.advantages is not None:
        returns = samples.returns
        if returns is None and samples.values is not None:
            returns = torch.where(samples.mask, samples.advantages + samples.values, 0.0)
        return samples.advantages, returns, None
    try:
        if function is not None:
            seen = Experience(iteration, [], [], samples.arrays(old), config=config, kl_coef=kl_coef)
            made = [None if table is None else torch.from_numpy(table) for table in function(seen)]
            return _present(made[0]), made[1], torch.from_numpy(seen.rewards)
        found = compute_advantages(
            config,
            scores=samples.scores,
            logprobs=old,
            # Without a reference the coefficient is 0.
            ref_logprobs=old if samples.ref_logprobs is None else samples.ref_logprobs,
            mask=samples.mask,
            groups=samples.groups,
            finished=samples.finished,
            kl_coef=kl_coef,
            values=samples.values,
            steps=None
            if samples.step_rewards is None or samples.step_ends is None
            else (samples.step_rewards, samples.step_ends),
            statistics=statistics,
        )
    except ValueError as error:
        raise BadCommand(str(error)) from error
    return found.advantages, found.returns, found.rewards


def mismatch(logprobs: Tensor, rollout: Tensor, mask: Tensor, cap: float) -> Metrics:
    """The gap between trainer and rollout, as token means and the maximum. Differences are in nats."""
    sums = {name: float(value) for name, value in mismatch_metrics(logprobs, rollout, mask, cap).items()}
    tokens = max(1.0, sums.pop("mismatch_tokens"))
    largest = sums.pop("mismatch_abs_max")
    return {name: value / tokens for name, value in sums.items()} | {"mismatch_abs_max": largest}
