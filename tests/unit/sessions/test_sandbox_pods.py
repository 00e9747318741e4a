"""A job's code in pods of its own: the relays here are processes, and speak with the coordinator as they do there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dovetail.coordinator.sessions.effects import CallKey, Failed, ToolCall
from dovetail.coordinator.sessions.environment_workers import EnvironmentCode, EnvironmentWorkers, WorkerEpisode
from dovetail.coordinator.sessions.play import Ending
from dovetail.coordinator.user_code import sandbox_pods
from dovetail.coordinator.user_code.sandbox_pods import PATH
from helpers.agent_life import END, Job, added, learnt
from helpers.patience import PATIENCE
from helpers.relays import TOKEN, Relays

pytestmark = pytest.mark.slow
CODE = '''
import os, pathlib, subprocess, sys, tempfile, time
HERE = pathlib.Path(__file__).parent


class Counter:
    def reset(self, start: int = 1) -> str:
        self.count = start
        return f"It is {start}."

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: What is added.
        """
        with (HERE / "log").open("a") as log:
            log.write(f"{os.getpid()} {number}\\n")
        self.count += number
        return str(self.count)

    def long(self, number: int) -> str:
        """A long answer.

        Args:
            number: Its length.
        """
        return "x" * number

    def wait(self) -> str:
        """Wait until it may go on."""
        (HERE / "waits").touch()
        while not (HERE / "let").exists():
            time.sleep(0.05)
        return "waited"

    def end(self) -> str:
        """End."""
        os._exit(7)

    def crash(self) -> str:
        """Crash."""
        os.abort()

    def leave(self) -> str:
        """Leave a process behind, which nothing leads to."""
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        left = subprocess.Popen(command, start_new_session=True, env={})
        return f"{left.pid} {tempfile.gettempdir()}"

    def read(self) -> str:
        """What it can read of the relay."""
        found = [name for name in os.environ if "TOKEN" in name]
        for pid in ("self", str(os.getppid())):
            for part in ("environ", "mem"):
                try:
                    found.append(open(f"/proc/{pid}/{part}", "rb").read(1 << 16).decode(errors="replace"))
                except OSError:
                    pass
        return str("the job's token" in "".join(found))

    def get_reward(self) -> float:
        return float(self.count)
'''


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(CallKey(1, 0, 0, 0, 0, 0), name, arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def play(
    folder: Path, work: Callable[[EnvironmentWorkers, Relays], Awaitable[None]], pods: int = 1, **more: Any
) -> None:
    relays = Relays(pods)
    given = {"workers": 2, "seconds": PATIENCE, "repeatable": True} | more
    workers = EnvironmentWorkers(EnvironmentCode("mine:Counter", folder, place=relays, **given))

    async def main() -> None:
        try:
            await workers.open()
            await work(workers, relays)
        finally:
            await workers.close()

    asyncio.run(main())


async def begun(workers: EnvironmentWorkers, *starts: int) -> list[WorkerEpisode]:
    return [await workers.begin("1-0-0-0", [], {"start": start}) for start in starts]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what other processes do has no event
            await asyncio.sleep(0.02)


def test_episodes_in_pods_and_how_their_processes_end(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        one, other = await begun(workers, 1, 20)
        assert (one.observation, other.observation) == ("It is 1.", "It is 20.")
        assert [len(relays.below(number)) for number in (0, 1)] == [1, 1], "the pod with the fewest processes"
        assert (await one.make(call("add", number=1)), await other.make(call("add", number=2))) == ("2", "22")
        assert len(await one.make(call("long", number=900_000))) == 900_000
        assert await one.make(call("read")) == "False"
        with pytest.raises(Failed, match=r"^mine:Counter.end ended its worker process with exit code 7, twice$"):
            await one.make(call("end"))
        with pytest.raises(
            Failed, match=r"crash crashed its worker process \(SIGABRT\); last frames: .*mine.py:\d+ in"
        ):
            await other.make(call("crash"))

    play(folder, work, pods=2)


def test_a_hang_says_where_and_a_call_over_its_time_ends(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        (one,) = await begun(workers, 1)
        with pytest.raises(Failed, match=r"gave no answer within 10 s .*; last frames: .*mine.py:\d+ in wait, twice$"):
            await one.make(call("wait"))
        await until(lambda: not relays.below(0))

    play(folder, work, seconds=10.0)


def test_what_starts_while_another_process_ends_lives() -> None:
    """Until a process is listed it looks like one that lost its parent. Its relay is a process, which ends its
    children."""
    code = """
import asyncio, sys
from dovetail.coordinator.user_code import pod_relay


class Socket:
    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()

    async def close(self):
        pass


async def main():
    relay, made, go_on = pod_relay.Relay("", "", None), asyncio.Queue(), asyncio.Event()

    async def start_python(*given, **more):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", env={}, **pipes)
        made.put_nowait(process)
        await go_on.wait()
        return process

    pod_relay.start_python = start_python
    playing = asyncio.create_task(relay._play(Socket(), "module"))
    process = await made.get()
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "", start_new_session=True)
    relay._started.add(other.pid)
    await other.wait()
    ending = asyncio.create_task(relay._end(other))
    await asyncio.wait({ending}, timeout=1.0)
    go_on.set()
    await ending
    process.stdin.write(b"\\n")
    print(await process.wait())
    playing.cancel()


asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_pod_that_dies_is_named_and_its_episodes_go_on_in_another(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        one, other = await begun(workers, 1, 20)
        for each in (one, other):
            await each.make(call("add", number=1))
        waiting = asyncio.create_task(one.make(call("wait")))
        await until(lambda: (folder / "waits").exists())
        relays.kill(0)
        relays.add()
        (folder / "let").touch()
        assert await waiting == "waited"
        assert await other.make(call("add", number=2)) == "23"
        assert (await one.reward(), await other.reward()) == (2.0, 23.0)

    play(folder, work)


def test_a_call_that_must_not_be_made_twice_fails_with_its_pod(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        (one,) = await begun(workers, 1)
        waiting = asyncio.create_task(one.make(call("wait")))
        await until(lambda: (folder / "waits").exists())
        relays.kill(0)
        with pytest.raises(Failed, match=r"^mine:Counter.wait ended with its sandbox, pod pod-0$"):
            await waiting

    play(folder, work, repeatable=False)


def test_with_a_process_ends_all_that_it_started_and_wrote(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        one, _ = await begun(workers, 1, 2)
        left, place = (await one.make(call("leave"))).split()
        assert alive(int(left))
        assert Path(place).is_dir()
        with pytest.raises(Failed, match="leave was made again after a death and answered '"):
            await one.make(call("end"))
        await until(lambda: not alive(int(left)) and not Path(place).exists())

    play(folder, work)


def test_who_has_no_token_gets_no_process(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        async with aiohttp.ClientSession() as session:
            for token in ("", TOKEN, "x"):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await session.ws_connect(f"{relays.address}{PATH}", headers={"Authorization": f"Bearer {token}"})
                assert refused.value.status == 401
            assert (await session.get(f"{relays.address}/metrics")).status == 404

    play(folder, work)


def test_no_pod_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_pods, "WAIT_SECONDS", 0.1)

    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match=r"^spec.sessions.sandbox: no pod of a sandbox has come within 0 s; kubectl "):
        play(folder, work, pods=0)


def test_an_agent_plays_in_a_pod_and_begins_anew_when_it_dies(tmp_path: Path) -> None:
    """It gets the turns that it had, and nothing is drawn twice."""
    job, relays = Job(tmp_path, [added(1, 2), added(3, 4), f"7{END}"]), Relays()
    job.place = relays

    async def lost() -> None:
        if len(job.drawn) == 1:
            relays.kill(0)
            relays.add()

    job.during = lost
    played = job.play()
    assert played.ending is Ending.ANSWERED
    assert len(job.drawn) == 3
    assert learnt(job, played) == ["".join(job.answers)]
    assert not any(each.poll() is None for each in relays.processes)


def test_an_agent_whose_pods_die_again_and_again(tmp_path: Path) -> None:
    job, relays = Job(tmp_path, [added(1, 2)] * 9), Relays()
    job.place = relays
    killed: list[int] = []

    async def lost() -> None:
        # Until it is given up.
        for number in range(3):
            await until(lambda number=number: bool(relays.below(number)))
            relays.kill(number)
            killed.append(number)
            relays.add()

    job.during = lost
    with pytest.raises(Failed, match=r"^the agent ended with its sandbox, pod pod-2, 3 times$"):
        job.play()
    assert killed == [0, 1, 2]


def test_the_relay_ends_when_it_is_told(folder: Path) -> None:
    async def work(workers: EnvironmentWorkers, relays: Relays) -> None:
        (one,) = await begun(workers, 1)
        (pid,) = relays.below(0)
        os.kill(relays.processes[0].pid, signal.SIGTERM)
        assert await asyncio.to_thread(relays.processes[0].wait, PATIENCE) == 0
        assert not alive(pid)
        relays.add()
        assert await one.make(call("add", number=4)) == "5"

    play(folder, work)
