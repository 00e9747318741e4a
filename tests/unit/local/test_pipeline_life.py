"""A pipeline whose processes cannot be started says so, and does not wait for them."""

import gc
import time

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.launch.local.launcher import Launcher
from dovetail.local.pipeline import Pipeline
from dovetail.protocol.errors import RunError
from dovetail.protocol.process.extras import MARKS
from helpers.jobs import summary, tiny_job


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


def test_a_missing_extra_is_named_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(MARKS, "rollout-cpu", ("a_module_that_is_not_installed",))
    with pytest.raises(RunError, match=r"needs the extra 'rollout-cpu': pip install 'dovetail-rlhf\[rollout-cpu\]'"):
        Pipeline(tiny_job(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_models_and_data_may_take_longer_to_come_than_a_pipeline_to_end(tmp_path, monkeypatch, caplog):
    """A download has the deadline of spec.hub, an hour by default. It was cut after five minutes, without a word. What
    was open is closed."""

    gc.collect()
    caplog.clear()  # what earlier tests left open

    def slow(*arguments):
        time.sleep(1.0)
        raise DataError("spec.hub: the download ended in its own way")

    monkeypatch.setattr("dovetail.coordinator.loop.engines.prepare", slow)
    monkeypatch.setattr("dovetail.local.pipeline.END_SECONDS", 0.2)
    groups = [{"name": "trainers", "roles": ["trainer"]}]
    with (
        pytest.raises(DataError, match="ended in its own way"),
        Pipeline(tiny_job(stages=["sft"], groups=groups), tmp_path / "run"),
    ):
        pass
    gc.collect()
    assert "Task was destroyed" not in caplog.text
    assert "Unclosed" not in caplog.text


def test_a_failure_after_the_data_is_prepared_is_named(tmp_path, monkeypatch):
    """What the failure left unmade cannot be closed. That must not hide it."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dovetail.coordinator.loop.engines.ModelSources", full)
    groups = [{"name": "trainers", "roles": ["trainer"]}]
    with (
        pytest.raises(OSError, match="No space left"),
        Pipeline(tiny_job(stages=["sft"], groups=groups), tmp_path / "run"),
    ):
        pass
    assert "AttributeError" not in summary(tmp_path / "run")["reason"]
