"""Samples of one prompt share its computation in the scorer: the same numbers and bits, less work."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import Arrays
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import KEYS, SamplesToScore, packs
from helpers.scorers import VOCABULARY, exported, trainers_numbers

GROUP = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
    return exported(tmp_path_factory)


def grouped(prompts: list[int], seed: int = 0) -> Arrays:
    """`GROUP` responses of 0 to 40 tokens to each prompt, in no order; some responses begin with the same tokens."""
    g = np.random.default_rng(seed)
    rows, lengths = [], []
    for prompt in prompts:
        start = g.integers(0, VOCABULARY, prompt)
        for response in [0, 1, *g.integers(2, 40, GROUP - 2)]:
            rows.append(np.concatenate([start, [5, 6, 7][:response], g.integers(0, VOCABULARY, max(0, response - 3))]))
            lengths.append((prompt, response))
    # Padding holds ids outside the vocabulary: nobody may look at them.
    tokens = np.full((len(rows), max(map(len, rows)) + 3), 10**6, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    order = g.permutation(len(rows))
    sizes = np.array(lengths, np.int32)[order]
    return {"tokens": tokens[order], "prompt_lengths": sizes[:, 0], "response_lengths": sizes[:, 1]}


def part(arrays: Arrays, rows: list[int]) -> SamplesToScore:
    return SamplesToScore.read({name: array[rows] for name, array in arrays.items()})


@pytest.mark.parametrize(("max_tokens", "temperature"), [(8192, 1.0), (150, 0.7), (1, 1.0)])
def test_shared_prompts_give_the_numbers_of_whole_sequences(
    folders: dict[str, ModelRef], max_tokens: int, temperature: float
) -> None:
    arrays = grouped([1, 17, 30, 64])
    scorer = scoring.ModelScorer(max_tokens=max_tokens)
    scorer.load(folders)
    found = scorer.score(scoring.MODELS, SamplesToScore.read(arrays), temperature)
    expected = trainers_numbers(folders, arrays, temperature)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, rtol=1e-6)


def test_siblings_change_no_bit_of_a_samples_scores(folders: dict[str, ModelRef]) -> None:
    arrays = grouped([3, 16, 45, 70], seed=1)
    n = len(arrays["tokens"])
    scorer = scoring.ModelScorer()
    scorer.load(folders)
    together = scorer.score(scoring.MODELS, part(arrays, list(range(n))))
    order = np.random.default_rng(2).permutation(n).tolist()
    for size in (1, 3, 7):
        for batch in (order[i : i + size] for i in range(0, n, size)):
            apart = scorer.score(scoring.MODELS, part(arrays, batch))
            assert together["scores"][batch].tolist() == apart["scores"].tolist()
            for name in ("ref_logprobs", "values"):
                width = apart[name].shape[1]
                assert together[name][batch][:, :width].tolist() == apart[name].tolist()


def test_a_prompt_is_computed_once_for_all_its_samples(folders: dict[str, ModelRef]) -> None:
    arrays = grouped([20, 40, 64])
    work: Counter[str] = Counter()
    scorer = scoring.ModelScorer(progress=lambda model, tokens: work.update({model: tokens}))
    scorer.load(folders)
    scorer.score(scoring.MODELS, SamplesToScore.read(arrays))
    shared = 20 + 40 + 64 + int(arrays["response_lengths"].sum())
    assert dict(work) == dict.fromkeys(scoring.MODELS, shared)
    assert shared < int((arrays["prompt_lengths"] + arrays["response_lengths"]).sum())


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 2), st.integers(0, 30)), min_size=1, max_size=24),
    st.integers(1, 120),
    st.integers(1, 60),
    st.none() | st.integers(1, 120),
)
def test_packs_hold_every_sample_once_within_the_bounds(
    chosen: list[tuple[int, int, int]], max_tokens: int, max_outputs: int, enough: int | None
) -> None:
    """Each sample: a prompt of so many tokens, one of two such prompts, and a response."""
    tokens = np.zeros((len(chosen), 42), np.int64)
    for i, (prompt, which, response) in enumerate(chosen):
        tokens[i, :prompt] = which
        tokens[i, prompt : prompt + response] = 100 * i + np.arange(response)
    prompts, responses = (np.array([c[k] for c in chosen]) for k in (0, 2))
    samples = SamplesToScore(tokens, prompts, responses)
    everyone = Counter((p, w) for p, w, _ in chosen)
    seen: list[int] = []
    computed = 0
    for pack in packs(samples, max_tokens, max_outputs, enough):
        rows = pack.rows.tolist()
        seen += rows
        keys = [(p, w) for p, w, _ in (chosen[row] for row in rows)]
        # Each of its prompts once.
        assert len(pack.tokens) == sum(p for p, _ in set(keys)) + int(responses[rows].sum()) == sum(pack.lengths)
        assert len(rows) == 1 or len(pack.tokens) <= max_tokens
        if len(set(keys)) > 1 and all(keys.count(key) == everyone[key] for key in keys):
            assert len(pack.tokens) <= (enough or max_tokens)
        assert len(rows) == 1 or int(samples.lengths[rows].sum()) <= KEYS * max_tokens
        assert len(rows) == 1 or len(set(keys)) + int(responses[rows].sum()) <= max_outputs
        ends = np.cumsum(pack.lengths)
        for row, last in zip(rows, pack.last.tolist(), strict=True):
            mine = pack.of == row
            assert pack.at[mine].tolist() == list(range(responses[row]))
            path = [*pack.before[mine].tolist(), last]
            whole = tokens[row, : prompts[row] + responses[row]]
            assert pack.tokens[path].tolist() == whole[prompts[row] - 1 :].tolist()
            place = int(np.searchsorted(ends, last, side="right"))
            prefix = pack.prefixes[place] if responses[row] else place
            assert prefix is not None
            begin = ends[prefix] - pack.lengths[prefix]
            assert pack.tokens[begin : ends[prefix]].tolist() == whole[: prompts[row]].tolist()
        computed += len(pack.tokens)
    assert sorted(seen) == list(range(len(chosen)))
    assert computed <= int(samples.lengths.sum())
