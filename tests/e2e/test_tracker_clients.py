"""Trackers through their real clients, offline: what is in their own stores afterwards.

The clients are heavy, so they are in no lock. They are installed into a folder of the cache."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.reporting.trackers.tracker_processes import TrackerProcesses
from dovetail.manifest.types import RLHFJobSpec
from helpers.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
CLIENTS = ("wandb==0.31.0", "trackio==0.43.0", "mlflow-skinny==3.17.2")
RUN = "0123456789abcdef"
REWARDS = {1: 0.5, 2: 1.0, 3: 1.5}


@pytest.fixture(scope="module")
def clients() -> Path:
    """The folder with all of them."""
    folder = Path.home() / ".cache" / "dovetail" / "-".join(["tracker-clients", *CLIENTS])
    if not (folder / "done").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "pip", "install", "--quiet", "--target", folder, *CLIENTS], check=True, timeout=PATIENCE)
        (folder / "done").touch()
    return folder


@pytest.fixture
def told(tmp_path: Path, clients: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a job's trackers over a finished history, twice, as a coordinator that was restarted does."""

    def run(kind: str, url: str | None = None) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(clients), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.syspath_prepend(str(clients))
        tracker = {"kind": kind, "project": "lab", "name": "sums", "url": url}
        groups = [{"name": "a", "roles": ["trainer"]}]
        spec = RLHFJobSpec.model_validate({"groups": groups, "trackers": [tracker], "ppo": {"kl": {"coef": 0.125}}})
        for steps in ((1, 2), (3,)):
            with (tmp_path / "history.jsonl").open("a") as file:
                for step in steps:
                    metrics = {"reward": REWARDS[step], "reward/ä (é)": REWARDS[step], "reward/len": REWARDS[step]}
                    row = {"stage": "ppo", "step": step, "time": 1e9 + step, "metrics": metrics}
                    file.write(json.dumps(row) + "\n")
            (tmp_path / "summary.json").write_text('{"state": "succeeded"}')
            assert asyncio.run(follow(spec)) == []

    async def follow(spec: RLHFJobSpec) -> list[Any]:
        logged: list[Any] = []
        trackers = TrackerProcesses(spec, tmp_path, RUN, lambda event, **more: logged.append((event, more)))
        trackers.start()
        await trackers.close(300.0)
        return logged

    return run


def test_mlflow(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "mlflow"
    told("mlflow", store.as_uri())
    metrics = list(store.glob("*/*/metrics/ppo/*"))
    assert len(metrics) == 3
    for metric in metrics:
        rows = [line.split() for line in metric.read_text().splitlines()]
        assert {int(step): float(value) for _, value, step in rows} == REWARDS
    run = metric.parents[2]
    assert (run / "params" / "ppo.kl.coef").read_text() == "0.125"
    assert (run / "tags" / "dovetail.run").read_text() == RUN


def test_trackio(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    told("trackio")
    with sqlite3.connect(tmp_path / "trackio" / "lab.db") as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in rows} == {"sums"}
    assert {step: json.loads(metrics)["ppo/reward"] for _, step, metrics in rows} == REWARDS


def test_wandb(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    told("wandb")
    files = sorted((tmp_path / "trackers" / "wandb").glob(f"offline-run-*-{RUN}/run-{RUN}.wandb"))
    assert files, "what `wandb sync` uploads"
    assert all(b"ppo/reward" in path.read_bytes() for path in files)
    assert any(b"ppo" in path.read_bytes() and b"0.125" in path.read_bytes() for path in files)
