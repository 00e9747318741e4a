"""Position-keyed sampling: the right distribution, and noise that depends on seed, position and token alone."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.training_types import Generation
from dovetail.protocol.sampling import sampling_params
from helpers.lazy import Lazy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
scipy_stats = Lazy("scipy.stats")
vllm = Lazy("vllm")
logits_processor = Lazy("vllm.v1.sample.logits_processor")
sampling = Lazy("dovetail.rollout.serving.sampler")


def request(seed: int, **extra: object) -> Any:
    return vllm.SamplingParams(temperature=0.0, extra_args={"dt_seed": seed, **extra})


def sampler(vocab: int) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: vocab))
    return sampling.CounterSampler(config, torch.device("cpu"), False)


def add(target: Any, rows: list[tuple[Any, list[int], list[int]]]) -> None:
    added = [(i, params, prompt, output) for i, (params, prompt, output) in enumerate(rows)]
    target.update_state(logits_processor.BatchUpdate(batch_size=len(rows), removed=[], added=added, moved=[]))


def draw(logits: torch.Tensor, seeds: range, prompt: int = 3, **extra: object) -> np.ndarray:
    """One token for each seed from the same logits (V,)."""
    target = sampler(logits.numel())
    add(target, [(request(seed, **extra), [0] * prompt, []) for seed in seeds])
    return target.apply(logits.repeat(len(seeds), 1)).argmax(-1).numpy()


def expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The plain definition: temperature, then top-k, then the nucleus."""
    p = torch.softmax(logits.double() / temperature, -1)
    order = p.argsort(descending=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    chosen = order[: top_k or len(order)]
    mass = 0.0
    total = float(p[chosen].sum())
    for token in chosen:
        if mass >= top_p * total and top_p < 1:
            break
        keep[token] = True
        mass += float(p[token])
    p = torch.where(keep, p, 0.0)
    return (p / p.sum()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (1.2, 12, 0.9), (1.0, 1, 1.0)],
)
def test_tokens_are_drawn_with_the_models_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(5)) * 2
    want = expected(logits, temperature, top_k, top_p)
    tokens = draw(logits, range(20_000), dt_temperature=temperature, dt_top_k=top_k, dt_top_p=top_p)
    counts = np.bincount(tokens, minlength=20)
    assert counts[want == 0].sum() == 0
    if (want > 0).sum() > 1:
        assert scipy_stats.chisquare(counts[want > 0], want[want > 0] * len(tokens)).pvalue > 1e-3


def test_successive_positions_of_one_sample_are_independent_draws() -> None:
    logits = torch.zeros(16)
    target = sampler(16)
    output: list[int] = []
    add(target, [(request(11), [1, 2], output)])
    for _ in range(8_000):
        output.append(int(target.apply(logits[None].clone()).argmax()))
    pairs = np.array(output[:-1]) * 16 + np.array(output[1:])
    assert scipy_stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-3


def test_a_continued_sample_draws_what_the_unbroken_one_would() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    whole = sampler(50)
    first: list[int] = []
    add(whole, [(request(9, dt_top_p=0.9), [7, 8], first)])
    for row in logits:
        first.append(int(whole.apply(row[None].clone()).argmax()))
    # Elsewhere, in another batch row, with the first three tokens as part of the prompt.
    other = sampler(50)
    rest: list[int] = []
    add(other, [(request(1), [0], []), (request(9, dt_top_p=0.9), [7, 8, *first[:3]], rest)])
    for row in logits[3:]:
        rest.append(int(other.apply(torch.stack([row, row]))[1].argmax()))
    assert first[:3] + rest == first


def test_requests_without_a_seed_stay_greedy() -> None:
    logits = torch.randn(3, 40)
    target = sampler(40)
    add(target, [(vllm.SamplingParams(temperature=0.0), [1], []), (request(3), [1], [])])
    out = target.apply(logits.clone())
    assert torch.equal(out[[0, 2]], logits[[0, 2]])
    assert not torch.equal(out[1], logits[1])


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), vocab=st.integers(1, 99))
@settings(max_examples=50, deadline=None)
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int, vocab: int) -> None:
    one = np.empty((1, vocab), np.float32)
    sampling.GumbelNoise().fill(one, [(seed, position)])
    many = np.empty((3, vocab + 7), np.float32)
    sampling.GumbelNoise().fill(many, [(seed ^ 1, position), (seed, position), (seed, position + 1)])
    assert np.array_equal(one[0], many[1, :vocab])
    assert np.isfinite(many).all()
    assert not np.array_equal(many[0], many[1])
    assert not np.array_equal(many[1], many[2])


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_masks_agree_with_the_definition(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([7, 300, 700]))
    rows = data.draw(st.integers(1, 4))
    scale = data.draw(st.sampled_from([0.01, 1.0, 5.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale
    k = [data.draw(st.sampled_from([1, 3, vocab // 2 + 1, vocab])) for _ in range(rows)]
    p = [data.draw(st.sampled_from([0.1, 0.5, 0.93, 1.0])) for _ in range(rows)]
    masked = logits.clone()
    sampling.mask_top_k_top_p(masked, torch.tensor(k), torch.tensor(p, dtype=torch.float64))
    for row in range(rows):
        want = expected(logits[row], 1.0, k[row], p[row]) > 0
        assert np.array_equal(torch.isfinite(masked[row]).numpy(), want)


@pytest.mark.parametrize(
    ("extra", "temperature", "word"),
    [
        ({"dt_seed": "7"}, 0.0, "dt_seed"),
        ({"dt_seed": -1}, 0.0, "dt_seed"),
        ({"dt_temperature": 1.0}, 0.0, "without dt_seed"),
        ({"dt_seed": 1, "dt_temperature": 0.0}, 0.0, "dt_temperature"),
        ({"dt_seed": 1, "dt_top_p": 1.5}, 0.0, "dt_top_p"),
        ({"dt_seed": 1, "dt_top_k": -2}, 0.0, "dt_top_k"),
        ({"dt_seed": 1, "dt_topk": 2}, 0.0, "dt_topk"),
        ({"dt_seed": 1}, 0.7, "temperature"),
    ],
)
def test_wrong_parameters_are_refused_by_name(extra: dict[str, object], temperature: float, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sampling.CounterSampler.validate_params(vllm.SamplingParams(temperature=temperature, extra_args=extra))


@pytest.mark.parametrize("kind", ["counter", "native"])
def test_request_parameters_are_ones_that_vllm_takes(kind: str) -> None:
    generation = Generation(temperature=0.8, top_p=0.9, top_k=20, stop=["\n\n"], min_tokens=4)
    params = sampling_params(generation, 5, 10, kind, generated=3)  # type: ignore[arg-type]
    parsed = vllm.SamplingParams(**params)
    sampling.CounterSampler.validate_params(parsed)
    assert parsed.min_tokens == 1
    assert parsed.max_tokens == 10
    assert parsed.logprobs == 0
    assert parsed.detokenize
    if kind == "native":
        assert (parsed.temperature, parsed.top_p, parsed.top_k, parsed.seed) == (0.8, 0.9, 20, 5)
    with pytest.raises(ValueError, match="max_tokens"):
        sampling_params(generation, 5, 0, kind)  # type: ignore[arg-type]
