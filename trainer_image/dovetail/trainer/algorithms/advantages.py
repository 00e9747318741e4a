"""Computes rewards per token, and advantages (GAE, GRPO, RLOO, REINFORCE++). `dovetail.trainer.functions` loads a
user's own function.

The time dimension counts response tokens only. Tokens outside the mask are skipped, as if the row did not contain them.
So holes and right padding follow one rule. Results are 0 outside the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.manifest.training_types import PPO, Overlong
from dovetail.protocol.experience import WHITEN_EPS
from dovetail.trainer.algorithms.kl import kl_estimate
from dovetail.trainer.algorithms.masks import inside, kept, wide

BLOCK = 64
CPU_BLOCK_ELEMENTS = 2**17
GPU_BLOCK_ELEMENTS = 2**26
GRPO_EPS = 1e-6


# ---------------------------------------------------------------- GAE


def _row_blocks(x: Tensor) -> list[slice]:
    """The slices of rows to work on at a time. On a CPU their intermediate results fit into the cache."""
    limit = CPU_BLOCK_ELEMENTS if x.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, limit // max(1, x.shape[1]))
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


def _toeplitz(size: int, w: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The (size, size) matrix whose entry [l, t] is w^(l-t) for l >= t, and 0 otherwise. Subnormal powers are slow and
    become 0."""
    steps = torch.arange(size, device=device)
    lag = steps.unsqueeze(1) - steps.unsqueeze(0)
    powers = torch.pow(torch.tensor(w, dtype=torch.float64, device=device), lag.clamp(min=0))
    powers = torch.where((lag >= 0) & (powers >= torch.finfo(dtype).tiny), powers, 0.0)
    return powers.to(dtype)


def discounted_sums(x: Tensor, w: float) -> Tensor:
    """y[:, t] = sum over l >= t of w^(l-t) x[:, l], for 0 <= w <= 1; x, y (batch, time).

    This is the product x W with the triangular Toeplitz matrix W, computed by blocks of time. One matrix product does
    all blocks of all rows. The rest, beyond each block, is the same sum over the blocks' first entries with w^BLOCK.
    Exponents are never negative, so nothing overflows. Powers that underflow are 0, which is right."""
    batch, time = x.shape
    size = min(BLOCK, time)
    if time <= BLOCK:
        return x @ _toeplitz(time, w, x.dtype, x.device) if time else x
    blocks = -(-time // size)
    padded = torch.nn.functional.pad(x, (0, blocks * size - time))
    local = (padded.reshape(batch * blocks, size) @ _toeplitz(size, w, x.dtype, x.device)).view(batch, blocks, size)
    heads = discounted_sums(local[:, :, 0].contiguous(), w**size)
    powers = _toeplitz(size + 1, w, x.dtype, x.device)[1:, 0].flip(0)  # w^size ... w^1
    local[:, :-1] += heads[:, 1:, None] * powers
    return local.view(batch, blocks * size)[:, :time]


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Compute on a CPU with one thread. The products are many and small. If several threads had to wait for a CPU, they
    would take a hundred times as long."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) as one matrix product.

    A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t. V is 0 after a row's last token, even if
    the response is truncated. This equals the recursion A_t = delta_t + gamma lam A_{t+1}.

    rewards, values, mask (batch, time); values[:, t] is the value of the state in which token t was chosen. Returns
    (advantages, returns = advantages + values), both (batch, time), in float32 or wider, 0 outside the mask and without
    gradient. Raises ValueError if the mask holds other numbers than 0 and 1."""
    with torch.no_grad(), _one_thread(rewards.device):
        keep = kept(mask)
        dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
        advantages = torch.empty(rewards.shape, dtype=dtype, device=rewards.device)
        returns = torch.empty_like(advantages)
        for rows in _row_blocks(rewards):
            _gae_block(rewards[rows], values[rows], keep[rows], gamma, lam, advantages[rows], returns[rows])
        return advantages, returns


def _gae_block(
    rewards: Tensor, values: Tensor, keep: Tensor, gamma: float, lam: float, advantages: Tensor, returns: Tensor
) -> None:
    """Write the `gae` of some rows into `advantages` and `returns`."""
    has_holes = bool((keep[:, 1:] > keep[:, :-1]).any())
    front = keep
    if has_holes:
        # Tokens move to the front of their row, where they are neighbours.
        front = torch.arange(keep.shape[1], device=keep.device) < keep.sum(dim=1, keepdim=True)
        r = torch.zeros_like(advantages).masked_scatter_(front, rewards[keep].to(advantages.dtype))
        v = torch.zeros_like(advantages).masked_scatter_(front, values[keep].to(advantages.dtype))
    else:
        r, v = (torch.where(keep, x, 0.0).to(advantages.dtype) for x in (rewards, values))
    delta = r.sub_(v)
    delta[:, :-1].add_(v[:, 1:], alpha=gamma)
    a = torch.where(front, discounted_sums(delta, gamma * lam), 0.0)
    v.add_(a)
    if has_holes:
        advantages.zero_().masked_scatter_(keep, a[front])
        returns.zero_().masked_scatter_(keep, v[front])
    else:
        advantages.copy_(a)
        returns.copy_(v)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """VAPO's lambda of each response (Yue et al. 2025, section 4.2), (batch,) float64. It is 1 - 1 / (alpha * length).

    The sum of lambda^t is then alpha * length. For lengths of up to 1 / alpha the formula is not positive, and the
    result is 0. lengths (batch,): response tokens."""
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(min=0.0)


def gae_by_row(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lams: Tensor) -> Tensor:
    """The advantages of `gae`, (batch, time), with a lambda for each row; lams (batch,)."""
    found = torch.zeros(rewards.shape, dtype=torch.promote_types(rewards.dtype, torch.float32), device=rewards.device)
    for lam in lams.unique().tolist():
        rows = lams == lam
        found[rows] = gae(rewards[rows], values[rows], mask[rows], gamma, lam)[0].to(found.dtype)
    return found


# ---------------------------------------------------------------- group baselines


def _numbered(groups: Tensor) -> tuple[Tensor, int]:
    """The number of each sample's group, (batch,), from 0 without gaps, and the number of groups."""
    _, index = torch.unique(groups, return_inverse=True)
    return index, int(index.max()) + 1 if index.numel() else 0


def _group_sums(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of x over each sample's group, and the group's size; both (batch,)."""
    index, count = _numbered(groups)
    sums = torch.zeros(count, dtype=x.dtype, device=x.device).index_add_(0, index, x)
    sizes = torch.zeros_like(sums).index_add_(0, index, torch.ones_like(x))
    return sums[index], sizes[index]


def _spread(per_sample: Tensor, like: Tensor, mask: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.where(kept(mask), per_sample.to(dtype).unsqueeze(1), 0.0)


def grpo(
    scores: Tensor, groups: Tensor, mask: Tensor, normalize_std: bool = True, penalty: Tensor | None = None
) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, section 4.1.2), (batch, time). Every token of a sample gets (score -
    group mean) / (group std + 1e-6).

    std is unbiased. Without `normalize_std` the score is not divided by it (Dr. GRPO, Liu et al. 2025). A `penalty`
    (batch,) is subtracted afterwards, less the mean penalty of the group's other samples. If it were divided by the
    standard deviation of a group with similar scores, it would outweigh the scores whatever its coefficient.

    scores (batch,) float; groups (batch,) integer, equal for samples of one prompt; mask (batch, time). A sample alone
    in its group gets 0, because there is nothing to compare it with. The computation is in float64. So equal scores
    give 0, and not a rounding error divided by 1e-6."""
    with torch.no_grad():
        s = scores.double()
        sums, sizes = _group_sums(s, groups)
        advantage = s - sums / sizes
        if normalize_std:
            squares, _ = _group_sums(advantage.square(), groups)
            advantage = advantage / ((squares / (sizes - 1).clamp(min=1)).sqrt() + GRPO_EPS)
        if penalty is not None:
            p = penalty.double()
            sums, _ = _group_sums(p, groups)
            advantage = advantage - (p - (sums - p) / (sizes - 1).clamp(min=1))
        return _spread(torch.where(sizes > 1, advantage, 0.0), scores, mask)


def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Advantages with the leave-one-out baseline (Ahmadian et al. 2024, eq. 7). Every token of a sample gets the score
    minus the mean score of the group's other samples.

    Shapes are as in `grpo`. A sample alone in its group gets 0."""
    with torch.no_grad():
        s = scores.double()
        sums, sizes = _group_sums(s, groups)
        others = (sums - s) / (sizes - 1).clamp(min=1)
        return _spread(torch.where(sizes > 1, s - others, 0.0), scores, mask)


# ---------------------------------------------------------------- rewards and whitening


class Statistics:
    """Figures over all samples, such as a mean. Who has all samples computes them, and `found` has them in the order of
    use, as lists of numbers. Who has `given` ones, from a process with all samples, takes these instead."""

    def __init__(self, given: Sequence[list[float]] | None = None) -> None:
        self._given = None if given is None else list(given)
        self.found: list[list[float]] = []

    def of(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, a vector of floats, or what was given in its place, with the same bits."""
        computed = compute()
        if self._given is not None:
            return torch.tensor(self._given.pop(0), dtype=computed.dtype, device=computed.device)
        self.found.append(computed.tolist())
        return computed


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, statistics: Statistics | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of `mask` in the whole batch, 0 outside; x, mask (batch, time).

    The variance is unbiased. For a single token it is 0. With `shift_mean` False the mean is kept, because rewards must
    keep their sign. The mean and the variance are of the whole batch and not of a micro-batch: `statistics` gives them
    where some rows of x are missing."""
    with torch.no_grad():
        keep = kept(mask)
        x = wide(x)
        blocks = _row_blocks(x)
        count = keep.sum()

        def total(part: Callable[[slice], Tensor]) -> Tensor:
            """Sum of the parts over the mask, in float64."""
            zero = torch.zeros((), dtype=torch.float64, device=x.device)
            return sum((torch.where(keep[b], part(b), 0.0).sum(dtype=torch.float64) for b in blocks), zero)

        def mean_and_scale() -> Tensor:
            mean = total(lambda b: x[b]) / count.clamp(min=1)
            # A 0-dimensional mean would first be rounded to x's precision.
            variance = total(lambda b: (x[b].double() - mean).square()) / (count - 1).clamp(min=1)
            return torch.stack([mean, torch.rsqrt(variance + WHITEN_EPS)])

        mean, scale = (statistics or Statistics()).of(mean_and_scale).unbind()
        kept_mean = torch.zeros_like(mean) if shift_mean else mean
        result = torch.empty_like(x)
        for b in blocks:
            result[b] = torch.where(keep[b], (x[b].double() - mean) * scale + kept_mean, 0.0)
        return result


def sample_scores(
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    reward_clip: float | None = None,
    missing_eos_penalty: float | None = None,
    overlong: Tensor | None = None,
) -> Tensor:
    """Scores clipped to +-`reward_clip`, less `missing_eos_penalty` for samples that are not `finished`, and less
    `overlong`.

    All tensors are (batch,). Clipping comes first, so that it does not remove the penalties. Raises ValueError for a
    penalty without `finished`."""
    result = scores
    if reward_clip is not None:
        result = result.clamp(-reward_clip, reward_clip)
    if missing_eos_penalty:
        if finished is None:
            raise ValueError("missingEosPenalty needs `finished`: which samples ended by themselves")
        result = result - missing_eos_penalty * (~finished.bool()).to(result.dtype)
    return result if overlong is None else result - overlong.to(result.dtype)


def overlong_penalty(lengths: Tensor, config: Overlong) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), (batch,) float32. It is to be subtracted from the
    score.

    It is 0 up to `fromTokens` response tokens and rises linearly to `penalty` at `toTokens`. lengths (batch,): response
    tokens. Raises ValueError if `toTokens` has not been resolved."""
    if config.to_tokens is None:
        raise ValueError("ppo.overlong.toTokens is missing; it is generation.maxTokens in a resolved manifest")
    beyond = (lengths.float() - config.from_tokens) / (config.to_tokens - config.from_tokens)
    return config.penalty * beyond.clamp(0.0, 1.0)


def final_scores(config: PPO, scores: Tensor, finished: Tensor, lengths: Tensor) -> Tensor:
    """`sample_scores` with the settings of `spec.ppo`, (batch,). `rewardClip: Auto` clips nothing here.

    scores, finished (batch,); lengths (batch,): response tokens."""
    return sample_scores(
        scores,
        finished,
        reward_clip=None if config.reward_clip == "Auto" else config.reward_clip,
        missing_eos_penalty=config.missing_eos_penalty,
        overlong=None if config.overlong is None else overlong_penalty(lengths, config.overlong),
    )


def reinforce(rewards: Tensor, mask: Tensor, gamma: float, statistics: Statistics | None = None) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
    Normalization"). An advantage is the discounted sum of the rewards of the token and all later ones, whitened over
    the batch.

    rewards, mask (batch, time). Tokens outside the mask are skipped, as in `gae`."""
    with torch.no_grad():
        returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
        return whiten(returns, mask, statistics=statistics)


def reinforce_baseline(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++-baseline (same paper). Every token of a sample gets the score less the group's mean, whitened over
    the batch's tokens. Shapes are as in `grpo`. The standard deviation is the batch's, not the group's."""
    with torch.no_grad():
        return whiten(grpo(scores, groups, mask, normalize_std=False), mask)


def process_advantages(
    rewards: Tensor, ends: Tensor, groups: Tensor, mask: Tensor, normalize_std: bool = True
) -> Tensor:
    """Advantages from rewards of steps (Shao et al. 2024, section 4.1.3), (batch, time).

    The mean over all steps of the group is subtracted from each step's reward. With `normalize_std` the result is
    divided by the standard deviation over these steps. A token gets the sum over the steps that end at it or later.

    rewards (batch, time); ends (batch, time) bool: the tokens that end a step. A group with a single step gets 0."""
    with torch.no_grad():
        index, count = _numbered(groups)
        marked = ends.bool() & kept(mask)
        of_step = index.unsqueeze(1).expand_as(marked)[marked]
        r = rewards.double()[marked]
        sizes = torch.zeros(count, dtype=r.dtype, device=r.device).index_add_(0, of_step, torch.ones_like(r))
        sums = torch.zeros_like(sizes).index_add_(0, of_step, r)
        centred = r - (sums / sizes.clamp(min=1))[of_step]
        if normalize_std:
            squares = torch.zeros_like(sizes).index_add_(0, of_step, centred.square())
            centred = centred / ((squares / (sizes - 1).clamp(min=1)).sqrt()[of_step] + GRPO_EPS)
        table = torch.zeros(marked.shape, dtype=r.dtype, device=r.device).masked_scatter_(marked, centred)
        following = table.flip(1).cumsum(1).flip(1)
        return torch.where(kept(mask), following, 0.0).to(torch.promote_types(rewards.dtype, torch.float32))


def equal_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """(batch,) bool: the samples in whose group all scores are equal; scores, groups (batch,)."""
    index, count = _numbered(groups)
    low, high = (
        torch.zeros(count, dtype=scores.dtype).scatter_reduce(0, index, scores, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (low == high)[index]


def equal_steps(rewards: Tensor, ends: Tensor, groups: Tensor) -> Tensor:
    """(batch,) bool: the samples in whose group all steps have the same reward, or no steps exist.

    rewards (batch, time); ends (batch, time) bool: the tokens that end a step."""
    index, count = _numbered(groups)
    of_step = index.unsqueeze(1).expand_as(ends)[ends]
    low, high = (
        torch.full((count,), start, dtype=rewards.dtype).scatter_reduce(0, of_step, rewards[ends], how)
        for start, how in ((float("inf"), "amin"), (float("-inf"), "amax"))
    )
    return (low >= high)[index]


def token_rewards(
    scores: Tensor,
    kl: Tensor,
    mask: Tensor,
    kl_coef: float,
    *,
    reward_clip: float | None = None,
    finished: Tensor | None = None,
    missing_eos_penalty: float | None = None,
) -> Tensor:
    """The reward of each token, (batch, time). It is -kl_coef * kl, plus the sample's score at its last token (Ouyang
    et al. 2022, eq. 2).

    scores, finished (batch,); kl, mask (batch, time). kl is the estimator k1 of `kl.kl_estimate`, in nats. The clip and
    the penalty are those of `sample_scores`. The KL term is not clipped. A row without tokens stays 0."""
    with torch.no_grad():
        keep = kept(mask)
        final = sample_scores(scores, finished, reward_clip=reward_clip, missing_eos_penalty=missing_eos_penalty)
        rewards = inside(-kl_coef * wide(kl), keep)
        if not keep.shape[1]:
            return rewards
        positions = torch.arange(keep.shape[1], device=keep.device)
        last = torch.where(keep, positions, -1).amax(dim=1)
        at_last = positions.unsqueeze(0) == last.unsqueeze(1)
        return rewards + torch.where(at_last, final.to(rewards.dtype).unsqueeze(1), 0.0)


# ---------------------------------------------------------------- dispatch


@dataclass(frozen=True)
class Advantages:
    """The result of `compute_advantages`. All tensors are (batch, time), are 0 outside the mask, and have no gradient.

    `returns` is None if there is no critic to learn them. `rewards` (per token) and `kl` (nats) are for metrics."""

    advantages: Tensor
    returns: Tensor | None
    rewards: Tensor
    kl: Tensor


def compute_advantages(
    config: PPO,
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    groups: Tensor,
    finished: Tensor,
    kl_coef: float,
    values: Tensor | None = None,
    steps: tuple[Tensor, Tensor] | None = None,
    statistics: Statistics | None = None,
) -> Advantages:
    """Advantages of a whole iteration's batch, as `spec.ppo` says. `rewardClip: Auto` clips nothing here, because
    `dovetail.manifest.resolve` resolves it.

    scores, groups, finished (batch,); logprobs (of the old policy), ref_logprobs, mask, values (batch, time). `steps`
    holds the rewards of steps (batch, time), and the tokens at which they end (batch, time) bool. With gae and
    reinforce++ they are token rewards. With group baselines the result of `process_advantages` is added.

    A row of logprobs, ref_logprobs or values may be 0 where its advantages are not wanted, if `statistics` has figures
    of a call with all rows.

    First come the token rewards: the clipped score, the penalties for a missing end and for length, and -kl_coef * k1
    if the KL penalty is in the reward. `whitenRewards` scales them and keeps their mean. Then `advantage` decides:
    - gae needs values. `whitenAdvantages` whitens the result. The critic's returns use `lamValue`. With `lamAlpha` the
      policy uses each response's own lambda (VAPO, Yue et al. 2025).
    - rloo uses each sample's sum of token rewards: the score, less the KL penalty if that is in the reward.
    - grpo uses the same sum. With `normalizeStd` the score, but not the KL penalty, is divided by the group's standard
      deviation, and `whitenRewards` has no effect. Advantages of rloo and grpo are never whitened: the group is their
      baseline.
    - reinforce++ uses the token rewards, reinforce++-baseline each sample's sum of them.
    - distillation ignores the rewards and uses -k1 of each token. Its gradient is that of the reverse KL to the teacher
      at that token (Agarwal et al. 2024, "On-Policy Distillation of Language Models").

    Raises ValueError if gae lacks values, or if another estimator than k1 is to go into the reward."""
    with torch.no_grad():
        keep, statistics = kept(mask), statistics or Statistics()
        if not config.kl_in_loss and config.kl_estimator != "k1":
            raise ValueError(f"kl.estimator {config.kl_estimator} in the reward lowers another quantity than the KL")
        kl = kl_estimate(logprobs, ref_logprobs, keep, "k1")
        final = final_scores(config, scores, finished, keep.sum(dim=1))
        rewards = token_rewards(final, kl, keep, 0.0 if config.kl_in_loss else kl_coef)
        by_deviation = config.advantage == "grpo" and config.normalize_std
        if steps is not None and not config.compares_samples:
            rewards = rewards + inside(steps[0], keep)
        if config.whiten_rewards and not by_deviation:
            rewards = whiten(rewards, keep, shift_mean=False, statistics=statistics)
        returns: Tensor | None = None
        if config.advantage == "gae":
            if values is None:
                raise ValueError("advantage gae needs the critic's values")
            advantages, returns = gae(rewards, values, keep, config.gamma, config.lam)
            if config.lam_value is not None:
                _, returns = gae(rewards, values, keep, config.gamma, config.lam_value)
            if config.lam_alpha is not None:
                lams = length_adaptive_lambda(keep.sum(dim=1), config.lam_alpha)
                advantages = gae_by_row(rewards, values, keep, config.gamma, lams)
            if config.whiten_advantages:
                advantages = whiten(advantages, keep, statistics=statistics)
        elif by_deviation:
            penalty = None if config.kl_in_loss else statistics.of(lambda: kl_coef * kl.sum(dim=1))
            advantages = grpo(final, groups, keep, penalty=penalty)
        elif config.advantage == "grpo":
            advantages = grpo(statistics.of(lambda: rewards.sum(dim=1)), groups, keep, normalize_std=False)
        elif config.advantage == "reinforce++":
            advantages = reinforce(rewards, keep, config.gamma, statistics)
        elif config.advantage == "reinforce++-baseline":
            advantages = reinforce_baseline(statistics.of(lambda: rewards.sum(dim=1)), groups, keep)
        elif config.advantage == "distillation":
            advantages = -kl
        else:
            advantages = rloo(statistics.of(lambda: rewards.sum(dim=1)), groups, keep)
        if steps is not None and config.compares_samples:
            advantages = advantages + process_advantages(*steps, groups, keep, normalize_std=by_deviation)
        return Advantages(advantages, returns, rewards, kl)
