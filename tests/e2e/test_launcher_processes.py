"""The supervisor and both spawners on real processes: restarts, giving up, and leaving nobody behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.launch.liveness import Liveness, LivenessLimits
from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import ExecSpawner, Exited, ForkSpawner, Started
from dovetail.launch.supervisor import JobRestarts, Supervisor
from dovetail.protocol.process.pulse import PULSE
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow

MODULES = {
    # Stays until told; has a child in its session and one in a session of its own, both of which ignore SIGTERM.
    "dv_family": """
        import os, signal, subprocess, sys, time
        def main(argv=None):
            stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            stubborn += "print('up', flush=True); time.sleep(3600)"
            pids = []
            for new in (False, True):
                command = [sys.executable, "-c", stubborn]
                child = subprocess.Popen(command, start_new_session=new, stdout=subprocess.PIPE)
                child.stdout.readline()
                pids.append(child.pid)
            tmp = os.environ["PIDS"] + ".tmp"
            open(tmp, "w").write(" ".join(map(str, [os.getpid(), *pids])))
            os.rename(tmp, os.environ["PIDS"])
            time.sleep(3600)
        """,
    "dv_once": """
        import os, sys
        def main(argv=None):
            print("state of", os.environ["MARK"], "shared" if "dv_preload" in sys.modules else "alone", flush=True)
            print("MKL:", os.environ.get("MKL_CBWR"), flush=True)
            if not os.path.exists(os.environ["MARK"]):
                open(os.environ["MARK"], "w").close()
                os.kill(os.getpid(), 9)
            return 0
        """,
    "dv_bad": """
        def main(argv=None):
            raise RuntimeError("the frobnicator is missing")
        """,
    "dv_fail": """
        import sys
        def main(argv=None):
            print("error: job is hopeless")
            sys.exit(3)
        """,
    "dv_config": """
        import sys
        def main(argv=None):
            sys.exit("no such setting") if False else print("bad setting x", file=sys.stderr)
            return 2
        """,
    "dv_preload": """
        import os
        def preload():
            os.environ["MKL_CBWR"] = "AVX2,STRICT"  # as an import does
        """,
}
# `python -m` runs a module's file, a fork calls its main.
FOOTER = '\nif __name__ == "__main__":\n    import sys\n    sys.exit(main())\n'


@pytest.fixture
def folder(tmp_path):
    for name, body in MODULES.items():
        footer = FOOTER if "def main" in body else ""
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body) + footer)
    return tmp_path


class TestFork(ForkSpawner):
    __test__ = False
    preload = "dv_preload:preload"


@pytest.fixture(params=["exec", "fork"])
def spawner(request, folder):
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    made = (ExecSpawner if request.param == "exec" else TestFork)(env, folder / "spawner.log")
    yield made
    made.close()


def spec(folder: Path, name: str, module: str, **env: object) -> ProcessSpec:
    full = os.environ | {"PYTHONPATH": str(folder)} | {k: str(v) for k, v in env.items()}
    return ProcessSpec(name, module, dict(full), folder / f"{name}.log")


def until(condition, seconds=PATIENCE, what="condition"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)
    return value


def events_until(spawner, wanted, seconds=PATIENCE):
    found = []

    def look():
        found.extend(spawner.poll())
        return any(isinstance(e, wanted) for e in found)

    until(look, seconds, str(wanted))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def family(folder: Path) -> list[int]:
    path = folder / "pids"
    until(path.exists, what="the family's process ids")
    pids = [int(p) for p in path.read_text().split()]
    assert len(pids) == 3
    assert all(alive(p) for p in pids)
    return pids


def gone(pids: list[int], seconds: float = PATIENCE) -> None:
    until(lambda: not any(alive(p) for p in pids), seconds, f"the end of {pids}")


def run_to_end(supervisor: Supervisor, seconds: float = 900.0):
    supervisor.start()
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            outcome = supervisor.step(0.2)
            if outcome is not None:
                return outcome
        raise AssertionError("no outcome")
    finally:
        supervisor.stop(2.0)


def test_a_killed_process_takes_its_descendants_along(spawner, folder):
    spawner.spawn(spec(folder, "a", "dv_family", PIDS=folder / "pids"))
    pids = family(folder)
    assert [e for e in events_until(spawner, Started) if isinstance(e, Started)] == [Started("a", pids[0])]
    os.kill(pids[0], signal.SIGKILL)
    exits = [e for e in events_until(spawner, Exited) if isinstance(e, Exited)]
    assert exits == [Exited("a", -9)]
    assert not any(alive(p) for p in pids)  # already, so that a restart finds its ports free


def test_close_ends_everything(spawner, folder):
    spawner.spawn(spec(folder, "a", "dv_family", PIDS=folder / "pids"))
    pids = [*family(folder), spawner.zygote_pid]
    spawner.close()
    gone(pids)


def test_a_killed_zygote_ends_its_processes_and_is_replaced(spawner, folder):
    spawner.spawn(spec(folder, "a", "dv_family", PIDS=folder / "pids", **{PULSE: folder / "pulse-a"}))
    pids = family(folder)
    os.kill(spawner.zygote_pid, signal.SIGKILL)
    exits = [e for e in events_until(spawner, Exited) if isinstance(e, Exited)]
    assert exits == [Exited("a", -9, lost=True)]
    gone(pids)
    (folder / "pids").unlink()
    spawner.spawn(spec(folder, "a", "dv_family", PIDS=folder / "pids"))
    assert family(folder)[0] != pids[0]


def test_kill_9_of_the_launcher_ends_all(folder):
    script = textwrap.dedent(
        f"""
        import os, sys, time
        from pathlib import Path
        from dovetail.launch.processes import ProcessSpec
        from dovetail.launch.spawn import ExecSpawner, ForkSpawner
        folder = Path({str(folder)!r})
        env = dict(os.environ)
        class Fork(ForkSpawner):
            preload = "dv_preload:preload"
        spawners = [ExecSpawner(env, folder / "s1.log"), Fork(env, folder / "s2.log")]
        for i, s in enumerate(spawners):
            mine = env | {{"PIDS": str(folder / f"pids{{i}}")}}
            s.spawn(ProcessSpec(f"p{{i}}", "dv_family", mine, folder / f"p{{i}}.log"))
        time.sleep(3600)
        """
    )
    env = os.environ | {"PYTHONPATH": str(folder)}
    launcher = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        files = [folder / "pids0", folder / "pids1"]
        until(lambda: all(f.exists() for f in files), what="both families")
        pids = [int(p) for f in files for p in f.read_text().split()]
        assert all(alive(p) for p in pids)
    finally:
        launcher.kill()
        launcher.wait()
    gone(pids)


def test_a_process_that_dies_is_started_again(spawner, folder, monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)  # an import has set it on some processors
    told = []
    supervisor = Supervisor(
        [(spec(folder, "coordinator", "dv_once", MARK=folder / "mark"), spawner)], JobRestarts(3), tell=told.append
    )
    outcome = run_to_end(supervisor)
    assert outcome.succeeded
    assert len(told) == 1
    assert "coordinator died (signal SIGKILL)" in told[0]
    log = (folder / "coordinator.log").read_text()
    assert log.count("state of") == 2
    forked = isinstance(spawner, ForkSpawner)
    assert log.count("shared" if forked else "alone") == 2
    assert log.count(f"MKL: {'AVX2,STRICT' if forked else None}") == 2


@pytest.mark.parametrize("whose", ["process", "child", "spawner"])
def test_what_is_stopped_for_good_is_replaced(spawner, folder, whose):
    """SIGSTOP of a process, of one below it in a session of its own, and of the spawner, which could not tell of it."""
    told = []
    supervisor = Supervisor(
        [(spec(folder, "gen-0", "dv_family", PIDS=folder / "pids"), spawner)],
        JobRestarts(3),
        tell=told.append,
        liveness=Liveness(LivenessLimits(2.0, 600.0, 600.0, 600.0), lambda name: None),
    )
    supervisor.start()
    try:
        until(lambda: supervisor.step(0.1) or (folder / "pids").exists(), what="the first life")
        first = family(folder)
        (folder / "pids").unlink()
        os.kill({"process": first[0], "child": first[2], "spawner": spawner.zygote_pid}[whose], signal.SIGSTOP)
        until(lambda: supervisor.step(0.1) or (folder / "pids").exists(), what="the second life")
        assert not set(first) & set(family(folder))
        gone(first)
    finally:
        supervisor.stop(2.0)
    where = {"process": "killed, as it hung: ", "child": f"killed, as it hung: its process {first[2]} "}
    assert re.search(where.get(whose, "its spawner killed, as it hung: ") + r"stopped for \d+ s", told[0])
    assert len(told) == 1


class Dying(ExecSpawner):
    """Its one process is killed again whenever somebody looks."""

    def start(self) -> None: ...
    def spawn(self, spec) -> None: ...
    def poll(self):
        return [Exited("gen-0", -9)]


def test_restarts_are_counted_by_the_hour(folder):
    """A run that loses a process now and then goes on; one that loses them in quick succession fails."""
    now = [0.0]

    made = Dying({}, folder / "spawner.log")
    supervisor = Supervisor([(spec(folder, "gen-0", "dv_family"), made)], JobRestarts(3), clock=lambda: now[0])
    supervisor.start()
    for _ in range(20):
        assert supervisor.step(0) is None
        now[0] += 1300.0  # three an hour
    now[0] += 4000.0
    assert [supervisor.step(0) for _ in range(3)] == [None] * 3
    outcome = supervisor.step(0)
    assert "gen-0 died (signal SIGKILL) and failurePolicy.maxRestarts, 3 within an hour, is reached" in outcome.reason


@pytest.mark.parametrize(("finishes", "seconds"), [(False, 0.2), (True, 5.0)])
def test_only_what_may_finish_is_left_alone_for_a_while_after_exit_code_0(folder, finishes, seconds):
    """vLLM's server ends with 0 when its engine core has died."""
    now, asked = [0.0], []

    class Ending(ExecSpawner):
        def start(self) -> None: ...
        def spawn(self, spec) -> None:
            asked.append(now[0])

        def poll(self):
            return [Exited("gen-0", 0)] if len(asked) == 1 and not now[0] else []

    process = replace(spec(folder, "gen-0", "dv_family"), finishes=finishes)
    supervisor = Supervisor([(process, Ending({}, folder / "spawner.log"))], JobRestarts(3), clock=lambda: now[0])
    supervisor.start()
    while len(asked) < 2:
        supervisor.step(0)
        now[0] += 0.1
    assert asked[1] == pytest.approx(seconds, abs=0.11)


def test_the_delay_of_a_restart_has_a_limit_after_any_number_of_them(folder):
    now = [0.0]

    made = Dying({}, folder / "spawner.log")
    supervisor = Supervisor([(spec(folder, "gen-0", "dv_family"), made)], JobRestarts(2000), clock=lambda: now[0])
    supervisor.start()
    for _ in range(1100):
        assert supervisor.step(0) is None
        now[0] += 5.0


def test_giving_up_names_process_code_and_last_line(spawner, folder):
    supervisor = Supervisor(
        [
            (spec(folder, "coordinator", "dv_family", PIDS=folder / "pids"), spawner),
            (spec(folder, "trainer-0", "dv_bad"), spawner),
        ],
        JobRestarts(2),
    )
    outcome = run_to_end(supervisor)
    assert not outcome.succeeded
    assert "trainer-0 died (exit code 1)" in outcome.reason
    assert "maxRestarts, 2 within" in outcome.reason
    assert "RuntimeError: the frobnicator is missing" in outcome.reason
    gone([int(p) for p in (folder / "pids").read_text().split()] if (folder / "pids").exists() else [])


def test_a_failed_coordinator_is_not_restarted(spawner, folder):
    told = []
    supervisor = Supervisor([(spec(folder, "coordinator", "dv_fail"), spawner)], JobRestarts(5), tell=told.append)
    outcome = run_to_end(supervisor)
    assert not outcome.succeeded
    assert outcome.reason == "error: job is hopeless"
    assert told == []


def test_exit_code_2_is_not_restarted(spawner, folder):
    outcome = run_to_end(
        Supervisor(
            [
                (spec(folder, "coordinator", "dv_family", PIDS=folder / "pids"), spawner),
                (spec(folder, "big-0", "dv_config"), spawner),
            ],
            JobRestarts(5),
        )
    )
    assert outcome.reason.startswith("big-0 cannot run (exit code 2); it said last: bad setting x")


def test_a_preload_that_fails_is_reported(folder):
    class Broken(ForkSpawner):
        preload = "no_such_module:preload"

    env = os.environ | {"PYTHONPATH": str(folder)}
    broken = Broken(env, folder / "spawner.log")
    outcome = run_to_end(
        Supervisor([(spec(folder, "coordinator", "dv_once", MARK=folder / "m"), broken)], JobRestarts(1))
    )
    assert not outcome.succeeded
    assert "ModuleNotFoundError: No module named 'no_such_module'" in outcome.reason
