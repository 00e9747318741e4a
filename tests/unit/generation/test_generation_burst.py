"""Thousands of samples at once: requests begin in bursts, and none waits for longer than the next look."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.coordinator.samples import drawing
from helpers.generation_job import Job, play


@pytest.mark.parametrize("burst", [1, 8, 16, 17])
def test_samples_beyond_a_burst_follow_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, burst: int) -> None:
    monkeypatch.setattr(drawing, "BURST", burst)
    placed: list[int] = []
    place = drawing.place

    def counted(count: int, *rest: object) -> list[str]:
        chosen = place(count, *rest)  # type: ignore[arg-type]
        placed.append(len(chosen))
        return chosen

    monkeypatch.setattr(drawing, "place", counted)

    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        await job.generate()
        job.check()
        job.reported_once()
        assert len(server.requests) == 16
        assert max(placed) == min(burst, 16)
        assert sum(placed) == 16
        # The looks that begin requests come one after another, with none between that only waits.
        assert placed[: -(-16 // burst)].count(0) == 0

    play(tmp_path, scenario)
