"""`make bench-gpu` runs to its end, with what docs/gpus.md says that it needs and nothing else. On the null GPU its
figures mean nothing."""

from __future__ import annotations

import pytest

from helpers.null_gpu import Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_every_group_runs_to_its_end(null_gpu: Run) -> None:
    ended = null_gpu("bench", "bench.every_group")
    logs = "\n".join(path.read_text()[-5000:] for path in sorted((ended.folder / "logs").glob("*.log")))
    (found,) = ended.good()
    groups = found["groups"]
    assert found["code"] == 0, ended.log + logs
    assert {name: group["state"] for name, group in groups.items()} == dict.fromkeys(groups, "done")
    skipped = {line["name"] for group in groups.values() for line in group["skipped"]}
    formula = {f"{name}'s passes, planner's formula" for name in ("actor", "critic")}  # it does not know the null GPU
    assert skipped == {"job", "quickstart", "vLLM's sleep and wake", *formula}
    for name, group in groups.items():
        if name not in ("device", "job", "quickstart"):
            assert any(figure["beside"] is not None for figure in group["figures"]), f"{name} has no anchor"
