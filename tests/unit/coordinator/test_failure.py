"""What a failed run leaves: one sentence, summary.json and report.html, on a full disk too."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError, causes
from dovetail.coordinator.data.sources import load
from dovetail.coordinator.loop.failure import sentence
from dovetail.coordinator.main import TERMINATION_BYTES, final_figures
from dovetail.coordinator.reporting.results import Results, write_final_summary
from dovetail.coordinator.reporting.telemetry import MetricsHistory
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.store import Store
from dovetail.launch.local.aftermath import DiskWatch, full_disk, reserve, with_cause, write_results
from dovetail.launch.supervisor import Outcome
from dovetail.manifest.types import DataSource, Stage
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.eventlog import EventLog
from dovetail.protocol.files.durable import write_json
from dovetail.protocol.process.endings import JOB_FAILED
from dovetail.protocol.process.env import ProcessEnv
from helpers.finished_runs import history_of, report_answers
from helpers.jobs import tiny_job
from helpers.patience import PATIENCE

FULL = OSError(errno.ENOSPC, "No space left on device")


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FULL, "the disk that holds /run is full; free some space, then resume the run"),
        (OSError(errno.ENOSPC, "No space", "/run/x"), "the disk that holds /run/x is full; free"),
        (raised(RuntimeError("a part failed"), FULL), "the disk that holds /run is full; free"),
        (
            ExceptionGroup("both", [ValueError("x"), raised(KeyError(1), FULL)]),
            "the disk that holds /run is full; free",
        ),
        (StoreError("the store is damaged"), "the store is damaged"),
        (OSError("port 8000 is taken"), "port 8000 is taken"),
        (raised(KeyError("score")), "KeyError: 'score' (test_failure.py, line "),
        (raised(AssertionError()), "AssertionError (test_failure.py, line "),
    ],
)
def test_the_cause_is_one_sentence(error: Exception, told: str) -> None:
    found = sentence(error, Path("/run"))
    assert found.startswith(told)
    assert "\n" not in found


def some_work(run_dir: Path) -> Store:
    """A store as two iterations leave it."""
    store = Store(run_dir)
    results = Results(store, run_dir, 7)
    results.fact("sft.loss_after", 1.5)
    results.add_iteration(16, 4.0, {"generation": 3.0})
    store.put_all({"sft/step": 16, "ppo/progress": {"step": 2, "kl_coef": 0.1}, "job/seconds": 31.5})
    return store


@pytest.mark.parametrize("name", ["bad.jsonl", "empty.jsonl"])
def test_the_cause_of_a_bad_file_is_named_at_once(tmp_path: Path, name: str) -> None:
    """The error and what `datasets` made of it name each other."""
    (tmp_path / name).write_text('{"prompt": "a"}\n[]\n' if name == "bad.jsonl" else "\n")
    options: Any = {"field": "spec.data.prompts[0]", "base_dir": tmp_path, "cache_dir": tmp_path / "cache", "seed": 0}
    with pytest.raises(DataError) as error:
        load(DataSource(path=name), "prompts", **options)
    assert sentence(error.value, tmp_path).startswith(f"{tmp_path / name}")
    first, second = ValueError("first"), OSError(errno.EIO, "second")
    first.__cause__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]
    assert sentence(first, tmp_path) == "first"


def test_a_killed_coordinators_summary_is_made_of_its_store(tmp_path: Path) -> None:
    store = some_work(tmp_path)  # never closed: its last transactions are in the log only
    (tmp_path / "job.json").write_text(tiny_job().model_dump_json(by_alias=True))
    history = MetricsHistory(tmp_path)
    history.add(Stage.PPO, 2, {"reward": 0.5})
    history.close()
    write_results(tmp_path, Outcome(False, "gen-0 died <often>"))
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "sft": {"loss_after": 1.5},
        "state": "failed",
        "reason": "gen-0 died <often>",
        "wall_seconds": 31.5,
        "progress": {"stage": "ppo", "done": 2},
        "samples_per_second": 4.0,
        "phases": {"generation": 3.0},
        "seed": 3,
    }
    shown = report_answers(tmp_path)["overview"]
    assert (shown["state"], shown["reason"], shown["stage"], shown["done"]) == (
        "failed",
        "gen-0 died <often>",
        "ppo",
        2,
    )
    store.close()


def test_what_the_coordinator_said_of_its_failure_stays(tmp_path: Path) -> None:
    write_final_summary(tmp_path, "failed", "line 7 is empty")
    write_results(tmp_path, Outcome(False, "the coordinator died"))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"state": "failed", "reason": "line 7 is empty"}
    assert report_answers(tmp_path)["overview"]["reason"] == "line 7 is empty"


@pytest.mark.parametrize("damage", [b"", b"no database"])
def test_a_store_that_cannot_be_read_is_no_reason_to_leave_nothing(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "store.sqlite").write_bytes(damage)
    (tmp_path / "history.jsonl").write_bytes(b'\xff\xfe{"stage"')
    write_results(tmp_path, Outcome(False, "interrupted", interrupted=True))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"state": "interrupted"}
    assert report_answers(tmp_path)["overview"]["state"] == "interrupted"


def test_wall_time_adds_up_over_restarts_and_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = [100.0]
    jumping = iter([2e9, 5.0, 1e9, 3e9, 7.0] * 20)
    monkeypatch.setattr(time, "time", lambda: next(jumping))
    for expected in (10.0, 20.0):
        store = Store(tmp_path)
        results = Results(store, tmp_path, 0, lambda: steady[0])
        steady[0] += 10.0
        results.note_time()
        assert results.write("failed")["wall_seconds"] == expected
        store.close()
        steady[0] = 1.0  # of the next boot
    store = Store(tmp_path)
    assert 20.0 <= Results(store, tmp_path, 0).write("failed")["wall_seconds"] < 80.0
    store.close()


def test_a_log_on_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        log = EventLog("coordinator", Path("/dev/full"), stream=full)
        log("a.b", x=1)
        log.close()
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_line_that_a_full_disk_cut_off_spoils_no_other(tmp_path: Path) -> None:
    for _ in range(2):
        history = MetricsHistory(tmp_path)
        history.add(Stage.PPO, 1, {"reward": 1.0})
        history.close()
        with (tmp_path / "history.jsonl").open("a") as file:
            file.write('{"stage": "ppo", "st')
    assert history_of(tmp_path) == {"ppo": {1: {"reward": 1.0}}}


def test_the_last_figures_fit_into_a_pods_last_word() -> None:
    verdicts = [{"reason": "X", "message": "y" * 500}] * 7
    metrics = {f"metric_{k}": k + 0.123456789 for k in range(60)} | {"reward": 1.0}
    text = final_figures({"stage": "ppo", "metrics": metrics, "health": {"iteration": 1, "verdicts": verdicts}})
    assert len(text) <= TERMINATION_BYTES
    kept: dict[str, Any] = json.loads(text)
    assert (kept["metrics"], len(kept["health"]["verdicts"])) == ({"reward": 1.0}, 1)


# ---------------------------------------------------------------- a small disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MiB. Needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", folder]).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Take all room but `leave` bytes."""
    path, block = folder / "filler", bytes(4096)
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                if file.write(block) < len(block):
                    break
            except OSError:
                break
        file.truncate(max(0, file.tell() - leave))
    return path


def test_a_full_disk_is_the_cause_whoever_failed(disk: Path, tmp_path: Path) -> None:
    died = Outcome(False, "trainer-0 died")
    assert with_cause(died, (disk,)) == died
    write_json(disk / "summary.json", {"state": "old"})
    filler = fill(disk)
    assert full_disk((tmp_path, disk)) == disk
    told = f"the disk that holds {disk} is full; free some space, then continue with --resume (last: trainer-0 died)"
    assert with_cause(died, (tmp_path, disk)) == Outcome(False, told)
    assert with_cause(Outcome(True), (disk,)) == Outcome(True)
    with pytest.raises(OSError, match=r"No space left on device: '.*summary.json'"):
        write_json(disk / "summary.json", {"state": "failed", "reason": "x" * 100_000})
    assert json.loads((disk / "summary.json").read_text()) == {"state": "old"}
    assert not (disk / "summary.tmp").exists()
    write_results(disk, died)  # raises nothing
    filler.unlink()


def test_a_run_keeps_room_for_its_last_words(disk: Path) -> None:
    reserve(disk)
    fill(disk)
    write_results(disk, with_cause(Outcome(False, "the disk that holds store.sqlite is full"), (disk,)))
    told = f"the disk that holds {disk} is full; free some space, then continue with --resume"
    assert json.loads((disk / "summary.json").read_text()) == {"state": "failed", "reason": told}
    assert report_answers(disk)["overview"]["reason"] == told


def test_a_disk_that_is_full_is_told_once(disk: Path) -> None:
    told: list[str] = []
    now = [0.0]
    watch = DiskWatch((disk,), told.append, lambda: now[0])
    for filled in (False, True, True, False, True):
        filler = fill(disk) if filled else None
        watch.look()
        watch.look()
        now[0] += 10.0
        if filler is not None:
            filler.unlink()
    assert told == [f"Warning: the disk that holds {disk} is full; free some space"] * 2


@pytest.mark.slow
def test_a_coordinator_on_a_full_disk_says_so_and_ends(disk: Path, tmp_path: Path) -> None:
    job = tiny_job()
    (disk / "job.json").write_text(job.model_dump_json(by_alias=True))
    (disk / "plan.json").write_text(make_plan(job.spec).model_dump_json(by_alias=True))
    env = ProcessEnv(
        job="tiny",
        name="coordinator",
        run_dir=disk,
        coordinator="http://127.0.0.1:1",
        token="secret",
        host="127.0.0.1",
        port=0,
        metrics_port=0,
        group="",
        rank=0,
        world_size=1,
    )
    fill(disk, leave=64 * 1024)  # the store begins; the data and its tokenizer do not fit
    with (disk / "coordinator.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "dovetail.coordinator.main"],
            env=os.environ | env.write() | {"OMP_NUM_THREADS": "1"},
            stderr=log,
            timeout=PATIENCE,
        )
    assert ended.returncode == JOB_FAILED, "failed, and no restart would help"
    outcome = with_cause(Outcome(False, "x"), (disk,))
    assert outcome.reason.startswith(f"the disk that holds {disk} is full")
