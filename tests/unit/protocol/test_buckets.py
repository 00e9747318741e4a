"""Bucket plans: every tensor once, in order, aligned, layers whole where they fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.weights.buckets import ALIGNMENT, TensorSpec, aligned, bucket_specs, layer_of, plan_buckets

SPECS = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.integers(0, 3),
    ),
    max_size=30,
).map(
    lambda rows: [
        TensorSpec(f"model.layers.{layer}.m{i}.w" if layer else f"top{i}.w", dtype, shape)
        for i, (dtype, shape, layer) in enumerate(rows)
    ]
)


@given(specs=SPECS, limit=st.integers(16, 2000))
def test_every_tensor_is_sent_once_in_order_and_nothing_overlaps(specs: list[TensorSpec], limit: int) -> None:
    plan = plan_buckets(specs, limit)
    assert [spec for bucket in plan for spec in bucket_specs(bucket)] == specs
    for bucket in plan:
        assert bucket.nbytes % ALIGNMENT == 0
        assert bucket.nbytes <= limit or len(bucket.names) == 1
        end = 0
        for spec, offset in zip(bucket_specs(bucket), bucket.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + spec.nbytes
        assert end <= bucket.nbytes


@given(specs=SPECS, limit=st.integers(16, 2000))
def test_neighbouring_buckets_could_not_have_been_one(specs: list[TensorSpec], limit: int) -> None:
    plan = plan_buckets(specs, limit)
    for one, two in pairwise(plan):
        first = two.names[0]
        unit = sum(
            aligned(s.nbytes) for s in bucket_specs(two) if layer_of(first) and layer_of(s.name) == layer_of(first)
        )
        assert one.nbytes + max(unit, aligned(bucket_specs(two)[0].nbytes)) > limit


def layers(count: int, width: int) -> list[TensorSpec]:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return [TensorSpec(f"model.layers.{n}.{part}.weight", "float32", (width,)) for n in range(count) for part in parts]


def test_a_layer_stays_whole_if_it_fits() -> None:
    for bucket in plan_buckets(layers(7, 16), 12 * 64):
        assert len({layer_of(name) for name in bucket.names}) * 5 == len(bucket.names)


def test_projections_that_receivers_fuse_stay_together_if_the_layer_does_not_fit() -> None:
    for bucket in plan_buckets(layers(3, 16), 3 * 64):
        kinds = {name.split(".")[3] for name in bucket.names}
        assert kinds in ({"self_attn"}, {"mlp"})
        assert len(bucket.names) == (3 if kinds == {"self_attn"} else 2)


def test_a_tensor_above_the_limit_gets_a_bucket_of_its_own() -> None:
    plan = plan_buckets([TensorSpec("a", "float32", (4,)), TensorSpec("big", "float32", (999,))], 64)
    assert [b.names for b in plan] == [["a"], ["big"]]
    assert plan[1].nbytes == 4000


@pytest.mark.parametrize(
    ("specs", "limit", "word"),
    [
        ([TensorSpec("a", "float32", (1,)), TensorSpec("a", "float32", (1,))], 64, "a appears twice"),
        ([TensorSpec("a", "complex64", (1,))], 64, "complex64"),
        ([], 8, "bucket_bytes"),
    ],
)
def test_what_cannot_be_planned_is_said(specs: list[TensorSpec], limit: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        plan_buckets(specs, limit)
