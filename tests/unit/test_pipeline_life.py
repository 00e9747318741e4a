"""A pipeline whose processes cannot be started says so, and does not wait for them."""

import pytest

from dovetail.local.launcher import Launcher
from dovetail.local.pipeline import Pipeline
from dovetail.supervision.errors import RunError
from helpers.jobs import summary, tiny_job


@pytest.mark.timeout(300)
def test_processes_that_cannot_be_started_end_the_call(tmp_path, monkeypatch):
    def start(self):
        raise BrokenPipeError("the forkserver is gone")

    monkeypatch.setattr(Launcher, "start", start)
    groups = [{"name": "trainers", "roles": ["trainer"]}]
    with (
        pytest.raises(RunError, match="the forkserver is gone"),
        Pipeline(tiny_job(stages=["sft"], groups=groups), tmp_path / "run") as pipeline,
    ):
        pipeline.run_sft()
    assert "the forkserver is gone" in summary(tmp_path / "run")["reason"]
