"""The kernels for logits by Triton's interpreter, on a CPU: `python -m helpers.interpreted_kernels` prints how far each
case is from float64, as JSON. The interpreter must be asked for before anything imports Triton, so this is a process of
its own."""

from __future__ import annotations

import json
import os
import warnings
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from dovetail.models.layers import predictions, vocabulary_kernels
from dovetail.models.layers.predictions import Predictions, Vocabulary, by_chunks, predict

DTYPES = ("float32", "bfloat16")
ENTROPIES = ("none", "value", "gradient")
BOUNDS = (None, 3.0)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nine rows of width 8, a vocabulary of 300, more than two blocks of its columns; and tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64).to(dtype) for n in (9, 300))
    return hidden, weight, torch.randint(0, 300, (9,), generator=generator)


def training(dtype: torch.dtype, bound: float | None, entropy: Any) -> float:
    """The largest relative error of log-probabilities, entropies and the gradients of both inputs."""
    hidden, weight, tokens = inputs(dtype)
    factors = torch.arange(9.0)

    def found(wide: bool) -> list[torch.Tensor]:
        states, matrix = (x.to(torch.float64 if wide else dtype, copy=True).requires_grad_() for x in (hidden, weight))
        asked, vocabulary = Predictions(tokens, 0.7, entropy), Vocabulary(matrix, bound)
        said = predict(states, vocabulary, asked) if wide else by_chunks(states, vocabulary, asked, 5000)
        loss = (said.logprobs * factors).sum()
        if entropy == "gradient":
            loss = loss + (said.entropy * factors.flip(0)).sum()
        values = [said.logprobs] if entropy == "none" else [said.logprobs, said.entropy]
        return [*(each.detach() for each in values), *torch.autograd.grad(loss, [states, matrix])]

    pairs = zip(found(False), found(True), strict=True)
    return max(float((ours.double() - whole).norm() / whole.norm()) for ours, whole in pairs)


def scoring() -> float:
    """The largest error of several tokens at one position."""
    hidden, weight, _ = inputs(torch.float32)
    rows, tokens = np.array([0, 0, 2, 5, 5, 5, 8]), torch.tensor([3, 299, 7, 0, 1, 2, 128])
    with torch.inference_mode():
        said = by_chunks(hidden, Vocabulary(weight), Predictions(tokens, 0.7, rows=rows), 4000)
        expected = torch.log_softmax(hidden @ weight.T / 0.7, 1)[rows, tokens]
    return float((said.logprobs - expected).abs().max())


def forbidden() -> float:
    """The largest error where most logits are minus infinity, among them a whole block."""
    weight = torch.full((300, 1), float("-inf"))
    weight[200:203, 0] = torch.tensor([1.0, 2.0, 3.0])
    asked = Predictions(torch.tensor([201]), entropy="gradient")
    said = by_chunks(torch.ones(1, 1).requires_grad_(), Vocabulary(weight), asked)
    alone = torch.log_softmax(torch.tensor([1.0, 2.0, 3.0]), 0)
    errors = (said.logprobs - alone[1], said.entropy + (alone.exp() * alone).sum())
    return max(float(each.detach().abs().max()) for each in errors)


def main() -> None:
    warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # of the branch that a lane does not take
    vocabulary_kernels._BLOCK = 128  # so that a row has several
    predictions._kernels = lambda _: vocabulary_kernels
    errors = {"scoring": scoring(), "forbidden": forbidden()}
    for dtype, entropy, bound in product(DTYPES, ENTROPIES, BOUNDS):
        errors[f"{dtype} {entropy} {bound}"] = training(getattr(torch, dtype), bound, entropy)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
