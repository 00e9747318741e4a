"""Both halves of a backward pass give the gradients of a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.trainer.engine.split_backward import backward_input, backward_weights


class _Siblings(nn.Module):
    """Branches that meet again, as queries, keys and values do, with a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.frozen(self.a(y).softmax(-1) @ self.b(y).T @ self.c(y))
        return found


class _Repeated(nn.Module):
    """A weight that is used before and after another one, in a function of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.once, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.often(self.once(self.often(x).tanh()) * self.scale).tanh() * (self.scale * 2)
        return found


class _Scaled(torch.autograd.Function):
    """A function written in Python, as the one of a language model's log-probabilities is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class _InPython(nn.Module):
    """Functions in Python below one of torch and, if `last`, at the very end too."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.below, self.above, self.last = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), last
        self.end = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        made = self.above(_Scaled.apply(x, self.below).tanh())
        found: Tensor = _Scaled.apply(made, self.end)
        return found if self.last else found.exp() * 2


def _python_at_the_end() -> nn.Module:
    return _InPython(True)


def _python_inside() -> nn.Module:
    return _InPython(False)


def _chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize("make", [_chain, _Siblings, _Repeated, _python_inside, _python_at_the_end])
def test_both_halves_give_the_gradients_of_a_whole_backward(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    x, gradient = torch.randn(5, 4), torch.randn(5, 4)
    found = []
    for split in (False, True):
        module.zero_grad()
        for _ in range(2):  # gradients add up
            inputs = x.clone().requires_grad_(True)
            output = module(inputs)
            if split:
                inputs.grad, groups = backward_input(output, gradient, inputs)
                assert output.grad_fn is None
                backward_weights(groups)
            else:
                output.backward(gradient)
        found.append({"inputs": inputs.grad, **{name: p.grad for name, p in module.named_parameters()}})
    exact = make is not _Repeated  # its gradients are summed in another order
    for name, whole in found[0].items():
        mine = found[1][name]
        assert (mine is None) == (whole is None)
        if whole is not None and mine is not None:
            assert torch.equal(mine, whole) if exact else torch.allclose(mine, whole, atol=1e-6), name


def test_weights_wait_for_their_half_and_the_graph_is_free_afterwards() -> None:
    module, inputs = _chain(), torch.randn(5, 4, requires_grad=True)
    gradient, groups = backward_input(module(inputs).sum(), None, inputs)
    assert gradient is not None
    assert gradient.shape == inputs.shape
    assert all(p.grad is None for p in module.parameters())
    backward_weights(groups)
    assert all(p.grad is not None for p in module.parameters())
    assert all(not group.nodes and not group.gradients and group.graph is None for group in groups)
    assert backward_input(torch.ones(3), None, inputs) == (None, [])
