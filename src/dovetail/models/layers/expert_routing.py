"""Adds routing replay and the load-balancing loss to the routers of mixtures of experts in training.
`use_whole_experts` is for scorers.

Routing replay (Ma et al. 2025, arXiv 2510.11370): the trainer uses the experts that the rollout chose. Near a tie,
rounding makes the two choose differently, and then their log-probabilities differ by more than rounding.

The load-balancing loss of a layer (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6) is E sum_e f_e p_e. E is the
number of experts, f_e the fraction of tokens that got expert e, and p_e the mean probability that the router gave it.
It equals transformers' `load_balancing_loss_func` of that layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from dovetail.manifest.model_families import Experts
from dovetail.models.layers.packing import ROWS, Packing


class _Layer(nn.Module):
    """A base class that goes before a decoder layer's own class. `routing` and `balance` are arguments of the layer, so
    that a layer that runs again for activation checkpointing gets them too."""

    replays: str

    def forward(self, hidden: Tensor, routing: Tensor | None = None, balance: float = 0.0, **others: Any) -> Any:
        router: Any = self.get_submodule(self.replays)
        router.given, router.balance, router.packing = routing, balance, others.get("packing")
        try:
            return super().forward(hidden, **others)
        finally:
            router.given, router.balance, router.packing = None, 0.0, None


class _Router(nn.Module):
    """A base class that goes before a router's own class. The weights of the experts are always those of the present
    policy. `given`, `balance`: see `replays`. `over_chosen`: the softmax is over the chosen experts only."""

    given: Tensor | None
    balance: float
    packing: Packing | None
    over_chosen: bool
    # (2,): the number of given experts that the router would not have chosen itself, and the number of all given
    # experts.
    counts: Tensor | None
    # The sum of the load-balancing losses, and the number of passes in the sum.
    unbalance: Tensor | None
    passes: int

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = self._chosen(hidden)
        if self.balance and torch.is_grad_enabled():
            loss = balance_loss(logits, chosen, self.packing)
            found = loss.detach()
            self.unbalance = found if self.unbalance is None else self.unbalance + found
            self.passes += 1
            if weights.requires_grad:
                weights = _With.apply(weights, loss * self.balance)
        return logits, weights, chosen

    def _chosen(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = super().forward(hidden)
        if self.given is None:
            return logits, weights, chosen
        known = self.given[:, :1] >= 0
        given = torch.where(known, self.given.to(chosen.dtype), chosen)
        others = (chosen.unsqueeze(2) != given.unsqueeze(1)).all(2).sum()
        counts = torch.stack([others, known.sum() * chosen.shape[1]])
        self.counts = counts if self.counts is None else self.counts + counts
        return logits, self._weights(logits, given), given

    def _weights(self, logits: Tensor, given: Tensor) -> Tensor:
        if self.over_chosen:
            return logits.gather(1, given).softmax(1)
        found = logits.softmax(-1, dtype=torch.float).gather(1, given)
        if self.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return found.to(logits.dtype)


class _With(torch.autograd.Function):
    """Returns `values` unchanged. Its backward pass also starts the gradient of `loss`, because only the last stage has
    a loss to which it could be added."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.unit = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.unit


def balance_loss(logits: Tensor, chosen: Tensor, packing: Packing | None = None) -> Tensor:
    """The load-balancing loss of one layer, a scalar in float32. `logits`: (tokens, experts). `chosen`: (tokens,
    experts of a token) integers. If ranks share the tokens of `packing`, it is this rank's part of the loss."""
    experts = logits.shape[1]
    # bincount would make the host wait for the device.
    counts = (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)
    mean = logits.softmax(-1, dtype=torch.float).mean(0)
    if packing is not None and packing.ranks.size > 1:
        dist.all_reduce(counts, group=packing.ranks.group)
        return experts * (counts / packing.total * mean).sum() * (logits.shape[0] / packing.total)
    return experts * (counts / logits.shape[0] * mean).sum()


_classes: dict[type[Any], type[Any]] = {}


def _before(base: type[Any], module: nn.Module) -> None:
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (base, cls), {})
    module.__class__ = _classes[cls]


def replays(layer: nn.Module, experts: Experts) -> None:
    """Let a decoder layer take two more arguments. `routing`, (tokens, experts of a token) integers, has the experts to
    use. -1 marks tokens whose experts the layer chooses itself. If it is None, the layer chooses for all tokens.
    `balance` is the factor of the layer's load-balancing loss in the loss."""
    router: Any = layer.get_submodule(experts.router)
    router.given, router.counts, router.over_chosen = None, None, experts.over_chosen
    router.balance, router.packing, router.unbalance, router.passes = 0.0, None, None, 0
    layer.replays = experts.router  # type: ignore[assignment]
    _before(_Router, router)
    _before(_Layer, layer)


def take_counts(module: nn.Module) -> tuple[float, float]:
    """The number of given experts that the routers in `module` would not have chosen themselves, and the number of all
    given experts, since the last call. It waits for the device."""
    found = [router for router in module.modules() if isinstance(router, _Router) and router.counts is not None]
    if not found:
        return 0.0, 0.0
    other, every = torch.stack([router.counts for router in found if router.counts is not None]).sum(0).tolist()
    for router in found:
        router.counts = None
    return float(other), float(every)


def take_unbalance(module: nn.Module) -> tuple[float, int]:
    """The sum of the load-balancing losses of all routers in `module` since the last call, and the number of passes. It
    waits for the device."""
    found = [router for router in module.modules() if isinstance(router, _Router) and router.unbalance is not None]
    if not found:
        return 0.0, 0
    loss = float(torch.stack([router.unbalance for router in found if router.unbalance is not None]).sum())
    passes = sum(router.passes for router in found)
    for router in found:
        router.unbalance, router.passes = None, 0
    return loss, passes


NAME = "dovetail_whole_experts"


def use_whole_experts(model: nn.Module) -> None:
    """Let all experts of a model compute that way. Other models stay as they are."""
    for module in model.modules():
        if hasattr(module, "has_gate"):  # transformers sets it in each class that can compute in several ways
            module.config._experts_implementation = NAME


def whole_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts whose outputs for a token do not depend on the other tokens of a forward pass, on CPUs. They compute what
    transformers' `grouped_mm` computes. `hidden_states`: (tokens, width). `top_k_index`,
    `top_k_weights`: (tokens, experts of a token).

    A matrix product gives each row the same bits only if the number of rows is a multiple of ROWS. How many tokens an
    expert gets depends on all tokens of the pass. So tokens of zeros are added until each expert has a multiple of
    ROWS. Their outputs are dropped."""
    tokens, each = top_k_index.shape
    added = _added(top_k_index, int(self.num_experts), each)
    filled = grouped_mm_experts_forward(
        self,
        torch.cat([hidden_states, hidden_states.new_zeros(len(added), hidden_states.shape[1])]),
        torch.cat([top_k_index, added]),
        torch.cat([top_k_weights, top_k_weights.new_zeros(len(added), each)]),
    )
    return filled[:tokens]


def _added(chosen: Tensor, experts: int, each: int) -> Tensor:
    """The experts (n, each) of the tokens that are added."""
    counts = torch.bincount(chosen.reshape(-1), minlength=experts)
    lacking = -counts % ROWS
    while int(lacking.sum()) % each:  # whole tokens are added
        lacking[0] += ROWS
    return torch.repeat_interleave(torch.arange(experts, device=chosen.device), lacking).to(chosen.dtype).view(-1, each)


ExpertsInterface.register(NAME, whole_experts)
