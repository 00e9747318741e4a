"""Documents without padding, and parts of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from dovetail.protocol.messages import BatchPart
from dovetail.protocol.wire import Arrays, Document, SampleArrays, pack, pieces, row_lengths, unpack

NAMES = ("tokens", "rollout_logprobs", "step_ends", "routed_experts", "ptx_tokens", "scores")


def batch(prompts: list[int], responses: list[int], ptx: list[int], pad: int) -> Arrays:
    """A batch of PPO in which every entry is different."""
    found: Arrays = {
        "prompt_lengths": np.array(prompts, np.int32),
        "response_lengths": np.array(responses, np.int32),
        "ptx_lengths": np.array(ptx, np.int32),
        "scores": np.arange(len(prompts), dtype=np.float32),
    }
    kinds = {"tokens": np.int32, "rollout_logprobs": np.float32, "step_ends": np.uint8, "ptx_tokens": np.int32}
    for name, dtype in kinds.items():
        lengths = row_lengths(name, found)
        if lengths is None:
            continue
        table = 1 + np.arange(len(lengths) * lengths.max()).reshape(len(lengths), -1)
        inside = np.arange(lengths.max())[None, :] < lengths[:, None]
        found[name] = np.where(inside, table, pad if name == "tokens" else 0).astype(dtype)
    lengths = found["prompt_lengths"] + found["response_lengths"]
    experts = np.full((len(lengths), lengths.max(), 2, 3), -1, np.int16)
    for row, length in enumerate(lengths):
        experts[row, :length] = np.arange(length * 6).reshape(length, 2, 3)
    return {**found, "routed_experts": experts}


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in a)


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(lengths, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_a_part_has_its_rows_and_arrays_and_nothing_else(
    sizes: list[tuple[int, int]], ptx: list[int], pad: int, data: st.DataObject
) -> None:
    whole = batch([p for p, _ in sizes], [r for _, r in sizes], ptx, pad)
    packed = pack(whole)
    assert same(unpack(packed), whole)
    assert len(packed) < 2000 + sum(array.nbytes for array in whole.values())
    rows = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    some = data.draw(st.sets(st.sampled_from(NAMES)))
    full = data.draw(st.sets(st.sampled_from(NAMES))) - some
    some -= {"ptx_tokens"}  # it has rows of its own
    document = Document(packed)
    head, ranges = document.part(BatchPart(rows=rows, some=sorted(some), whole=sorted(full)))
    got = unpack(head + document.read(ranges))
    apart = {name for name in whole if row_lengths(name, whole) is not None}
    assert got.keys() == (whole.keys() - apart) | ((some | full) & whole.keys())
    for name, array in got.items():
        if name in apart and name in some:
            others = np.setdiff1d(np.arange(len(array)), rows)
            assert np.array_equal(array[rows], whole[name][rows])
            assert not array[others].any()
        else:
            assert np.array_equal(array, whole[name])


def test_a_part_of_a_file_is_as_small_as_its_rows(tmp_path: Path) -> None:
    whole = batch([2] * 400, [8] * 399 + [5000], [3], 0)
    path = tmp_path / "batch"
    path.write_bytes(pack(whole))
    assert path.stat().st_size < 250_000 < 0.01 * sum(array.nbytes for array in whole.values())
    document = Document(path)
    wanted = BatchPart(rows=[5, 6, 90], some=["tokens", "rollout_logprobs"])
    head, ranges = document.part(wanted)
    sent = head + document.read(ranges)
    assert len(sent) < 7000
    assert np.array_equal(unpack(sent)["tokens"][[5, 6, 90]], whole["tokens"][[5, 6, 90]])
    assert len(ranges) < 8, "neighbouring rows are sent together"


def test_arrays_that_no_lengths_describe_stay_as_they_are() -> None:
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    odd: list[Arrays] = [
        {"tokens": tokens},
        {"tokens": tokens, "lengths": np.array([2, 3], np.int32)},
        {"tokens": tokens, "lengths": np.array([6, 7], np.int32)},
        {"tokens": tokens, "lengths": np.array([6], np.int32)},
        {"tokens": tokens, "lengths": np.array([0.5, 6.0])},
        {"tokens": tokens[:0], "lengths": np.zeros(0, np.int32)},
        {"tokens": tokens, "lengths": np.array([-1, 6], np.int32)},
        {"scores": np.zeros(0, np.float32)},
    ]
    for arrays in odd:
        assert same(unpack(pack(arrays)), arrays)
        head, ranges = Document(pack(arrays)).part(BatchPart())
        assert same(unpack(head + Document(pack(arrays)).read(ranges)), arrays)


def test_a_row_that_there_is_not_and_a_damaged_document_are_refused() -> None:
    packed = pack(batch([1, 2], [3, 4], [1], 0))
    with pytest.raises(ValueError, match="no row 2"):
        Document(packed).part(BatchPart(rows=[2], some=["tokens"]))
    arrays = unpack(packed)
    flat = SampleArrays({**arrays, "tokens": np.zeros(7, np.int32)}, {"tokens": 0})
    with pytest.raises(SafetensorError, match="another number of entries"):
        unpack(b"".join(pieces(flat)))
    with pytest.raises(SafetensorError):
        unpack(packed[:-1])


def test_arrays_of_samples_are_padded_when_they_are_asked_for() -> None:
    whole = batch([1, 2], [3, 0], [2, 1], 7)
    flat, pads = SampleArrays(dict(whole), {}).without_padding()
    held = SampleArrays(flat, pads)
    assert flat["tokens"].shape == (6,)
    assert same({name: held[name] for name in held}, whole)
    held["scores"] = np.ones(2, np.float32)
    held |= {"advantages": np.array([[1, 2, 3], [0, 0, 0]], np.float32)}
    assert same(unpack(pack(held)), {**whole, "scores": held["scores"], "advantages": held["advantages"]})
    del held["tokens"]
    assert "tokens" not in held
    assert len(held) == len(whole)
