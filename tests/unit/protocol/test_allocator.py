"""How torch's CUDA allocator is set up."""

from __future__ import annotations

import pytest

from dovetail.protocol.process.inheritance import use_expandable_segments


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_settings_win(name: str) -> None:
    environ: dict[str, str] = {}
    use_expandable_segments(environ)
    assert environ == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    given = {name: "backend:cudaMallocAsync"}
    use_expandable_segments(given)
    assert given == {name: "backend:cudaMallocAsync"}
