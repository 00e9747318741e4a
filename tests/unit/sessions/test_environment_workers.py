"""Environments in worker processes: what dies, hangs or attacks there costs an episode at most."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.coordinator.sessions.effects import EpisodeLost, Failed, ToolCall, observe
from dovetail.coordinator.sessions.environment_workers import (
    EnvironmentCode,
    EnvironmentWorkers,
)
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.store.tool_calls import CallKey
from dovetail.coordinator.user_code.local_process import LocalProcesses
from dovetail.coordinator.user_code.sandbox import FILE_BYTES, PROCESSES, Sandbox, _machine_problem
from dovetail.protocol.process.env import TOKEN
from helpers.cluster import wait_for
from helpers.patience import PATIENCE

CODE = '''
import asyncio, ctypes, os, pathlib, subprocess, sys, time

LOG = pathlib.Path(__file__).with_name("log")


class Counter:
    """A number that grows. Each call is written to a file."""

    def reset(self, start: int = 0) -> str:
        self.value = start
        self.note("reset")
        return f"It is {start}."

    def note(self, what: str) -> str:
        """Note.

        Args:
            what: The note.
        """
        with LOG.open("a") as file:
            file.write(f"{os.getpid()} {what}\\n")
        return "noted"

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: What is added.
        """
        self.note(f"add {number}")
        self.value += number
        return str(self.value)

    def end(self, how: str) -> str:
        """End the process.

        Args:
            how: The way.
        """
        self.note(how)
        if how == "exit":
            os._exit(7)
        if how == "crash":
            ctypes.string_at(0)
        if how == "hang":
            time.sleep(3600)
        if how == "raise":
            raise ConnectionError("503 from the shop")
        if how == "garbage":
            for number in range(3, 20):
                try:
                    os.write(number, b"{garbage" * 2 + b"\\n")
                except OSError:
                    pass
            time.sleep(3600)
        if how == "once" and "once" not in pathlib.Path(LOG).read_text().replace("once", "", 1):
            os._exit(9)
        return "ended"

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(0)
        return "waited"

    def clock(self) -> str:
        """Tell the time."""
        return str(time.time_ns())

    def get_reward(self) -> float:
        return self.value / 10


class Shell:
    """What a model may do that writes its own programs."""

    def reset(self) -> None: ...

    def run(self, program: str) -> str:
        """Run a program.

        Args:
            program: Python.
        """
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return done.stdout + done.stderr[-2000:]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    tmp_path.chmod(0o755)
    return tmp_path


def workers_of(folder: Path, name: str = "Counter", **options: Any) -> EnvironmentWorkers:
    given = {"workers": 1, "seconds": 120.0, "repeatable": True, "place": LocalProcesses()} | options
    return EnvironmentWorkers(EnvironmentCode(f"mine:{name}", folder, **given))


def run(workers: EnvironmentWorkers, work: Callable[[EnvironmentWorkers], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await work(workers)
        finally:
            await workers.close()

    return asyncio.run(main())


def call(name: str, turn: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(CallKey(1, 0, 0, 0, turn, 0), name, arguments)


def noted(folder: Path) -> list[str]:
    """What was done, without the ids of processes."""
    return [line.partition(" ")[2] for line in (folder / "log").read_text().splitlines()]


@pytest.mark.slow
def test_episodes_live_side_by_side_and_the_class_is_in_no_other_process(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers) -> None:
        await workers.open()
        assert [tool["function"]["name"] for tool in workers.tools] == ["note", "add", "end", "wait", "clock"]
        one, other, third = [await workers.begin("1-0-0-0", [], {"start": start}) for start in (1, 20, 300)]
        assert [each.observation for each in (one, other, third)] == ["It is 1.", "It is 20.", "It is 300."]
        assert await one.make(call("add", number=1)) == "2"
        assert await other.make(call("add", number="2")) == "22"
        assert await one.make(call("add", number="many")) == (
            "error: add: number: Input should be a valid integer, unable to parse string as an integer"
        )
        assert await one.make(call("wait")) == "waited"
        assert (await one.reward(), await other.reward(), await third.reward()) == (0.2, 2.2, 30.0)
        await one.end()
        with pytest.raises(Failed, match=r"^mine:Counter.reset raised TypeError: .*'stop'"):
            await workers.begin("1-0-0-0", [], {"stop": 1})
        assert await other.make(call("add", number=1)) == "23", "a failure of one is none of the others"

    run(workers_of(folder, workers=2), work)
    assert "mine" not in sys.modules
    pids = {line.split()[0] for line in (folder / "log").read_text().splitlines()}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", r"^mine:Counter.end ended its worker process with exit code 7, twice$"),
        (
            "crash",
            r"^mine:Counter.end crashed its worker process \(SIGSEGV\); last frames: .*mine.py:\d+ in end, ",
        ),
        ("hang", r"^mine:Counter.end gave no answer within 5 s \(spec.sessions.environment.timeoutSeconds\); last fr"),
        ("garbage", r"^mine:Counter.end (crashed|ended|closed|gave no answer)"),
        ("raise", r"^mine:Counter.end raised ConnectionError: 503 from the shop at .*mine.py:\d+ in end$"),
    ],
)
def test_what_an_environment_does_is_named_and_the_next_episode_goes_on(folder: Path, how: str, says: str) -> None:
    async def work(workers: EnvironmentWorkers) -> None:
        failing, other = await workers.begin("1-0-0-0", [], {}), await workers.begin("1-0-0-0", [], {"start": 5})
        await other.make(call("add", number=1))
        await failing.make(call("add", number=1))
        with pytest.raises(Failed, match=says):
            await failing.make(call("end", how=how))
        await failing.end()
        # Its process died, too. Its call is made again on a new object, and it knows nothing of this.
        assert await other.make(call("add", turn=1, number=2)) == "8"
        assert await other.reward() == 0.8

    run(workers_of(folder, seconds=5.0 if how in ("hang", "garbage") else 120.0), work)
    again = [] if how == "raise" else ["reset", "add 1"]
    assert noted(folder) == [
        "reset",
        "reset",
        "add 1",
        "add 1",
        how,
        *([*again, how] if again else []),
        *again,
        "add 2",
    ]


@pytest.mark.slow
def test_a_process_that_is_killed_costs_nothing(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers) -> list[str]:
        episode = await workers.begin("1-0-0-0", [], {"start": 1})
        answers = []
        for number in range(4):
            answers.append(await episode.make(call("add", turn=number, number=number)))
            os.kill(int((folder / "log").read_text().splitlines()[-1].split()[0]), signal.SIGKILL)
        answers.append(str(await episode.reward()))
        return answers

    assert run(workers_of(folder), work) == ["1", "2", "4", "7", "0.7"]


@pytest.mark.slow
def test_a_call_that_ends_its_process_once_is_made_again(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers) -> str:
        episode = await workers.begin("1-0-0-0", [], {})
        await episode.make(call("add", number=3))
        return await episode.make(call("end", turn=1, how="once"))

    assert run(workers_of(folder), work) == "ended"
    assert noted(folder) == ["reset", "add 3", "once", "reset", "add 3", "once"]


@pytest.mark.slow
def test_a_process_in_which_a_call_failed_gets_no_other_episode(folder: Path) -> None:
    """Perhaps it failed because of what it left there, such as open files."""

    async def work(workers: EnvironmentWorkers) -> None:
        failing, beside = await workers.begin("1-0-0-0", [], {}), await workers.begin("1-0-0-0", [], {})
        with pytest.raises(Failed):
            await failing.make(call("end", how="raise"))
        await workers.begin("1-0-0-0", [], {})
        await failing.end()
        await beside.make(call("note", what="beside"))
        (first, _) = workers._workers
        await beside.end()
        assert first.process._process.exit_code is not None, "it ends with its last episode"

    run(workers_of(folder), work)
    pids = [line.split()[0] for line in (folder / "log").read_text().splitlines()]
    assert pids[0] == pids[1] == pids[2] == pids[4] != pids[3]


@pytest.mark.slow
def test_at_most_once_means_so(folder: Path) -> None:
    """Neither the call that ended the process is made again, nor those of the episodes beside it. The first is a
    failure. The others may be played again from their beginning."""

    async def work(workers: EnvironmentWorkers) -> None:
        failing, other = await workers.begin("1-0-0-0", [], {}), await workers.begin("1-0-0-0", [], {})
        await other.make(call("add", number=1))
        with pytest.raises(Failed, match=r"ended its worker process with exit code 7$"):
            await failing.make(call("end", how="exit"))
        with pytest.raises(EpisodeLost, match=r"exit code 7, and the episode's calls must not be made twice"):
            await other.make(call("add", turn=1, number=2))
        fresh = await workers.begin("1-0-0-0", [], {"start": 9})
        assert await fresh.make(call("add", number=1)) == "10"

    run(workers_of(folder, repeatable=False), work)
    assert noted(folder) == ["reset", "reset", "add 1", "exit", "reset", "add 1"]


@pytest.mark.slow
@pytest.mark.parametrize("repeatable", [True, False])
def test_after_the_coordinators_death_calls_are_made_again_or_the_episode_is_lost(
    folder: Path, repeatable: bool
) -> None:
    calls = [call("add", turn=turn, number=turn + 1) for turn in range(3)]

    def life(made: int) -> list[str]:
        async def work(workers: EnvironmentWorkers) -> list[str]:
            episode = await workers.begin("1-0-0-0", [], {})
            return [await observe(store.tool_calls, each, episode, repeatable) for each in calls[:made]]

        store = Store(folder / "run")
        try:
            return run(workers_of(folder, repeatable=repeatable), work)
        finally:
            store.close()

    assert life(2) == ["1", "3"]
    if repeatable:
        assert life(3) == ["1", "3", "6"]
    else:
        with pytest.raises(EpisodeLost, match="ended with the coordinator, and the episode's calls must not be made"):
            life(3)
    assert noted(folder) == ["reset", "add 1", "add 2", "reset", *(["add 1", "add 2", "add 3"] if repeatable else [])]


@pytest.mark.slow
def test_an_environment_that_answers_otherwise_the_second_time_is_named(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers) -> None:
        episode = await workers.begin("1-0-0-0", [], {})
        await episode.make(call("clock"))
        os.kill(int((folder / "log").read_text().split()[0]), signal.SIGKILL)
        with pytest.raises(Failed, match=r"^clock was made again after a death and answered .* let it depend on"):
            await episode.make(call("add", turn=1, number=1))

    run(workers_of(folder), work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import missing_module", r"cannot import 'mine' of 'mine:Counter': No module named 'missing_module'"),
        (
            "raise RuntimeError('no dice')",
            r"importing 'mine:Counter' raised RuntimeError: no dice; last frames: .*mine",
        ),
        ("import os; os._exit(3)", r"importing mine:Counter ended its worker process with exit code 3"),
        ("def Counter(): ...", r"mine:Counter must be a class with a method reset"),
        (
            "class Counter:\n def reset(self): ...\n def add(self, number): ...",
            r"the method add of mine:Counter is a tool, but its schema cannot be made",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_the_beginning(folder: Path, code: str, says: str) -> None:
    (folder / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=rf"^spec.sessions.environment.function: .*{says}") as error:
        run(workers_of(folder), lambda workers: workers.open())
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the sandbox


@pytest.fixture(scope="module")
def can_sandbox() -> None:
    problem = Sandbox(Path("/usr")).problem()
    if problem is not None:
        pytest.skip(f"a sandbox is made here by nobody: {problem}")


BOMB = """
import os, time
made = 0
try:
    # More than the machine would notice, should nothing stop them.
    for _ in range(2000):
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(3600)
        made += 1
    print("nothing stopped it")
except OSError as error:
    print("stopped", made)
"""


def ended(process: psutil.Process) -> bool:
    """Also if it only waits to be reaped: an earlier test may have made this process the parent of all orphans."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
def test_a_fork_bomb_ends_with_its_episode(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers) -> None:
        bombing = await workers.begin("1-0-0-0", [], {})
        (worker,) = workers._workers
        outside = psutil.Process(worker.process._process._process.pid)
        told = await bombing.make(call("run", program=BOMB))
        assert told.startswith("stopped ")
        assert int(told.split()[1]) < PROCESSES
        left = outside.children(recursive=True)
        assert len(left) > 100
        # The bomb's own place is free again.
        assert await bombing.make(call("run", turn=1, program="print(6 * 7)")) == "42\n"
        other = await workers.begin("1-0-1-0", [], {})
        assert int((await other.make(call("run", program=BOMB))).split()[1]) > 100, "another sandbox has all places"
        await workers.close()
        wait_for("the end of what the bomb left", lambda: all(map(ended, left)), PATIENCE)

    run(workers_of(folder, "Shell", workers=2, place=LocalProcesses(Sandbox(folder))), work)


def attacks(run_folder: Path, token_pid: int, port: int) -> dict[str, tuple[str, str]]:
    """What is tried, and what it must print."""
    return {
        "the job's token, from any process": (
            f"""
import pathlib
found = 0
for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
        found += b"{TOKEN}" in file.read_bytes()
    except OSError:
        pass
print(found, pathlib.Path("/proc/{token_pid}").exists() and "coordinator" in
      pathlib.Path("/proc/{token_pid}/cmdline").read_text())
""",
            "0 False",
        ),
        "the run's folder": (f"import os; print(os.listdir({str(run_folder)!r}))", "[]"),
        "a change of the code": (
            f"open({str(run_folder.parent / 'mine.py')!r}, 'a')",
            "Error: [Errno",
        ),
        "the user's home": (f"import os; print(os.path.exists({str(Path.home() / 'secret')!r}))", "False"),
        "what only root may read": ("open('/etc/shadow')", "Error: [Errno"),
        "the coordinator's port": (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 20)",
            "ConnectionRefusedError",
        ),
        "another network": ("import socket; socket.create_connection(('192.0.2.1', 80), 20)", "OSError: [Errno 101]"),
        "a file of ten gigabytes": ("open('/tmp/big', 'wb').truncate(10 << 30)", "OSError: [Errno 27] File too large"),
        "many files": ("import os; s = os.statvfs('/tmp'); print(s.f_blocks * s.f_frsize)", str(FILE_BYTES)),
        "shared memory": ("import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)", str(FILE_BYTES)),
        "files elsewhere": ("open('/big', 'w')", "[Errno 30] Read-only file system"),
        "files among devices": ("open('/dev/big', 'w')", "[Errno 30] Read-only file system"),
        "memory": ("bytearray(64 << 30)", "MemoryError"),
        "more rights": ("import os; os.setuid(0)", "PermissionError"),
        "higher limits": (
            "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
            "ValueError: not allowed to raise maximum limit",
        ),
        "other processes": ("import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 6)", "True"),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
def test_what_a_sandbox_keeps_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a-secret")
    run_folder = folder / "runs"
    run_folder.mkdir()
    (run_folder / "secret").write_text("a-secret")
    (link := folder.with_name(f"{folder.name}-linked")).symlink_to(folder)

    async def work(workers: EnvironmentWorkers, tried: dict[str, tuple[str, str]]) -> dict[str, str]:
        episode = await workers.begin("1-0-0-0", [], {})
        told = {
            what: await episode.make(call("run", turn=n, program=program))
            for n, (what, (program, _)) in enumerate(tried.items())
        }
        assert await episode.make(call("run", turn=99, program="print(6 * 7)")) == "42\n", "the episode goes on"
        return {what: text for what, text in told.items() if tried[what][1] not in text}

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = LocalProcesses(Sandbox(link, [run_folder]))
        tries = attacks(run_folder, os.getpid(), port)
        tries["the run's folder by another name"] = attacks(link / "runs", os.getpid(), port)["the run's folder"]
        assert run(workers_of(link, "Shell", place=place), lambda workers: work(workers, tries)) == {}
        # The tries do what they say: without a sandbox they succeed. Of those that give the same answer again if the
        # process must be started anew, as on a busy machine.
        plain = {name: tries[name] for name in ("the run's folder", "the coordinator's port", "other processes")}
        assert run(workers_of(folder, "Shell"), lambda workers: work(workers, plain)).keys() == plain.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
def test_a_hang_in_a_sandbox_says_where_it_hung(folder: Path) -> None:
    (folder / "mine.py").write_text(CODE.replace("with LOG.open", "with open('/tmp/log', 'a') if True else LOG.open"))

    async def work(workers: EnvironmentWorkers) -> None:
        episode = await workers.begin("1-0-0-0", [], {})
        for how, says in (
            ("hang", r"no answer within 10 s .*last frames: .*mine.py:\d+ in end, twice"),
            ("exit", "code 7"),
        ):
            with pytest.raises(Failed, match=says):
                await episode.make(call("end", how=how))
        with pytest.raises(Failed, match=r"crashed its worker process \(SIGSEGV\); last frames: .*mine.py"):
            await episode.make(call("end", how="crash"))

    run(workers_of(folder, place=LocalProcesses(Sandbox(folder)), seconds=10.0), work)


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
def test_a_sandbox_dies_with_its_coordinator(folder: Path) -> None:
    code = f"""
import asyncio, pathlib, time
from dovetail.coordinator.sessions.environment_workers import *
from dovetail.coordinator.user_code.local_process import *
folder = pathlib.Path({str(folder)!r})
async def main():
    workers = EnvironmentWorkers(EnvironmentCode("mine:Shell", folder, 1, 120.0, True, LocalProcesses(Sandbox(folder))))
    await workers.begin("1-0-0-0", [], {{}})
    (worker,) = workers._workers
    print(worker.process._process._process.pid, flush=True)
    time.sleep(3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        outside = psutil.Process(int(coordinator.stdout.readline()))
        inside = outside.children(recursive=True)
        assert len(inside) == 2
        coordinator.kill()
    wait_for("its end", lambda: all(map(ended, (outside, *inside))), PATIENCE)


@pytest.mark.usefixtures("can_sandbox")
def test_a_user_who_is_not_root_makes_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod. The system's programs only, because another user may not read this Python."""
    user = {} if os.geteuid() else {"user": 65532, "group": 65532, "extra_groups": []}
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    for name, value in (("prefix", "/usr"), ("base_prefix", "/usr"), ("path", [])):
        monkeypatch.setattr(sys, name, value)
    command = [*Sandbox(Path("/usr")).command(), "id", "-u"]
    done = subprocess.run(command, **user, cwd="/", capture_output=True, text=True)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (None, "bubblewrap is not installed here; install it (apt install bubblewrap)"),
        (
            "bwrap: Unknown option --disable-userns",
            "bubblewrap is too old here (bwrap: Unknown option --disable-userns); install version 0.8 or later",
        ),
        (
            "bwrap: No permissions to create new namespace",
            "this machine lets bubblewrap make none (bwrap: No permissions to create new namespace); allow user "
            "namespaces (sysctl user.max_user_namespaces, and in a container its seccomp profile)",
        ),
    ],
)
def test_a_machine_without_sandboxes_refuses_and_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, problem: str
) -> None:
    if said is not None:
        (folder / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    _machine_problem.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"^spec.sessions.sandbox: ") as error:
            run(workers_of(folder, place=LocalProcesses(Sandbox(folder))), lambda workers: workers.open())
    finally:
        _machine_problem.cache_clear()
    assert str(error.value) == (
        f"spec.sessions.sandbox: {problem}, or write sandbox: None, and the environment may do what the job may"
    )
