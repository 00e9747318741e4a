"""Both halves of a backward pass give the gradients of a whole one."""

from __future__ import annotations

from collections.abc import Callable

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


def _chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize("make", [_chain, _Siblings, _Repeated])
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
    assert all(not group.nodes and not group.gradients for group in groups)
    assert backward_input(torch.ones(3), None, inputs) == (None, [])
