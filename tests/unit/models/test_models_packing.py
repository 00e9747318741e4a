"""Sequences that go on from a shared prefix compute what whole sequences do, and attend to what they should."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.models import PipelineStage, build_stage
from dovetail.models.layers.attention import ScoreSettings, attend, by_blocks, flash
from dovetail.models.layers.packing import Packing
from dovetail.protocol.budgets import SCORE_BYTES
from helpers.family_models import FAMILIES, ref

# Prompts are sequences 0 and 3; the others go on from them, and the last stands alone.
LENGTHS = (7, 3, 5, 4, 2, 6)
PREFIXES = (None, 0, 0, None, 3, None)


def wholes(tokens: torch.Tensor) -> list[torch.Tensor]:
    parts = tokens.split(LENGTHS)
    return [
        part if prefix is None else torch.cat([parts[prefix], part])
        for part, prefix in zip(parts, PREFIXES, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *((family, "lm") for family in FAMILIES),
        *(pytest.param(f, "value", marks=() if f == "llama" else pytest.mark.nightly) for f in FAMILIES),
    ],
)
def test_sequences_with_a_prefix_equal_whole_ones(family: str, head: str) -> None:
    stage = build_stage(ref(family, head))
    generator = torch.Generator().manual_seed(0)
    for parameter in stage.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(1, 64, (sum(LENGTHS),), generator=generator)
    found = stage(tokens[None], LENGTHS, None, PREFIXES)[0].split(LENGTHS)
    for part, whole in zip(found, wholes(tokens), strict=True):
        torch.testing.assert_close(part, stage(whole[None])[0, -len(part) :], atol=1e-6, rtol=1e-5)
    wanted = torch.tensor([6, 8, 20])
    torch.testing.assert_close(
        stage(tokens[None], LENGTHS, wanted, PREFIXES), torch.cat(found)[wanted], atol=1e-6, rtol=1e-5
    )
    # And through the stages of a pipeline.
    hidden = tokens[None]
    stages = [build_stage(ref(family, head), rank, 2) for rank in range(2)]
    parameters = dict(stage.named_parameters())
    for each in stages:
        for name, parameter in each.named_parameters():
            parameter.data.copy_(parameters[each.checkpoint_name(name)].data)
        hidden = each(hidden, LENGTHS, None, PREFIXES)
    torch.testing.assert_close(hidden[0], torch.cat(found), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "opt"])
def test_sequences_as_rows_equal_packed_ones(family: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers get that cannot tell packed sequences apart. One by one, they give what each gives alone."""
    monkeypatch.setattr(PipelineStage, "_together", together)
    stage = build_stage(ref(family)).requires_grad_(True)
    tokens = torch.randint(1, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    wanted = torch.arange(3, sum(LENGTHS))
    found = []
    for packs in (True, False):
        stage.family = replace(stage.family, packs=packs)
        logits = stage(tokens[None], LENGTHS, wanted, PREFIXES)
        logits.log_softmax(-1)[:, 5].sum().backward()
        found.append((logits.detach(), {name: p.grad for name, p in stage.named_parameters()}))
        stage.zero_grad(set_to_none=True)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
    alone = torch.cat([stage(whole[None])[0] for whole in tokens.split(LENGTHS)])
    rows = stage(tokens[None], LENGTHS)[0]
    torch.testing.assert_close(rows, alone, atol=1e-6, rtol=1e-5)


def varlen(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    key_starts: Any,
    most: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Any:
    """torch's varlen_attn as it is documented: of each sequence, the last query sees all keys."""
    assert window_size == (-1, 0)
    assert enable_gqa or q.shape[1] == k.shape[1]
    outputs = []
    spans = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
    for (a, b), (c, d) in spans:
        assert b - a <= most
        assert d - c <= most_keys
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[c:d].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        behind = torch.ones(b - a, d - c, dtype=torch.bool).triu(d - c - (b - a) + 1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(behind, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


def varlen_2_11(
    q: Any, k: Any, v: Any, starts: Any, key_starts: Any, most: int, most_keys: int, *, scale: Any, window_size: Any
) -> Any:
    """torch 2.11 has as many key heads as query heads."""
    return varlen(q, k, v, starts, key_starts, most, most_keys, scale=scale, window_size=window_size)


@pytest.mark.parametrize("function", [varlen, varlen_2_11])
@pytest.mark.parametrize("prefixes", [PREFIXES, None], ids=["prefixes", "none"])
def test_one_call_of_flash_attention_is_asked_for_the_same(
    function: Any, prefixes: tuple[int | None, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, h, sum(LENGTHS), 8, generator=generator) for h in (4, 2, 2))
    packing = Packing(LENGTHS, prefixes, torch.device("cpu"))
    expected, _ = attend(torch.nn.Module(), query, key, value, None, 0.3, packing)
    torch.testing.assert_close(flash(query, key, value, packing, 0.3), expected, atol=1e-6, rtol=1e-5)


SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])


@pytest.mark.parametrize("prefixes", [PREFIXES, None], ids=["prefixes", "none"])
@pytest.mark.parametrize("scores", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"s_aux": SINKS, "sliding_window": 4}])
def test_blocks_of_sequences_attend_as_each_by_itself(
    scores: dict[str, Any], prefixes: tuple[int | None, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What GPUs do in float16. Short sequences would share one block."""
    monkeypatch.setattr("dovetail.models.layers.packing._SHORT", 1)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, h, sum(LENGTHS), 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
    packing = Packing(LENGTHS, prefixes, torch.device("cpu"))
    expected, _ = attend(torch.nn.Module(), *inputs, None, 0.3, packing, **scores)
    of = ScoreSettings(0.3, scores.get("sliding_window"), scores.get("softcap"), scores.get("s_aux"))
    found = by_blocks(*inputs, packing, of)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_short_sequences_of_one_shape_are_computed_together_with_the_same_bits(
    window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers to each of two prompts: what they give must not depend on which of them are there. With several
    threads it would, so there each is computed alone."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    calls = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments[0].shape)
        return whole(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    lengths = [7, *(1 + i % 3 for i in range(8)), 7, *(1 + i % 3 for i in range(8))]
    prefixes = [None, *[0] * 8, None, *[9] * 8]

    def attended(chosen: list[int]) -> list[list[torch.Tensor]]:
        """The output of each sequence, and the gradients of its queries, keys and values."""
        packing = Packing(
            tuple(lengths[i] for i in chosen),
            tuple(None if prefixes[i] is None else chosen.index(prefixes[i]) for i in chosen),
            torch.device("cpu"),
        )
        found = [
            [torch.randn(1, heads, lengths[i], 16, generator=torch.Generator().manual_seed(3 * i + k)) for i in chosen]
            for k, heads in enumerate((4, 2, 2))
        ]
        inputs = [torch.cat(parts, 2).requires_grad_() for parts in found]
        output = attend(torch.nn.Module(), *inputs, None, packing=packing, sliding_window=window)[0]
        output.sin().sum().backward()
        return [list(output.split(packing.lengths, 1)), *(list(x.grad.split(packing.lengths, 2)) for x in inputs)]

    together = attended(list(range(len(lengths))))
    assert len(calls) == (4 if threads == 1 else len(lengths)), "prompts, and answers of three lengths"
    for prompt in (0, 9):
        for answer in range(prompt + 1, prompt + 9):
            alone = attended([prompt, answer])
            for everyone, pair in zip(together, alone, strict=True):
                assert torch.equal(everyone[answer], pair[1])
            assert torch.equal(together[0][prompt], alone[0][0])


@pytest.mark.parametrize("prefixes", [PREFIXES, None], ids=["prefixes", "none"])
@pytest.mark.parametrize("scores", [{"softcap": 2.0}, {"s_aux": SINKS, "sliding_window": 4}, {"s_aux": SINKS}])
def test_scores_of_some_queries_at_a_time_are_the_same(
    scores: dict[str, Any], prefixes: tuple[int | None, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded scores and sinks of long sequences, each sequence by itself and in blocks."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, h, sum(LENGTHS), 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
    if "s_aux" in scores:
        scores = {**scores, "s_aux": scores["s_aux"].clone().requires_grad_()}
        inputs.append(scores["s_aux"])
    packing = Packing(LENGTHS, prefixes, torch.device("cpu"))
    of = ScoreSettings(0.3, scores.get("sliding_window"), scores.get("softcap"), scores.get("s_aux"))

    def outcome(chunk: int) -> list[torch.Tensor]:
        monkeypatch.setattr("dovetail.models.layers.attention.SCORE_BYTES", chunk)
        found = []
        for output in (
            attend(torch.nn.Module(), *inputs[:3], None, 0.3, packing, **scores)[0],
            by_blocks(*inputs[:3], packing, of),
        ):
            weights = torch.linspace(-1, 1, output.numel()).view_as(output)
            found += [output, *torch.autograd.grad((output * weights).sum(), inputs)]
        return found

    for chunk in (1, 4 * 4 * 30):
        torch.testing.assert_close(outcome(chunk), outcome(2**30), atol=1e-5, rtol=1e-5)


def test_scores_take_no_memory_that_grows_with_the_square_of_the_length() -> None:
    """What a pass over a long sequence asks for beyond its inputs, forward and backward, by numbers of elements."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                largest = max(largest, found.numel() * found.itemsize)
            return found

    length, heads = 4096, 8
    query, key, value = (torch.empty(1, heads, length, 8, device="meta").requires_grad_() for _ in range(3))
    packing = Packing((length, 1), None, torch.device("cpu"))
    other = [torch.cat([x, x[:, :, :1]], 2) for x in (query, key, value)]
    with Sizes():
        attend(torch.nn.Module(), *other, None, 0.3, packing, softcap=2.0)[0].sum().backward()
    assert SCORE_BYTES / 2 < largest <= SCORE_BYTES
    assert 4 * heads * length**2 == 8 * SCORE_BYTES


def test_padding_at_most_doubles_the_work() -> None:
    lengths = (900, 800, 300, 290, 250, 70, 60, 9, 5)
    members = Packing(lengths, None, torch.device("cpu"))._members()
    assert sorted(i for block in members for i in block) == [*range(9)]
    assert len(members) == 3
    for block in members:
        sizes = [max(64, lengths[i]) for i in block]
        assert len(sizes) * max(sizes) ** 2 <= 2 * sum(size**2 for size in sizes)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [((None, 0), "2 prefixes for 3"), ((None, 0, 1), "sequence 2 goes on from 1"), ((None, None, 3), "goes on from 3")],
)
def test_prefixes_that_cannot_be(prefixes: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing((2, 2, 2), prefixes, torch.device("cpu"))


# MKL has other kernels for processors of other makers. So this has MKL and us take any processor for one of Intel's.
INTELS = "int mkl_serv_intel_cpu_true(void) { return 1; }"
PRODUCTS = """
import builtins
import io
import torch

real = builtins.open
builtins.open = lambda file, *a, **k: io.StringIO("GenuineIntel") if file == "/proc/cpuinfo" else real(file, *a, **k)
from dovetail.models.layers.packing import ROWS

torch.set_num_threads(THREADS)
for width, outputs in ((8, 8), (64, 128), (128, 344), (512, 64), (2048, 512)):
    weight, token = torch.randn(outputs, width), torch.randn(1, width)
    alone = torch.nn.functional.linear(token.repeat(ROWS, 1), weight)[0]
    for blocks in (1, 2, 3, 5, 7, 16, 21):
        many = torch.nn.functional.linear(token.repeat(blocks * ROWS, 1), weight)
        assert torch.equal(many, alone.expand_as(many)), f"{blocks * ROWS} rows, {weight.shape}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("instructions", "threads"), [("SSE4_2", 1), ("AVX2", 1), ("AVX2", 3)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(instructions: str, threads: int, tmp_path: Path) -> None:
    """MKL takes the best kernels that the processor has, up to `instructions`."""
    variables = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {"MKL_ENABLE_INSTRUCTIONS": instructions}
    if compiler := shutil.which("cc"):
        library = tmp_path / "intels.so"
        build = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(build, input=INTELS, text=True, check=True)
        variables["LD_PRELOAD"] = str(library)
    code = PRODUCTS.replace("THREADS", str(threads))
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
