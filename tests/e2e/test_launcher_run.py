"""`dovetail run` as a process of its own, with stand-ins for the job's programs: Ctrl-C, kill -9, resuming."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.protocol.process.endings import JOB_FAILED
from helpers.finished_runs import report_answers
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow

# Each stand-in says who it is, starts a grandchild that ignores SIGTERM, and stays; the coordinator follows orders.
PROGRAM = """
import os, subprocess, sys, time
def main(argv=None):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn])
    name, folder = os.environ["DOVETAIL_NAME"], os.environ["DOVETAIL_RUN_DIR"]
    with open(os.path.join(folder, "pids-" + name), "a") as file:
        file.write(f"{os.getpid()} {child.pid} {os.environ['DOVETAIL_PORT']}\\n")
    while True:
        order = os.path.join(folder, "order-" + name)
        if os.path.exists(order):
            text = open(order).read().strip()
            if text:
                return int(text)
        time.sleep(0.02)
if __name__ == "__main__":
    sys.exit(main())
"""
COMMAND = """
import os, sys
import dovetail.launch.local.launcher as launcher, dovetail.launch.spawn as spawn
launcher.GRACE_SECONDS = float(os.environ["TEST_GRACE"])
original = launcher.render
def render(*args, **options):
    specs = original(*args, **options)
    return [type(s)(s.name, "dv_program", s.env, s.log, s.shares_imports) for s in specs]
launcher.render = render
spawn.ForkSpawner.preload = "dv_preload:preload"
from dovetail.cli.main import main
sys.argv[0] = "dovetail"
main()
"""
NAMES = ["coordinator", "trainer-0", "gen-0", "gen-0-scorer"]


class Run:
    """A `dovetail run` in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.dir = folder, kind, folder / "run"
        (folder / "dv_program.py").write_text(PROGRAM)
        (folder / "dv_preload.py").write_text("def preload():\n    pass\n")
        (folder / "command.py").write_text(COMMAND)
        job = {
            "apiVersion": "dovetail.dev/v1beta1",
            "kind": "RLHFJob",
            "metadata": {"name": "t"},
            "spec": {
                "models": {"actor": {"source": {"scratch": {}}}, "tokenizer": {"train": {}}},
                "data": {k: [{"synthetic": {}}] for k in ("demonstrations", "preferences", "prompts")},
                "failurePolicy": {"maxRestarts": 3},
                "groups": [{"name": "train", "roles": ["trainer"]}, {"name": "gen", "roles": ["rollout"]}],
            },
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str, grace: float = 5.0) -> None:
        """`grace`: for how many seconds the processes may end by themselves."""
        for old in self.dir.glob("pids-*"):
            old.unlink()
        env = os.environ | {"PYTHONPATH": str(self.folder), "DOVETAIL_SPAWN": self.kind, "OMP_NUM_THREADS": "1"}
        env["TEST_GRACE"] = str(grace)
        arguments = ["run", str(self.folder / "job.yaml"), "--run-dir", str(self.dir), *more]
        self.process = subprocess.Popen(
            [sys.executable, str(self.folder / "command.py"), *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lives(self, name: str) -> list[tuple[int, int, int]]:
        path = self.dir / f"pids-{name}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if len(line.split()) == 3]

    def wait_for(self, name: str, life: int = 1) -> tuple[int, int, int]:
        until(lambda: len(self.lives(name)) >= life or self.ended(), f"life {life} of {name}")
        assert len(self.lives(name)) >= life, self.process.stdout.read()
        return self.lives(name)[life - 1]

    def ended(self) -> bool:
        return self.process.poll() is not None

    def all_pids(self) -> list[int]:
        return [pid for name in NAMES for life in self.lives(name) for pid in life[:2]]

    def order(self, name: str, code: int) -> None:
        (self.dir / f"order-{name}").write_text(str(code))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def end(self, seconds: float = PATIENCE) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


def until(condition, what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(pids: list[int], seconds: float = PATIENCE) -> None:
    assert pids
    until(lambda: not any(map(alive, pids)), f"the end of {[p for p in pids if alive(p)]}", seconds)


EITHER_WAY = pytest.mark.parametrize(
    "run", ["fork", pytest.param("exec", marks=pytest.mark.nightly)], indirect=True
)  # of what does not depend on how processes are started


@pytest.fixture(params=["exec", "fork"])
def run(request, tmp_path):
    made = Run(tmp_path, request.param)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_ctrl_c_ends_everything_and_resume_continues(run):
    run.start()
    for name in NAMES:
        run.wait_for(name)
    token = (run.dir / "token").read_text()
    pids = run.all_pids()
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.end()
    assert code == 130
    assert "--resume" in output
    assert run.summary()["state"] == "interrupted"
    assert report_answers(run.dir)["overview"]["state"] == "interrupted"
    all_gone(pids)

    run.start()
    code, output = run.end()
    assert code == 2
    assert "holds an earlier run; continue it with --resume" in output

    run.start("--resume")
    for name in NAMES:
        run.wait_for(name)
    assert (run.dir / "token").read_text() == token
    (run.dir / "summary.json").write_text(json.dumps({"state": "succeeded", "wall_seconds": 1.0}))
    pids = run.all_pids()
    run.order("coordinator", 0)
    code, output = run.end()
    assert code == 0, output
    assert "Wall time" in output
    assert (run.dir / "report.html").exists()
    all_gone(pids)


def test_a_second_ctrl_c_does_not_wait(run):
    run.start(grace=3600.0)
    for name in NAMES:
        run.wait_for(name)
    pids = run.all_pids()
    os.kill(run.wait_for("trainer-0")[0], signal.SIGSTOP)  # won't end on SIGTERM
    os.kill(run.process.pid, signal.SIGINT)
    until(lambda: not alive(run.wait_for("coordinator")[0]), "the first processes to end")
    os.kill(run.process.pid, signal.SIGINT)
    code, _ = run.end()
    assert code == 130
    all_gone(pids)


def test_kill_9_of_the_launcher_ends_everything(run):
    run.start()
    for name in NAMES:
        run.wait_for(name)
    pids = run.all_pids()
    run.process.kill()
    all_gone(pids)


def test_dead_processes_come_back_on_their_ports_until_there_were_too_many(run):
    run.start()
    first = run.wait_for("coordinator")
    for name in NAMES:
        run.wait_for(name)
    for life, name in enumerate(["coordinator", "coordinator"], start=1):
        pid, grandchild, _ = run.wait_for(name, life)
        os.kill(pid, signal.SIGKILL)
        again = run.wait_for(name, life + 1)
        assert again[2] == first[2]
        assert not alive(grandchild)
    os.kill(run.wait_for("gen-0")[0], signal.SIGKILL)
    os.kill(run.wait_for("gen-0", 2)[0], signal.SIGKILL)
    code, output = run.end()
    assert code == 1
    assert "gen-0 died (signal SIGKILL) and failurePolicy.maxRestarts, 3 within an hour, is reached" in output
    assert len(re.findall("starting it again", output)) == 3
    assert run.summary()["state"] == "failed"
    assert run.summary()["reason"].startswith("gen-0 died (signal SIGKILL) and failurePolicy.maxRestarts")
    assert "gen-0 died" in report_answers(run.dir)["overview"]["reason"]
    all_gone(run.all_pids())


@EITHER_WAY
def test_a_failed_coordinator_fails_the_run_with_its_reason(run):
    run.start()
    run.wait_for("coordinator")
    (run.dir / "summary.json").write_text(json.dumps({"state": "failed", "reason": "line 7 of data.jsonl is empty"}))
    run.order("coordinator", JOB_FAILED)
    code, output = run.end()
    assert code == 1
    assert "Error: the run failed: line 7 of data.jsonl is empty" in output
    assert run.summary()["reason"] == "line 7 of data.jsonl is empty"
    assert "line 7 of data.jsonl is empty" in report_answers(run.dir)["overview"]["reason"]


@EITHER_WAY
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_full_disk_of_logs_is_told_and_is_the_cause_of_a_failure(run):
    logs = run.dir / "logs"
    logs.mkdir(parents=True)
    # A disk of one page, which no file but the first can write to. A folder with files would be refused.
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", logs]).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        run.start()
        run.wait_for("coordinator")
        run.order("coordinator", JOB_FAILED)
        code, output = run.end()
    finally:
        subprocess.run(["umount", "--lazy", logs], check=True)
    assert code == 1
    assert f"Warning: the disk that holds {logs} is full; free some space" in output
    assert f"Error: the run failed: the disk that holds {logs} is full; free some space, then continue" in output
    assert run.summary()["reason"].startswith(f"the disk that holds {logs} is full")


@EITHER_WAY
def test_two_runs_do_not_share_a_directory(run):
    run.start()
    run.wait_for("coordinator")
    env = os.environ | {"PYTHONPATH": str(run.folder), "DOVETAIL_SPAWN": run.kind, "TEST_GRACE": "5"}
    arguments = ["run", str(run.folder / "job.yaml"), "--run-dir", str(run.dir), "--resume"]
    result = subprocess.run(
        [sys.executable, str(run.folder / "command.py"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 2
    assert "another dovetail run is using" in result.stderr
    assert alive(run.wait_for("coordinator")[0])


@EITHER_WAY
def test_a_run_ends_after_its_deadline_in_all_its_resumes(run):
    run.start("--set", "spec.activeDeadlineSeconds=2")
    code, output = run.end()
    assert code == 1
    assert "activeDeadlineSeconds is not executed" not in output
    assert "took longer than spec.activeDeadlineSeconds, 2 s" in output
    assert "activeDeadlineSeconds" in run.summary()["reason"]
    run.start("--set", "spec.activeDeadlineSeconds=2", "--resume")
    code, output = run.end()
    assert (code, "activeDeadlineSeconds, 2 s" in output) == (1, True), "its time was up before"
    run.start("--set", "spec.activeDeadlineSeconds=1000", "--resume")
    run.wait_for("coordinator")
    run.order("coordinator", 0)
    assert "took longer" not in run.end()[1]


@EITHER_WAY
def test_a_token_file_without_a_token_is_named_before_anything_starts(run):
    run.start()
    run.wait_for("coordinator")
    run.process.send_signal(signal.SIGINT)
    run.end()
    for content in ("", "ä"):
        (run.dir / "token").write_text(content)
        lives = len(run.lives("coordinator"))
        run.start("--resume")
        code, output = run.end()
        assert code == 2, content
        assert f"token file, {run.dir / 'token'}, " in output
        assert len(run.lives("coordinator")) in (0, lives)
    (run.dir / "token").unlink()
    run.start("--resume")
    run.wait_for("coordinator")
