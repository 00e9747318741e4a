"""Keeps a job's processes running, on one machine and in a pod: it starts them, kills those that hang, and restarts
those that die."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dovetail.launch.liveness import Liveness
from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import Event, Exited, Spawner, Started
from dovetail.protocol.process import endings
from dovetail.protocol.process.endings import BAD_CONFIGURATION, JOB_FAILED
from dovetail.protocol.process.process_names import COORDINATOR

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 5.0
# A process that ran this long counts as healthy again, so its next restart is quick.
HEALTHY_SECONDS = 60.0
# `max_restarts` counts restarts within this time. A long run may have many; a broken one has them within the hour.
WINDOW_SECONDS = 3600.0


@dataclass(frozen=True)
class Outcome:
    """How the processes ended. `reason` is a sentence. It is empty on success. `code`: a pod's exit code."""

    succeeded: bool
    reason: str = ""
    interrupted: bool = False
    code: int = 0


@dataclass(frozen=True)
class Ended:
    """A process that has ended at the time `at`, after so many `seconds`. `how`: its exit code or signal as text.
    `last`: what it said last. `delay`: the seconds before its next start; they grow with each restart. `counts`: False
    if it died with its spawner, and another process that did so was judged before."""

    spec: ProcessSpec
    code: int
    how: str
    last: str | None
    at: float
    seconds: float
    delay: float
    counts: bool


class RestartRules(Protocol):
    """What the end of a process means. `judge` returns the seconds after which it is started again, None if its work
    is done, or the outcome if the others must end too."""

    budget: RestartBudget

    def judge(self, ended: Ended) -> Outcome | float | None: ...


class LogFiles:
    """Where the processes' output goes: for each of them into its log. `files` are those that `copy` must read."""

    def __init__(self) -> None:
        self._starts: dict[str, int] = {}

    def began(self, spec: ProcessSpec) -> None:
        """Say that the process is started now."""
        self._starts[spec.name] = endings.size(spec.log)

    def last(self, spec: ProcessSpec) -> str | None:
        """What the process said last since it was started."""
        return endings.why_ended(spec.log, self._starts[spec.name])

    def last_of(self, spawner: Spawner) -> str | None:
        """What a spawner said last."""
        return spawner.last_log_line()

    def files(self) -> list[int]:
        return []

    def copy(self) -> None:
        """Read what can be read without waiting."""


@dataclass
class _Process:
    spec: ProcessSpec
    spawner: Spawner
    pid: int | None = None
    started_at: float = 0.0
    failures: int = 0
    due: float | None = None
    killed_as: str | None = None


def how_it_ended(code: int) -> str:
    """How a process ended, for example 'exit code 3' or 'signal SIGKILL'. `code` is negative for a signal."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"
    return f"exit code {code}"


class RestartBudget:
    """Allows `most` restarts within an hour. Times are monotonic seconds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: deque[float] = deque()

    def taken(self, now: float) -> int:
        """The number of restarts within the last hour."""
        while self._taken and self._taken[0] <= now - WINDOW_SECONDS:
            self._taken.popleft()
        return len(self._taken)

    def take(self, now: float) -> bool:
        """Count one more restart. False if it is not allowed."""
        if self.taken(now) >= self.most:
            return False
        self._taken.append(now)
        return True


class JobRestarts:
    """A whole job on this machine. It succeeds when the process `coordinator` exits with 0. It fails when the
    coordinator exits with 3, when any process exits with 2, or when all processes together would need more than
    `max_restarts` restarts within an hour. `failure_reason` says why the coordinator gave up."""

    def __init__(self, max_restarts: int, failure_reason: Callable[[], str | None] = lambda: None) -> None:
        self.budget = RestartBudget(max_restarts)
        self._failure_reason = failure_reason

    def judge(self, ended: Ended) -> Outcome | float:
        name, code, how, log = ended.spec.name, ended.code, ended.how, ended.spec.log
        said = f"; it said last: {ended.last}" if ended.last else ""
        if name == COORDINATOR and code == 0:
            return Outcome(True)
        if name == COORDINATOR and code == JOB_FAILED:
            return Outcome(False, self._failure_reason() or ended.last or f"the coordinator failed; see {log}")
        if code == BAD_CONFIGURATION:
            return Outcome(False, f"{name} cannot run ({how}){said} (log: {log})")
        if ended.counts and not self.budget.take(ended.at):
            limit = f"failurePolicy.maxRestarts, {self.budget.most} within an hour, is reached"
            return Outcome(False, f"{name} died ({how}) and {limit}{said} (log: {log})")
        # A trainer that was told to stop ends some moments before the coordinator. It must not be restarted there.
        return LONGEST_DELAY_SECONDS if code == 0 and ended.spec.finishes else ended.delay


class Supervisor:
    """Runs `processes`, each with its spawner, on one machine or in a pod. `rules` decide what happens when one ends.
    Processes and spawners that hang, as `liveness` says, are killed. `tell` gets one-line events. Call all methods from
    one thread."""

    def __init__(
        self,
        processes: Iterable[tuple[ProcessSpec, Spawner]],
        rules: RestartRules,
        *,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        liveness: Liveness | None = None,
        output: LogFiles | None = None,
    ) -> None:
        self._processes = {spec.name: _Process(spec, spawner) for spec, spawner in processes}
        self._spawners: Sequence[Spawner] = list(dict.fromkeys(p.spawner for p in self._processes.values()))
        self._rules = rules
        self._tell = tell
        self._clock = clock
        self._liveness = liveness
        self._output = output or LogFiles()
        self._zygotes: dict[Spawner, int | None] = {}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the running processes, by name."""
        return {name: p.pid for name, p in self._processes.items() if p.pid is not None}

    @property
    def spawner_pids(self) -> dict[str, int]:
        """The process ids of the spawners' own processes, by the spawner's name."""
        return {s.name: s.zygote_pid for s in self._spawners if s.zygote_pid is not None}

    def start(self) -> None:
        for spawner in self._spawners:
            spawner.start()
        for process in self._processes.values():
            self._spawn(process)

    def step(self, seconds: float) -> Outcome | None:
        """Wait at most `seconds` for an event and handle it. Returns the outcome if the job is over, else None."""
        self._wait(seconds)
        lost_counted = False
        first: Outcome | None = None
        for spawner in self._spawners:
            for event in spawner.poll():
                outcome = self._handle(event, count=not (isinstance(event, Exited) and event.lost and lost_counted))
                lost_counted |= isinstance(event, Exited) and event.lost
                first = first or outcome
        if first is not None:
            return first
        self._end_hung()
        now = self._clock()
        for process in self._processes.values():
            if process.due is not None and now >= process.due:
                self._spawn(process)
        return None

    def stop(self, grace: float, impatient: Callable[[], bool] = lambda: False) -> None:
        """End all processes: SIGTERM first, and SIGKILL after `grace` seconds or as soon as `impatient()` is true."""
        for process in self._processes.values():
            process.due = None
            process.spawner.signal(process.spec.name, signal.SIGTERM)
        deadline = self._clock() + grace
        while self.pids and self._clock() < deadline and not impatient():
            self._wait(0.1)
            for spawner in self._spawners:
                for event in spawner.poll():
                    process = self._processes[event.name]
                    process.pid = event.pid if isinstance(event, Started) else None
                    if isinstance(event, Started):  # it was asked for before SIGTERM and started only now
                        spawner.signal(event.name, signal.SIGTERM)
        for spawner in self._spawners:
            spawner.close()
        for process in self._processes.values():
            process.pid = None

    def _wait(self, seconds: float) -> None:
        now = self._clock()
        dues = [p.due for p in self._processes.values() if p.due is not None]
        timeout = max(0.0, min([seconds, *(due - now for due in dues)]))
        descriptors = [fd for s in self._spawners if (fd := s.fileno()) is not None]
        select.select([*descriptors, *self._output.files()], [], [], timeout)
        self._output.copy()

    def _spawn(self, process: _Process) -> None:
        process.due = None
        self._output.began(process.spec)
        process.started_at = self._clock()
        process.spawner.spawn(process.spec)

    def _end_hung(self) -> None:
        """Send SIGKILL to processes that hang. It ends a stopped process too. The zygote then ends those below it."""
        if self._liveness is None:
            return
        for spawner in self._spawners:
            if self._zygotes.get(spawner) != spawner.zygote_pid:
                self._zygotes[spawner] = spawner.zygote_pid
                self._liveness.end(spawner.name)
                if spawner.zygote_pid is not None:
                    self._liveness.begin(spawner.name, spawner.zygote_pid, below=False)
        for name, why in self._liveness.look().items():
            if name in self._processes:
                self._processes[name].killed_as = why
                self._processes[name].spawner.signal(name, signal.SIGKILL)
            for spawner in self._spawners:
                if spawner.name == name:
                    spawner.kill(why)

    def _handle(self, event: Event, count: bool) -> Outcome | None:
        process = self._processes[event.name]
        if isinstance(event, Started):
            process.pid = event.pid
            process.started_at = self._clock()
            if self._liveness is not None:
                self._liveness.begin(event.name, event.pid)
            return None
        process.pid = None
        if self._liveness is not None:
            self._liveness.end(event.name)
        how = how_it_ended(event.code)
        if process.killed_as is not None:
            how, process.killed_as = f"killed, as it hung: {process.killed_as}", None
        last = self._output.last(process.spec)
        if event.lost:
            hung = process.spawner.killed_as
            how = f"its spawner killed, as it hung: {hung}" if hung else f"{how} of its spawner"
            last = self._output.last_of(process.spawner)
        now = self._clock()
        seconds = now - process.started_at
        if seconds > HEALTHY_SECONDS:
            process.failures = 0
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(process.failures, 10))
        verdict = self._rules.judge(Ended(process.spec, event.code, how, last, now, seconds, delay, count))
        if verdict is None or isinstance(verdict, Outcome):
            return verdict
        process.failures += 1
        process.due = now + verdict
        budget = self._rules.budget
        counted = f"{budget.taken(now)} of {budget.most} restarts within an hour"
        said = f"; it said last: {last}" if last else ""
        self._tell(f"{event.name} died ({how}); starting it again ({counted}){said}")
        return None


def cpu_threads(processes_at_work: int) -> int:
    """The number of OMP threads for each of `processes_at_work` processes that work at the same time here."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // max(1, processes_at_work))
