"""What a small model costs the host: kernels are counted on our own model, as PyTorch would launch them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.gpus.gpu_products import gpu
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import ScratchModel
from dovetail.models import build_stage
from dovetail.planner.seconds import LAUNCHES, decode_step, forward
from dovetail.protocol.messages import ModelRef

NO_KERNEL = ("view", "detach", "empty")


class Kernels(TorchDispatchMode):
    """Counts operations that compute or copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if not views and not any(word in func._schema.name for word in NO_KERNEL):
            self.count += 1
        return func(*args, **(kwargs or {}))


def kernels(layers: int) -> tuple[int, int]:
    """Of a forward and a backward pass of a Llama over two packed samples."""
    config = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = build_stage(ModelRef(head="lm", scratch=ScratchModel(config=config)))
    model.train().requires_grad_(True)
    with Kernels() as ahead:
        out = model(torch.zeros(1, 24, dtype=torch.int64), lengths=(16, 8))
    with Kernels() as back:
        out.float().sum().backward()
    return ahead.count, back.count


def test_launches_of_a_block_are_those_of_our_model() -> None:
    small, large = kernels(2), kernels(4)
    ahead, back = ((b - a) / 2 for a, b in zip(small, large, strict=True))
    assert ahead == pytest.approx(LAUNCHES, rel=0.1)
    assert back == pytest.approx(2 * LAUNCHES, rel=0.2)


def test_a_small_models_iteration_is_no_millisecond() -> None:
    """Of the quickstart's models: 128 tokens alone take a third of a second."""
    card = gpu("NVIDIA-H100-80GB-HBM3")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tiny = ModelShape.of(config | {"num_attention_heads": 2, "vocab_size": 300})
    assert 128 * decode_step(tiny, 16, 100, card) >= 0.3
    assert forward(tiny, "lm", 1000, 100, card) >= 2 * 36 * 5e-6
