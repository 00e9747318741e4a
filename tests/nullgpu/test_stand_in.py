"""The null GPU itself (hack/nullgpu): its NCCL waits where NCCL waits, and says what is wrong."""

from __future__ import annotations

import pytest

from helpers.null_gpu import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("unlike_sizes", ("a send of 32 bytes", "a receive of 16 bytes")),
        ("unlike_order", ("a send of 32 bytes", "a receive of 16 bytes")),
        ("unlike_kinds", ("an all-reduce of 32 bytes", "a broadcast of 32 bytes")),
        ("unlike_roots", ("a broadcast of 32 bytes", "root")),
    ],
)
def test_a_mismatch_names_both_ranks(null_gpu: Run, do: str, words: tuple[str, ...]) -> None:
    ended = null_gpu(do, f"nccl.{do}", world=2)
    # Its own error ends a rank, or torch's watchdog that saw the same first.
    assert all(ended.statuses), ended.log
    assert "rank 0 and rank 1 are at odds" in ended.log
    assert all(word in ended.log for word in words), ended.log


def test_a_communicator_waits_for_all_of_its_ranks(null_gpu: Run) -> None:
    early, late = null_gpu("late", "nccl.late", world=2).good()
    came, went_on = late[0], early[1]
    assert went_on >= came


def test_a_hang_says_what_it_waits_for(null_gpu: Run) -> None:
    waits = null_gpu("missing", "nccl.missing", world=2, patience=1).waits
    assert waits == {"0": "rank 0 sets up a communicator of 2 ranks: ranks 0 have come, 1 missing"}
    waits = null_gpu("crossed", "nccl.crossed", world=2, patience=1).waits
    assert "a send of 32 bytes to rank 1" in waits["0"]
    assert "a send of 32 bytes to rank 0" in waits["1"]


@pytest.mark.parametrize(("conf", "reserved"), [("expandable_segments:False", 6.0), ("expandable_segments:True", 5.0)])
def test_memory_is_accounted_for(null_gpu: Run, conf: str, reserved: float) -> None:
    """An expandable segment of 1 GiB grows to 2 GiB; otherwise these get a segment of their own."""
    (found,) = null_gpu(f"accounts-{conf[-4:]}", "memory.accounts", conf=conf).good()
    assert found["gib"] == pytest.approx([5.0, reserved, 79.0 - reserved], abs=0.1)
    assert found["refused"]
    assert found["host"] == 0
