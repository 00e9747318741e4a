"""Log-probabilities and entropies without the whole logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.models.layers.predictions import Predictions, Vocabulary, by_chunks, gradients_of, predict
from dovetail.trainer.engine.split_backward import backward_input, backward_weights


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nine rows of width 8, a vocabulary of 300, more than two chunks of its columns; and tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64).to(dtype) for n in (9, 300))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 300, (9,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bound", [None, 3.0])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("chunk", [1, 5000, 2**20])
def test_chunks_give_what_whole_logits_give(temperature: float, bound: float | None, entropy: Any, chunk: int) -> None:
    hidden, weight, tokens = inputs()
    asked = Predictions(tokens, temperature, entropy)
    factors = torch.arange(9.0, dtype=torch.float64)

    def found(chunked: bool) -> list[torch.Tensor]:
        vocabulary = Vocabulary(weight, bound)
        said = by_chunks(hidden, vocabulary, asked, chunk) if chunked else predict(hidden, vocabulary, asked)
        loss = (said.logprobs * factors).sum()
        if entropy == "gradient":
            loss = loss + (said.entropy * factors.flip(0)).sum()
        values = [said.logprobs] if entropy == "none" else [said.logprobs, said.entropy]
        return [*values, *torch.autograd.grad(loss, [hidden, weight])]

    for ours, whole in zip(found(True), found(False), strict=True):
        torch.testing.assert_close(ours, whole)


def test_a_likely_token_keeps_its_digits() -> None:
    """Log-probabilities near 0 are no difference of two large numbers."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[100.0], [88.0]])
    said = by_chunks(hidden, Vocabulary(weight), Predictions(torch.tensor([0])))
    assert float(said.logprobs) == pytest.approx(-6.144e-06, abs=1e-7)


@pytest.mark.parametrize("chunk", [1, 7000, 2**20])
def test_several_tokens_at_one_position(chunk: int) -> None:
    hidden, weight, _ = inputs(torch.float32)
    rows, tokens = np.array([0, 0, 2, 5, 5, 5, 8]), torch.tensor([3, 299, 7, 0, 1, 2, 128])
    with torch.inference_mode():
        asked = Predictions(tokens, 0.7, rows=rows)
        ours, whole = by_chunks(hidden, Vocabulary(weight), asked, chunk), predict(hidden, Vocabulary(weight), asked)
        expected = torch.log_softmax(hidden @ weight.T / 0.7, 1)[rows, tokens]
    torch.testing.assert_close(ours.logprobs, expected)
    torch.testing.assert_close(whole.logprobs, expected)


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        Predictions(torch.tensor([0]), 0.0)


def test_a_backward_in_two_halves_computes_each_gradient_once() -> None:
    """The head's weight is a large part of a stage: either half would compute the other's product, too."""
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(6, 8, generator=generator).requires_grad_()
    before = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
    weight = torch.nn.Parameter(torch.randn(50, 8, generator=generator))
    asked = Predictions(torch.arange(6))

    def loss() -> torch.Tensor:
        return by_chunks(given @ before, Vocabulary(weight), asked, 4 * 50 * 2).logprobs.sum()

    expected = torch.autograd.grad(loss(), [given, before, weight])
    products: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if "mm" in str(function) and isinstance(found, torch.Tensor):
                products.append("weight" if found.shape[-1] == 8 and found.shape[0] != 6 else "other")
            return found

    output = loss()
    with Products(), gradients_of("inputs"):
        found, groups = backward_input(output, None, given)
    assert "weight" not in products
    with gradients_of("weights"):
        backward_weights(groups)
    assert found is not None
    for mine, whole in zip((found, before.grad, weight.grad), expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, whole)
