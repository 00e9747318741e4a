"""Who hangs: the rule on made-up processes with a made-up clock, and what counts as progress."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from dovetail.launch.liveness import Liveness, LivenessLimits, Pulses
from dovetail.launch.proctree import Process
from dovetail.protocol.process.pulse import PROGRESS, PULSE, Progress, Pulse
from dovetail.rollout.scoring.scorer_app import ScorerService
from dovetail.rollout.serving import routes
from helpers.patience import PATIENCE

LIMITS = LivenessLimits(stopped=60, silent=180, busy=1800, starting=1800)


class World:
    """A machine with one process of ours (pid 10) and its child (pid 11)."""

    def __init__(self, limits=LIMITS):
        self.now, self.beats = 0.0, 0
        self.states, self.cpu = {10: "S", 11: "S"}, {10: 0.0, 11: 0.0}
        self.liveness = Liveness(limits, lambda name: self.beats, lambda: self.now, self.processes)
        self.liveness.begin("gen-0", 10)

    def processes(self):
        return [Process(pid, {10: 1, 11: 10}[pid], 10, state, self.cpu[pid]) for pid, state in self.states.items()]

    def pass_time(self, seconds, *, beating=False, cpu=0.0):
        """What is found within `seconds`, and when; `cpu`: the share of a core that the child uses."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.beats += beating
            self.cpu[11] += cpu
            if found := self.liveness.look():
                return self.now, found["gen-0"]
        return None


def test_what_beats_is_left_alone():
    assert World().pass_time(100_000, beating=True) is None


@pytest.mark.parametrize(("pid", "said"), [(10, "stopped for 60 s"), (11, "its process 11 stopped for 60 s")])
def test_a_stopped_process_is_found_whoever_still_beats(pid, said):
    world = World()
    world.pass_time(100, beating=True)
    world.states[pid] = "T"
    at, why = world.pass_time(100, beating=True)
    assert 160 <= at <= 160 + 3 * world.liveness.period
    assert why == said
    assert world.pass_time(1000) is None, "named once"


def test_a_stop_that_ends_in_time_costs_nothing():
    world = World()
    for _ in range(20):
        world.states[11] = "T"
        assert world.pass_time(50, beating=True) is None
        world.states[11] = "S"
        assert world.pass_time(20, beating=True) is None


def test_silence_counts_from_the_last_beat():
    world = World()
    world.pass_time(100, beating=True)
    at, why = world.pass_time(1000, cpu=0.005)
    assert 280 <= at <= 280 + 3 * world.liveness.period
    assert why == "silent for 180 s, doing nothing"


def test_long_work_is_not_silence():
    world = World()
    world.pass_time(100, beating=True)
    assert world.pass_time(1700, cpu=0.9) is None, "a prefill, a long pass"
    assert world.pass_time(10, beating=True) is None
    world.states[11] = "D"
    assert world.pass_time(1700) is None, "reading from a slow disk"
    at, why = world.pass_time(1000)
    assert at == pytest.approx(3610, abs=3 * world.liveness.period)
    assert why.endswith("though it used the CPU")


def test_a_start_takes_as_long_as_it_takes_if_something_happens():
    world = World()
    assert world.pass_time(20_000, cpu=0.5) is None, "compiling, loading"
    world = World()
    at, why = world.pass_time(20_000)
    assert at == pytest.approx(1800, abs=3 * world.liveness.period)
    assert "doing nothing" in why


def test_a_beat_before_the_first_look_counts_and_one_of_an_earlier_life_does_not():
    world = World()
    world.beats = 1
    assert world.pass_time(1000) == (185.0, "silent for 180 s, doing nothing")
    world.liveness.begin("gen-0", 10)
    assert world.pass_time(1000) is None, "it still starts"
    world.liveness.end("gen-0")
    world.liveness.begin("gen-0", 10)
    world.beats = 2
    found = world.pass_time(1000)
    assert found is not None
    assert found[1] == "silent for 180 s, doing nothing"


def test_a_watcher_that_was_stopped_itself_blames_nobody():
    world = World()
    world.pass_time(100, beating=True)
    world.now += 10_000.0
    assert world.pass_time(10) is None


def test_processes_without_a_pulse_are_watched_for_stops_only():
    world = World()
    world.beats = None
    liveness = Liveness(LIMITS, lambda name: None, lambda: world.now, world.processes)
    liveness.begin("gen-0", 10)
    for _ in range(5000):
        world.now += 1.0
        assert liveness.look() == {}


def test_limits_follow_the_peer_timeout():
    assert LivenessLimits.of(60) == LivenessLimits(60, 180, 1800, 1800)
    assert LivenessLimits.of(600) == LivenessLimits(600, 1200, 6000, 6000)


def test_a_beat_changes_the_mark():
    pulses = Pulses()
    path = pulses.path("a")
    pulse = Pulse.read({PULSE: str(path)})
    os.utime(path, ns=(1, 1))
    before = pulses.mark("a")
    pulse.beat()
    assert pulses.mark("a") != before
    assert pulses.mark("unknown") is None
    pulses.close()
    pulse.beat()  # the launcher has gone: no error
    Pulse.read({}).beat()


def test_a_unix_socket_fits_beside_the_pulses_whatever_the_temporary_folder_is(tmp_path, monkeypatch):
    long = tmp_path / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    pulses = Pulses()
    with socket.socket(socket.AF_UNIX) as one:
        # vLLM names them so.
        one.bind(str(pulses.path("gen-0").with_name(str(uuid.uuid4()))))
    folder = pulses.path("gen-0").parent
    pulses.close()
    assert not folder.exists(), "the sockets of servers that were killed go too"


def test_what_a_killed_launcher_leaves_is_removed_by_the_next(monkeypatch, request):
    tmp_path = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from dovetail.launch.liveness import Pulses; all = Pulses(); print(all.path('a'), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes
    ) as launcher:
        left = Path(launcher.stdout.readline().strip())
        other = Pulses()
        assert left.exists(), "its launcher lives"
        launcher.kill()
    strange = tmp_path / "dovetail-pulse-of-nobody"
    strange.mkdir()
    last = Pulses()
    assert not left.parent.exists()
    assert other.path("b").exists(), "its launcher lives, too"
    assert strange.exists(), "it has no lock"
    last.close()
    other.close()
    assert list(tmp_path.iterdir()) == [strange]


def test_a_loop_that_polls_is_no_progress_and_work_is():
    clock, moved_bytes = [0.0], [0]
    progress = Progress(lambda: clock[0], lambda: moved_bytes[0])
    assert progress.moved()
    sum(range(1_000_000))
    clock[0], moved_bytes[0] = 60.0, 60_000
    assert not progress.moved(), "it used the CPU and read a lock's file"
    progress.made()
    assert progress.moved()
    assert not progress.moved()
    clock[0], moved_bytes[0] = 70.0, 70_000_000
    assert progress.moved(), "it writes a checkpoint"
    assert not progress.excused
    with progress.bounded():
        assert progress.excused
        assert not progress.moved()
    assert not progress.excused
    assert progress.moved()
    assert not progress.moved()


def test_what_a_process_writes_is_progress(tmp_path):
    clock = [0.0]
    progress = Progress(lambda: clock[0])
    progress.moved()
    clock[0] = 5.0
    (tmp_path / "weights").write_bytes(bytes(20_000_000))
    assert progress.moved()


def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def eventually(condition):
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


class Engine:
    """An engine core's client: answers while it may."""

    def __init__(self):
        self.errored, self.asked, self.may_answer = False, 0, asyncio.Event()

    async def is_paused(self):
        self.asked += 1
        await self.may_answer.wait()
        if self.asked == 2:
            raise RuntimeError("the engines do not agree")
        return False


class Counting(Pulse):
    def __init__(self):
        super().__init__(None)
        self.beats = 0

    def beat(self):
        self.beats += 1


def test_a_server_beats_only_after_answers_of_its_engine_core(monkeypatch):
    monkeypatch.setattr(routes, "BEAT_SECONDS", 0.01)

    async def serve():
        engine, pulse = Engine(), Counting()
        task = asyncio.create_task(routes.beat(engine, pulse))
        await asyncio.sleep(0.2)  # the event loop turns all the while
        assert (engine.asked, pulse.beats) == (1, 0)
        engine.may_answer.set()
        await eventually(lambda: pulse.beats >= 3)
        engine.may_answer.clear()
        beats, asked = pulse.beats, engine.asked
        await asyncio.sleep(0.2)
        assert pulse.beats <= beats + 1
        assert engine.asked <= asked + 1
        engine.errored = True
        engine.may_answer.set()
        await task

    asyncio.run(asyncio.wait_for(serve(), PATIENCE))


def test_a_scorer_is_alive_while_it_idles_or_works_and_not_while_a_pass_hangs():
    class Stuck:
        device = torch.device("cpu")
        over = threading.Event()

        def bring(self):
            while not self.over.is_set():
                sum(range(1000))
            return []

    scorer = Stuck()
    service = ScorerService(scorer, lambda *args, **fields: None, receiver=object())

    async def bring():
        assert service.alive(), "nothing to do"
        task = asyncio.create_task(service.bring())
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: service._at_work)
        await eventually(lambda: not service.alive())
        assert not service.alive(), "it uses the CPU, and no more"
        PROGRESS.made()
        assert service.alive()
        scorer.over.set()
        await task
        assert service.alive()

    asyncio.run(asyncio.wait_for(bring(), PATIENCE))
