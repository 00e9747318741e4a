"""Roofline times: by hand, and in the right order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu, products
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype
from dovetail.planner.candidate import Share
from dovetail.planner.seconds import (
    GPUCosts,
    all_gather,
    all_reduce,
    decode_step,
    forward,
)
from dovetail.planner.workload import Workload

LLAMA_7B = ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_13B = ModelShape("llama", 40, 5120, 13824, 40, 40, 128, 32000)
QWEN3_30B = ModelShape("qwen3_moe", 48, 2048, 768, 32, 4, 128, 151936, experts=128, chosen=8)
H100, A10, V100 = gpu("NVIDIA-H100-80GB-HBM3"), gpu("NVIDIA-A10"), gpu("Tesla-V100-SXM2-32GB")


def test_decoding_one_sample_reads_the_weights() -> None:
    seconds = decode_step(LLAMA_7B, 1, 0, H100)
    assert seconds == pytest.approx(2 * 6.738e9 / (0.65 * 3.35e12) + 32 * 20e-6, rel=0.01)


def test_decoding_reads_the_experts_that_are_used() -> None:
    """Of Qwen3-30B-A3B one sample reads 3.3 of 30.5 billion parameters, a full batch all."""
    one, few, many = (decode_step(QWEN3_30B, n, 0, H100) - 48 * 20e-6 for n in (1, 16, 512))
    reads = 2 / (0.65 * 3.35e12)
    assert one == pytest.approx(3.3e9 * reads, rel=0.08)
    assert 3 * one < few < many
    assert many == pytest.approx(30.5e9 * reads, rel=0.01)
    assert QWEN3_30B.read_parameters(10_000) == pytest.approx(QWEN3_30B.parameters())
    assert LLAMA_7B.read_parameters(1) == LLAMA_7B.parameters()


def test_a_long_prompt_is_arithmetic() -> None:
    tokens = 4096
    assert forward(LLAMA_7B, "lm", tokens, 0, H100) == pytest.approx(
        LLAMA_7B.forward_flops(tokens, 0) / (0.5 * 989.5e12)
    )
    assert forward(LLAMA_7B, "lm", 1, 0, H100) == pytest.approx(2 * 6.738e9 / (0.65 * 3.35e12), rel=0.01)


def test_links() -> None:
    assert all_reduce(1e9, 1, 1e9) == 0
    assert all_reduce(8e9, 4, 1e10) == pytest.approx(15e-6 + 1.5 * 8e9 / 0.8e10)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(products())),
    st.integers(1, 512),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 4, 8]),
)
def test_times_grow_with_work(product: str, batch: int, context: int, tp: int) -> None:
    card = gpu(product)
    step = decode_step(LLAMA_7B, batch, context, card, tp)
    assert 0 < step <= decode_step(LLAMA_7B, batch + 1, context, card, tp)
    assert step <= decode_step(LLAMA_7B, batch, context + 1, card, tp)
    assert step <= decode_step(LLAMA_13B, batch, context, card, tp)
    assert step < batch * decode_step(LLAMA_7B, 1, context, card, tp) or batch == 1
    passing = forward(LLAMA_7B, "value", batch, context, card, tp)
    assert 0 < passing <= forward(LLAMA_7B, "lm", batch, context, card, tp)


def test_a_training_step_by_hand() -> None:
    costs: dict[int, GPUCosts] = {}

    def step(sequences: int, pp: int = 1, dp: int = 1) -> float:
        lengths = Lengths.fixed(512)
        work = Workload(LLAMA_7B, LLAMA_7B, None, None, sequences, sequences, 1, lengths, lengths)
        made = costs.setdefault(sequences, GPUCosts(work, Inventory((Pool("h100", H100, 2, 8, 50e9),))))
        return made.step("actor_training", Share("h100", pp=pp, dp=dp, fsdp=2)).alone

    passes = forward(LLAMA_7B, "lm", 1024, 512, H100)
    parameters = LLAMA_7B.parameters()
    alone = step(8)
    # Seven of eight gradients are added to a sum in float32.
    optimizer = (28 + 7 * 10) * parameters / (0.65 * 3.35e12)
    assert alone == pytest.approx(8 * 3 * passes + optimizer)
    # Four stages: 8 + 3 slots of a quarter each; five stages of 32 layers: the slowest has 7.
    four = step(8, pp=4)
    assert four == pytest.approx(11 / 4 * 3 * passes + optimizer / 4, rel=0.01)
    five = step(8, pp=5)
    assert five == pytest.approx(12 * 7 / 32 * 3 * passes + optimizer / 5, rel=0.01)
    # Over two nodes the gradients go through the network, by the cards of all eight GPUs of a node.
    near = step(64, dp=8)
    far = step(128, dp=16)
    optimizer_saved = 28 * parameters / (0.65 * 3.35e12) * (1 / 8 - 1 / 16)
    exchanged = 6 * parameters * (15 / 16 / 320e9 - 7 / 8 / 360e9)
    assert far - near + optimizer_saved == pytest.approx(exchanged, rel=0.01)


def test_a_ring_uses_the_cards_of_all_its_ranks() -> None:
    cluster = Pool("h100", H100, 2, 8, 50e9)
    assert cluster.ring(8) == cluster.ring(2, 4) == H100.nvlink
    assert cluster.ring(16) == 8 * 50e9
    assert cluster.ring(4, 4) == 2 * 50e9
    assert cluster.ring(4, 8) == 50e9
    assert all_gather(8e9, 4, 1e10) == pytest.approx(15e-6 + 0.75 * 8e9 / 0.8e10)
    assert all_gather(8e9, 1, 1e10) == 0


def test_training_without_bfloat16_takes_float32s_time() -> None:
    """Trainers have no loss scaling, so a V100 trains in float32 and generates in float16."""
    assert (V100.dtype, V100.training.dtype) == (Dtype.FLOAT16, Dtype.FLOAT32)
    assert A10.training is A10
    work = Workload(
        actor=LLAMA_7B,
        reference=LLAMA_7B,
        reward=None,
        critic=None,
        batch=64,
        mini_batch=64,
        epochs=1,
        prompt=Lengths.fixed(512),
        response=Lengths.fixed(512),
    )
    costs = GPUCosts(work, Inventory((Pool("v", V100, 1, 8),)))
    share = Share("v", 0, 8, 1, 1, 1, 2, True)
    floor = 3 * LLAMA_7B.forward_flops(64 * 1024, 512) / (8 * V100.flops[Dtype.FLOAT32])
    assert costs.step("actor_training", share).work > floor
    assert costs.memory.training_job("actor_training", share, 0).dtype is Dtype.FLOAT32
