"""How the allocators are set up: torch's on CUDA, and malloc."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.protocol.process.inheritance import use_expandable_segments

# As a training step does: many tensors, all freed before the next step.
STEPS = """
import os, resource
from dovetail.protocol.process.inheritance import keep_freed_memory
keep_freed_memory({given})
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(10):
    held = [bytearray(b"x") * (2 << 20) for _ in range(10)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_settings_win(name: str) -> None:
    environ: dict[str, str] = {}
    use_expandable_segments(environ)
    assert environ == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    given = {name: "backend:cudaMallocAsync"}
    use_expandable_segments(given)
    assert given == {name: "backend:cudaMallocAsync"}


def test_freed_memory_is_used_again_by_the_next_step() -> None:
    kept, users = (
        int(subprocess.check_output([sys.executable, "-c", STEPS.format(given=given)], env={}))
        for given in ({}, {"MALLOC_ARENA_MAX": "1"})
    )
    assert kept < users / 4  # a user's own settings win: then it is as without the call
