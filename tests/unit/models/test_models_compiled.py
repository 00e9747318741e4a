"""Layers under torch.compile. The backend here traces and runs the same operations; kernels are made on GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dovetail.manifest.types import ScratchModel
from dovetail.models import PipelineStage, build_stage
from dovetail.models.compiled import compile_layers, use_compiled
from dovetail.protocol.messages import ModelRef

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def stages() -> Iterator[tuple[PipelineStage, PipelineStage]]:
    """The same stage as it is and compiled, both to be trained."""
    import torch._dynamo
    from transformers import AttentionInterface

    from dovetail.models.layers.attention import NAME, attend

    ref = ModelRef(head="lm", scratch=ScratchModel(architecture="llama", config=LLAMA), seed=3)
    plain, compiled = (build_stage(ref).train().requires_grad_(True) for _ in range(2))
    compile_layers(compiled, backend="aot_eager")
    with torch._dynamo.config.patch(suppress_errors=False):
        yield plain, compiled
    AttentionInterface.register(NAME, attend)
    torch._dynamo.reset()


def gradients(stage: PipelineStage, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    stage.zero_grad()
    tokens = torch.arange(sum(lengths)).remainder(50).unsqueeze(0)
    stage(tokens, lengths).square().mean().backward()
    return {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_a_compiled_stage_has_the_same_gradients(stages: tuple[PipelineStage, PipelineStage]) -> None:
    """And compiles nothing twice, and no more for other lengths, or another layer."""
    from torch._dynamo.utils import counters

    plain, compiled = stages
    assert list(dict(plain.named_parameters())) == list(dict(compiled.named_parameters()))
    counters["aot_autograd"].clear()
    torch.testing.assert_close(gradients(compiled, (5, 9)), gradients(plain, (5, 9)))
    assert counters["aot_autograd"]["total"] == counters["aot_autograd"]["ok"] == 4, "a graph was compiled in vain"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((7, 3, 4), (11,), (6, 6)):
            torch.testing.assert_close(gradients(compiled, lengths), gradients(plain, lengths))
    use_compiled(compiled, False)
    torch.testing.assert_close(gradients(compiled, (5, 9)), gradients(plain, (5, 9)), rtol=0, atol=0)
