"""How the gradients of ranks with the same parameters are added up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dovetail.trainer.engine import reduction
from dovetail.trainer.engine.reduction import Reduction


@pytest.mark.parametrize("sizes", [(3, 8, 20, 1, 16), (20, 16), (3, 1), ()])
def test_large_gradients_are_added_up_in_place_and_small_ones_in_one_message(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other rank has the same gradients here, times 2. A copy of large ones would need as much memory again."""
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, group: Any, async_op: bool) -> None:
        sent.append(tensor)
        tensor.add_(2 * tensor)

    monkeypatch.setattr(reduction, "IN_PLACE", 16)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    parameters = {f"p{n}": nn.Parameter(torch.zeros(size)) for n, size in enumerate(sizes)}
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    parameters["without a gradient"] = nn.Parameter(torch.zeros(4))
    held: Any = SimpleNamespace(trainable=lambda: parameters)
    made = Reduction.__new__(Reduction)
    made._held, made._device = held, torch.device("cpu")
    for _ in made._sum(list(parameters), None):
        pass
    for number, parameter in enumerate(list(parameters.values())[: len(sizes)]):
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [3.0 * (number + 1)] * len(parameter)
    large = [p.grad.data_ptr() for p in parameters.values() if p.grad is not None and len(p) >= 16]
    assert [tensor.data_ptr() for tensor in sent if tensor.numel() >= 16] == large
    small = [size for size in sizes if size < 16]
    assert [len(tensor) for tensor in sent[len(large) :]] == ([sum(small)] if small or not sizes else [])


def test_a_model_may_have_any_number_of_large_gradients() -> None:
    """A sum that is done at once must not start the next one from within: Python allows 1,000 calls in each other."""

    class Done:
        def get_future(self) -> torch.futures.Future[None]:
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_result(None)
            return future

    made = Reduction.__new__(Reduction)
    made._error, made._ended = None, threading.Event()
    made._stages = (Done() for _ in range(3000))
    made._advance(None)
    assert made._error is None
    assert made._ended.is_set()
    assert next(made._stages, None) is None
