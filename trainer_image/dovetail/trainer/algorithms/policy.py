"""The policy's loss. The built-in losses and a user's (`spec.ppo.loss`) have the same signature.

A loss gives one number for each token of a micro-batch. The trainer multiplies these by the importance-sampling
weights, adds them up as `lossAggregation` says, and adds the KL penalty and the entropy bonus. So the loss of a
mini-batch does not depend on how it is cut into micro-batches and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.manifest.callables import FunctionError, load_callable, time_limit
from dovetail.manifest.training_types import PPO
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.trainer.algorithms.kl import log_ratio
from dovetail.trainer.algorithms.masks import inside, kept
from dovetail.trainer.command_errors import is_out_of_memory

FIELD = "spec.ppo.loss"
Stats = dict[str, Tensor]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. It has the n response tokens of its samples, one sample after another, without padding.

    All tensors are (n,). `tokens` and `sequence_ids` are int64. A sequence id is the sample's number in the
    micro-batch. Ids ascend, and a sample without response tokens has none. `mask` is bool, and marks the tokens that
    count. These are all tokens unless `maskTruncated` or `dropEqualGroups` is set. The other tensors are float32.

    Log-probabilities are in nats. `logprobs` are those of the trained policy, and the only tensor with a gradient.
    `old_logprobs` are those of the policy at the iteration's start (the proximal policy). `rollout_logprobs` are those
    that vLLM reported. With `ppo.lag` its weights are older. `ref_logprobs` are those of the reference. `entropy` is in
    nats. `config` is the job's `spec.ppo`, `kl_coef` the current coefficient of the KL penalty, and `samples` the
    number of samples."""

    tokens: Tensor
    sequence_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    config: PPO
    kl_coef: float
    samples: int

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of x over each token's sample; x and result (n,), differentiable."""
        keep = kept(self.mask)
        sums = x.new_zeros(self.samples).index_add(0, self.sequence_ids, torch.where(keep, x, 0.0))
        sizes = x.new_zeros(self.samples).index_add(0, self.sequence_ids, keep.to(x.dtype))
        return (sums / sizes.clamp(min=1))[self.sequence_ids]


# It returns each token's loss (n,), and optionally metrics by name, (n,) each. They are reported as means over tokens.
LossFunction = Callable[[LossInputs], Tensor | tuple[Tensor, Mapping[str, Tensor]]]


def ppo(inputs: LossInputs) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated.

    For each token r = exp(log p - log p_old), with the exponent clamped to +-20. The loss is
    max(-A r, -A clip(r, 1-low, 1+high)). `clipLow` and `clipHigh` default to `clip` (DAPO, Yu et al. 2025, eq. 8). With
    `dualClip` c (Ye et al. 2020, eq. 5) the loss is at most -A c where A < 0. Returns token losses (n,) and metrics
    (n,): `clipfrac` marks tokens whose clipped loss is strictly larger, `dual_clipfrac` tokens bounded by c."""
    (low, high), dual_clip = inputs.config.clip_range, inputs.config.dual_clip
    keep = kept(inputs.mask)
    ratio = log_ratio(inputs.logprobs, inputs.old_logprobs.detach(), keep).exp()
    advantages = inside(inputs.advantages.detach(), keep)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = torch.maximum(plain, clipped)
    was_clipped = keep & (clipped > plain)
    was_dual = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        was_dual = keep & (advantages < 0) & (losses > bound)
        losses = torch.where(was_dual, bound, losses)
    return losses, {"clipfrac": was_clipped.float(), "dual_clipfrac": was_dual.float()}


def gspo(inputs: LossInputs) -> tuple[Tensor, Stats]:
    """GSPO's clipped surrogate (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5), negated.

    Each sample has one ratio, s = exp(mean over its tokens of log p - log p_old), with these differences clamped to
    +-20. Each token's loss is max(-A s, -A clip(s, 1-low, 1+high)). The gradient of a token's s is s times that of its
    own log p (GSPO-token, eq. 13). So a token may have an advantage of its own. Where all tokens have the sample's
    advantage, `lossAggregation: Sequence` gives the gradient of eq. 5. Returns token losses (n,) and the metric
    `clipfrac` (n,), which marks tokens of samples whose clipped loss is strictly larger."""
    low, high = inputs.config.clip_range
    keep = kept(inputs.mask)
    log_r = log_ratio(inputs.logprobs, inputs.old_logprobs.detach(), keep)
    ratio = (inputs.sequence_mean(log_r.detach()) + (log_r - log_r.detach())).exp()
    advantages = inside(inputs.advantages.detach(), keep)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped), {"clipfrac": (keep & (clipped > plain)).float()}


def cispo(inputs: LossInputs) -> tuple[Tensor, Stats]:
    """CISPO (MiniMax 2025, "MiniMax-M1", eq. 4 and 5), negated: -w A log p. The weight w is the ratio p / p_old, cut to
    [1-low, 1+high] and taken as a constant.

    PPO's clipping removes the gradient of some tokens. Here every token keeps its gradient, and a large ratio only
    counts less. As in the paper there is no lower bound unless `clipLow` is given. Returns token losses (n,) and the
    metric `clipfrac` (n,), which marks tokens whose ratio was cut."""
    low, high = inputs.config.clip_range
    keep = kept(inputs.mask)
    ratio = log_ratio(inputs.logprobs.detach(), inputs.old_logprobs.detach(), keep).exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    losses = -inside(inputs.advantages.detach(), keep) * weight * inside(inputs.logprobs, keep)
    return losses, {"clipfrac": (keep & (weight != ratio)).float()}


# The names are those of `spec.ppo.loss` (`dovetail.manifest.base.LOSSES`).
LOSSES: dict[str, LossFunction] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}
BUILT_IN_METRICS = frozenset({"clipfrac", "dual_clipfrac"})


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that a job uses. `name` is its name in the manifest.

    Metrics of a user's loss are reported as `loss/NAME`, so that they hide none of the trainer's own."""

    name: str
    function: LossFunction

    @property
    def built_in(self) -> bool:
        """Whether the loss is one of `LOSSES`."""
        return self.name in LOSSES

    def title(self, metric: str) -> str:
        """The name under which a metric of this loss is reported."""
        return metric if self.built_in else f"loss/{metric}"

    def reports(self, title: str) -> bool:
        """Whether the sum `title` is a metric of this loss."""
        return title in BUILT_IN_METRICS if self.built_in else title.startswith("loss/")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """Token losses (n,) and metrics (n,). Raises FunctionError with one sentence if a user's function raised, or if
        its result has another shape, is not finite or has no gradient."""
        if self.built_in:
            return _pair(self.function(inputs))
        if not inputs.logprobs.numel():
            return inputs.logprobs, {}
        try:
            with PROGRESS.bounded(), time_limit(inputs.config.timeout_seconds, FIELD, self.name):
                losses, metrics = _pair(self.function(inputs))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise FunctionError.raised(FIELD, self.name, error) from error
        self._check("losses", losses, inputs)
        for name, value in metrics.items():
            self._check(f"the metric {name!r}", value, inputs)
        if inputs.logprobs.requires_grad and not losses.requires_grad:
            raise self._error("returned losses without a gradient; compute them from inputs.logprobs")
        return losses, metrics

    def _check(self, what: str, value: object, inputs: LossInputs) -> None:
        shape = tuple(inputs.logprobs.shape)
        if not isinstance(value, Tensor):
            raise self._error(f"returned {what} as {type(value).__name__}; return a tensor of shape {shape}")
        if tuple(value.shape) != shape:
            raise self._error(f"returned {what} of shape {tuple(value.shape)}; return one number a token, {shape}")
        if not bool(torch.isfinite(value[inputs.mask]).all()):
            raise self._error(f"returned {what} that are not finite; check logarithms, divisions and exponents in it")

    def _error(self, text: str) -> FunctionError:
        return FunctionError(f"{FIELD}: {self.name} {text}")


def _pair(result: Tensor | tuple[Tensor, Mapping[str, Tensor]]) -> tuple[Tensor, Stats]:
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    return losses, dict(metrics)


def load_loss(config: PPO) -> PolicyLoss:
    """The loss of `spec.ppo`. It is a built-in one or a user's function. The function is looked for in `importPath`
    (default: the working directory), then on PYTHONPATH. Raises ValueError with one sentence if it cannot be
    imported."""
    if config.loss in LOSSES:
        return PolicyLoss(config.loss, LOSSES[config.loss])
    try:
        with PROGRESS.bounded(), time_limit(config.timeout_seconds, FIELD, config.loss):
            return PolicyLoss(config.loss, load_callable(config.loss, FIELD, config.import_path))
    except TimeoutError as error:
        raise FunctionError.raised(FIELD, config.loss, error) from error


def rehearse_loss(config: PPO) -> None:
    """Call a user's loss on three made-up samples, so that its errors show before training starts.

    Raises ValueError with one sentence."""
    loss = load_loss(config)
    if loss.built_in:
        return
    ids = torch.tensor([0, 0, 0, 1, 2, 2])
    base = -torch.arange(1.0, 7.0) / 4
    inputs = LossInputs(
        tokens=torch.arange(6),
        sequence_ids=ids,
        mask=torch.ones(6, dtype=torch.bool),
        logprobs=base.clone().requires_grad_(),
        old_logprobs=base - 0.1,
        rollout_logprobs=base - 0.05,
        ref_logprobs=base + 0.1,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, 0.5]),
        entropy=torch.ones(6),
        config=config,
        kl_coef=config.kl.coef,
        samples=3,
    )
    losses, _ = loss(inputs)
    losses.sum().backward()
    assert inputs.logprobs.grad is not None
    if not bool(torch.isfinite(inputs.logprobs.grad).all()):
        raise FunctionError(f"{FIELD}: {loss.name} has a gradient that is not finite; check it for divisions by 0")


def policy_loss(
    inputs: LossInputs, loss: PolicyLoss, *, normaliser: float | Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """The micro-batch's share of the policy's loss. It is the sum of token losses times `weights` (n,), divided by
    `normaliser`.

    Stats are sums over tokens: `tokens`, `policy_loss`, `ratio` (to the old policy), `approx_kl` (k3 of
    KL(old || new), (r - 1) - log r), and the loss's own metrics by their titles. Raises FunctionError."""
    keep = kept(inputs.mask)
    losses, metrics = loss(inputs)
    losses = inside(losses, keep)
    if weights is not None:
        losses = losses * inside(weights.detach(), keep)
    total = losses.sum()
    log_r = log_ratio(inputs.logprobs.detach(), inputs.old_logprobs.detach(), keep)
    stats = {
        "tokens": keep.sum().float(),
        "policy_loss": total.detach().float(),
        "ratio": inside(log_r.exp(), keep).sum().float(),
        "approx_kl": inside(torch.expm1(log_r) - log_r, keep).sum().float(),
    }
    own = {loss.title(name): inside(value.detach(), keep).sum().float() for name, value in metrics.items()}
    return total / normaliser, stats | own
