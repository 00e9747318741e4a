"""Divides the experts of each layer over ranks (GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3). Each rank
holds some experts of every layer. It sends each token to the ranks that hold the token's experts, and gets their
outputs back. Routers and all other parts of a layer know nothing of the division.

Sums have one order: an expert takes its tokens by source rank and position, and a token adds its experts' outputs in
the order in which the router chose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from dovetail.manifest.model_shape import ModelShape
from dovetail.models.config import ModelError

NAME = "dovetail_experts_over_ranks"


class ExpertRanks:
    """The ranks of `group`, among which the experts of a layer are divided. `product` is transformers' function that
    computes the own ones."""

    def __init__(self, group: Any, product: Callable[..., Tensor]) -> None:
        self.group, self.product = group, product
        self.size = dist.get_world_size(group)


def divided(module: nn.Module) -> Iterator[Any]:
    """The modules inside `module` whose experts are divided over ranks."""
    return (each for each in module.modules() if hasattr(each, "expert_ranks"))


def divide_experts(stage: Any, mesh: Any) -> frozenset[str]:
    """Divide the experts of each layer of `stage` over the ranks of `mesh`, which has one dimension. Rank r of n gets
    the r-th of n equal parts. The stage is on the meta device. Call it before activation checkpointing and FSDP2. The
    experts' parameters become DTensors. Returns their names. Raises `ModelError` if a layer's experts cannot be
    divided so."""
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks, found = mesh.size(), set()
    # transformers sets `has_gate` in each class that can compute in several ways.
    modules = {path: module for path, module in stage.named_modules() if hasattr(module, "has_gate")}
    products = {path: _product(module) for path, module in modules.items()}
    shape = ModelShape.of(stage.config.to_dict())
    for each in {shape, *(replace(shape, experts=module.num_experts) for module in modules.values())}:
        if (why := each.deal_problem(ranks)) is not None:
            raise ModelError(f"ep is {ranks}, {why}")
    for path, module in modules.items():
        module.config._experts_implementation = NAME
        module.num_experts //= ranks
        module.expert_ranks = ExpertRanks(mesh.get_group(), products[path])
        for leaf, whole in [*module.named_parameters()]:
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
            found.add(f"{path}.{leaf}")
    return frozenset(found)


def _product(module: Any) -> Callable[..., Tensor]:
    """transformers' function that computes these experts."""
    name, usual = module.config._experts_implementation, type(module).forward.__wrapped__
    found: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(name, usual)
    return found


def experts_over_ranks(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The outputs of a layer's experts, (tokens, width), for this rank's tokens. `hidden_states`: (tokens, width).
    `top_k_index`, integers, and `top_k_weights`: (tokens, experts of a token). All ranks must call it, and also start
    its backward pass, equally often. The host waits for the device, because sizes depend on what routers choose."""
    ranks: ExpertRanks = self.expert_ranks
    own, device = int(self.num_experts), hidden_states.device
    chosen = top_k_index.reshape(-1)
    there = _Order(chosen)
    counts = torch.bincount(chosen, minlength=ranks.size * own).view(ranks.size, own)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=ranks.group)
    mine, others = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    slots = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1).flatten(0, 1)
    rows = torch.as_tensor(_Exchange.apply(there.sorted(slots), mine, others, ranks.group))
    experts = torch.arange(own, device=device).repeat(ranks.size).repeat_interleave(theirs.view(-1))
    here = _Order(experts)
    found = here.restored(_computed(ranks.product, _Held(self), here.sorted(rows), experts[here.order]))
    outputs = there.restored(torch.as_tensor(_Exchange.apply(found, others, mine, ranks.group)))
    weighted = outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


ExpertsInterface.register(NAME, experts_over_ranks)


def _computed(product: Callable[..., Tensor], held: Any, rows: Tensor, experts: Tensor) -> Tensor:
    """The output of one of the own experts for each row."""
    count = len(rows)
    if not count:  # torch computes no gradients of no rows, and the own experts need zeros
        rows, experts = nn.functional.pad(rows, (0, 0, 0, 1)), nn.functional.pad(experts, (0, 1))
    return product(held, rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))[:count]


class _Held:
    """Stands for a module of experts in transformers' function. Its parameters are what this rank holds."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to_local() if hasattr(found, "to_local") else found


class _Order:
    """The stable order of rows by their `keys`, (n,) integers."""

    def __init__(self, keys: Tensor) -> None:
        self.order = torch.sort(keys, stable=True).indices
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(keys), device=keys.device)

    def sorted(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(_Permuted.apply(rows, self.order, self.back))

    def restored(self, rows: Tensor) -> Tensor:
        """The reverse of `sorted`."""
        return torch.as_tensor(_Permuted.apply(rows, self.back, self.order))


class _Permuted(torch.autograd.Function):
    """torch's own gradient of this would add up rows, on a GPU in no fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.orders = order, back
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        order, back = ctx.orders
        return _Permuted.apply(gradient, back, order), None, None


class _Exchange(torch.autograd.Function):
    """Sends `sent[r]` of the rows, in their order, to rank r, and returns those that it got, `got[r]` from rank r."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        ctx.arguments = sent, got, group
        arrived = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), got, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sent, got, group = ctx.arguments
        return _Exchange.apply(gradient, got, sent, group), None, None, None
