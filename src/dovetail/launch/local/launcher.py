"""Runs a job on this machine. It makes the run directory, reserves ports, and starts and ends the processes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.model_folders import check_local
from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch.liveness import Liveness, LivenessLimits, Pulses
from dovetail.launch.local.aftermath import DiskWatch, give_back, reserve, with_cause, write_results
from dovetail.launch.local.rundir import RunDir
from dovetail.launch.ports import PortReservation
from dovetail.launch.processes import HOST, ProcessSpec, port_names, render
from dovetail.launch.spawn import PRELOAD_TRAINERS, ExecSpawner, ForkSpawner, Spawner
from dovetail.launch.supervisor import JobRestarts, Outcome, Supervisor, cpu_threads
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.durable import read_object, write_json
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.inheritance import inherited
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.protocol.process.pulse import PULSE

# The open files of a process without samples. They are libraries, logs, and sockets of vLLM and of the trainers.
BASE_FILES = 256
WRITE_SECONDS = 5.0  # between two writes of the run's time
SPAWN = "DOVETAIL_SPAWN"
GRACE_SECONDS = 5.0
SpawnKind = Literal["exec", "fork"]
Earlier = Literal["refuse", "resume", "overwrite"]


def spawn_kind(environ: Mapping[str, str], devices: Collection[str]) -> SpawnKind:
    """The value of DOVETAIL_SPAWN. Without it: fork on a machine without GPUs, exec on a machine with GPUs. Raises
    RunError for other values."""
    chosen = environ.get(SPAWN) or ("exec" if devices else "fork")
    if chosen not in ("exec", "fork"):
        raise RunError(f"{SPAWN} is {chosen!r}; set it to exec or fork")
    return "fork" if chosen == "fork" else "exec"


class Launcher:
    """One run of a job. As a context manager it locks the run directory, and ends every process on exit.

        with Launcher(job, plan, Path("runs/quickstart")) as launcher:
            outcome = launcher.run()

    `earlier`: what happens to an earlier run in the directory. `exclude`: processes that are not started, because the
    caller does their work. (The Python API is its own coordinator and passes {"coordinator"}.) Entering raises
    RunError, and UsageError for a directory that is in use."""

    def __init__(
        self,
        job: RLHFJob,
        plan: Plan,
        run_dir: Path | str,
        earlier: Earlier = "refuse",
        *,
        exclude: Collection[str] = (),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._job = job
        self._plan = plan
        self._dir = RunDir(Path(run_dir))
        self._earlier = earlier
        self._exclude = frozenset(exclude)
        # torch and other libraries read their files in the locale's encoding, and fail if that is not UTF-8.
        self._environ = {**os.environ, "PYTHONUTF8": "1"}
        self._tell = tell
        self._ports = PortReservation(HOST)
        self._interrupts = 0
        self._supervisor: Supervisor | None = None
        self._stopwatch: Stopwatch | None = None
        self._pulses: Pulses | None = None
        self.specs: list[ProcessSpec] = []
        self.token = ""
        self.coordinator_port = 0

    @property
    def run_dir(self) -> Path:
        return self._dir.path

    @property
    def _disks(self) -> tuple[Path, Path]:
        """The folders that may be on different disks."""
        return self.run_dir, self._dir.logs

    @property
    def url(self) -> str:
        """The coordinator's address."""
        return f"http://{HOST}:{self.coordinator_port}"

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the running processes, by name."""
        return {} if self._supervisor is None else self._supervisor.pids

    @property
    def spawner_pids(self) -> dict[str, int]:
        """The process ids of the spawners, by name: `spawner`, and `forker` if processes are forked."""
        return {} if self._supervisor is None else self._supervisor.spawner_pids

    def __enter__(self) -> Launcher:
        devices = cuda_devices(self._environ)
        kind = spawn_kind(self._environ, devices)
        try:
            check_local(self._job.spec)
        except DataError as error:
            raise RunError(str(error)) from error
        allow_files(files_needed(self._job.spec, self._plan))
        resume = self._earlier == "resume"
        self._dir.open(resume=resume, overwrite=self._earlier == "overwrite")
        try:
            if told := self._dir.write_job(self._job, self._plan, resume=resume):
                self._tell(told)
            self.token = self._dir.token()
            self._stopwatch = Stopwatch(self.run_dir / "elapsed.json")
            ports = self._ports.reserve(port_names(self._plan))
            self.coordinator_port = ports[COORDINATOR]
            self._prepare(kind, devices, ports)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take_profile(self, profile: Profile) -> None:
        """Let the first schedule of training be made with these times. Call it before `start`."""
        self._dir.write_profile(profile)

    def start(self) -> None:
        """Start every process. After that `step` keeps them running."""
        assert self._supervisor is not None, "use the launcher in a with statement"
        self._supervisor.start()

    def step(self, seconds: float = 0.5) -> Outcome | None:
        """Wait up to `seconds`, and restart processes that died. Returns the outcome when the job is over, else None.
        Call it again and again."""
        assert self._supervisor is not None
        assert self._stopwatch is not None
        outcome = self._supervisor.step(seconds)
        place = self._dir.place()
        if place != self.run_dir and not (outcome and outcome.succeeded):
            to = f"moved to {place}" if place.exists() else "deleted"
            way = f"continue with --run-dir {place} --resume" if place.exists() else "start it anew"
            return Outcome(False, f"the run directory {self.run_dir} was {to} during the run; {way}")
        self._stopwatch.look()
        limit = self._job.spec.active_deadline_seconds
        if outcome is None and limit is not None and self._stopwatch.seconds > limit:
            reason = (
                f"the run took longer than spec.activeDeadlineSeconds, {limit} s in all its resumes; to go on, give "
                "--resume with --set spec.activeDeadlineSeconds=N and a larger N"
            )
            return Outcome(False, reason)
        return outcome

    def run(self, on_step: Callable[[], None] = lambda: None) -> Outcome:
        """Start the processes, wait for the job's end, and stop them. SIGINT, SIGTERM or SIGHUP stops everything within
        seconds; a second one stops it at once. SIGHUP stays ignored if it is (nohup).

        `on_step` is called a few times a second. Signals are handled only when called from the main thread."""
        disks = DiskWatch(self._disks, self._tell, time.monotonic)
        previous = self._catch_signals()
        reserve(self.run_dir)
        try:
            self.start()
            outcome: Outcome | None = None
            while outcome is None:
                outcome = self.step(0.2)
                if self._interrupts:
                    outcome = Outcome(False, "interrupted", interrupted=True)
                else:
                    on_step()
                    disks.look()
            # Look at the disks before the processes end, because they free space then.
            outcome = with_cause(outcome, self._disks)
            self.stop()
            if not outcome.succeeded:
                write_results(self._dir.place(), outcome)
            return outcome
        except Exception as error:
            self.stop()
            # The terminal or the pipe to which the progress goes is gone.
            gone = isinstance(error, OSError) and error.errno in (errno.EIO, errno.EPIPE)
            write_results(self._dir.place(), Outcome(False, str(error), interrupted=gone))
            raise
        finally:
            give_back(self._dir.place())
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    def stop(self) -> None:
        """End every process with SIGTERM. After a few seconds, or at one more interrupt, use SIGKILL."""
        if self._supervisor is not None:
            before = self._interrupts
            self._supervisor.stop(GRACE_SECONDS, impatient=lambda: self._interrupts > before)

    def close(self) -> None:
        """Stop the processes. Free the directory and the ports."""
        try:
            self.stop()
        finally:
            if self._stopwatch is not None and self._dir.place() == self.run_dir:
                self._stopwatch.write()
            self._supervisor = self._stopwatch = None
            if self._pulses is not None:
                self._pulses.close()
            self._ports.close()
            self._dir.close()

    def _prepare(self, kind: SpawnKind, devices: list[str], ports: Mapping[str, int]) -> None:
        at_work = max(len(self._plan.trainers), len(self._plan.rollouts))  # they take turns
        threads = 1 if kind == "fork" else cpu_threads(at_work)
        specs = render(
            self._job,
            self._plan,
            self.run_dir,
            ports,
            self.token,
            base_env=self._environ,
            devices=devices,
            threads=threads,
        )
        self._pulses = pulses = Pulses()

        def pulse(name: str) -> dict[str, str]:
            return {PULSE: str(pulses.path(name))}

        mine = [spec for spec in specs if spec.name not in self._exclude]
        self.specs = [replace(spec, env=spec.env | pulse(spec.name)) for spec in mine]
        zygote_env = inherited(self._environ, threads)
        if kind == "fork":
            # If the zygote had an OpenMP or BLAS thread pool, its children would wait for threads that they don't have.
            zygote_env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        log = self._dir.logs / "spawner.log"
        direct: Spawner = ExecSpawner(zygote_env | pulse("spawner"), log, "spawner")
        shared: Spawner = direct
        if kind == "fork":
            shared = ForkSpawner(zygote_env | pulse("forker"), log, "forker")
            if not self._plan.rollouts:
                shared.preload = PRELOAD_TRAINERS
        policy = self._job.spec.failure_policy
        self._supervisor = Supervisor(
            [(spec, shared if spec.shares_imports else direct) for spec in self.specs],
            JobRestarts(policy.max_restarts, self._failure_reason),
            tell=self._tell,
            liveness=Liveness(LivenessLimits.of(policy.peer_timeout_seconds), pulses.mark),
        )

    def _failure_reason(self) -> str | None:
        """The reason that the coordinator wrote into summary.json before it exited because the job had failed."""
        reason = read_object(self.run_dir / "summary.json").get("reason")
        return str(reason) if reason else None

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1

        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            wanted.remove(signal.SIGHUP)
        return {sig: signal.signal(sig, on_signal) for sig in wanted}


def files_needed(spec: RLHFJobSpec, plan: Plan) -> int:
    """The number of open files that the coordinator needs. It needs the most of all processes, because it has a
    connection for each sample that is generated."""
    streams = len(plan.rollouts) * spec.generation.max_concurrent
    return BASE_FILES + 16 * len(plan.trainers) + min(streams, spec.ppo.global_batch_size)


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed`, because some machines allow fewer than a job needs. The
    processes that it starts inherit it. Raises UsageError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise UsageError(
        f"a process may have {hard} files open here and the job needs {needed}; "
        f"raise the limit (`ulimit -Hn {needed}` as root, or nofile in /etc/security/limits.conf), or lower "
        f"generation.maxConcurrent"
    )


class Stopwatch:
    """Measures how long a run has run, and keeps the time in the run directory. It measures from its creation on, and
    adds the time of earlier resumes. Call `look` again and again. If the launcher is killed, at most `WRITE_SECONDS`
    are lost."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._before, self._begun = max(0.0, float(read_object(path).get("seconds") or 0.0)), clock()
        self._written = self._begun

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._begun

    def look(self) -> None:
        """Write the time every few seconds. A full disk does not end the run."""
        if self._clock() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        self._written = self._clock()
        with contextlib.suppress(OSError):
            write_json(self._path, {"seconds": round(self.seconds, 3)})


def earlier_run(resume: bool, overwrite: bool) -> Earlier:
    """What the options --resume and --overwrite say of an earlier run."""
    return "resume" if resume else "overwrite" if overwrite else "refuse"
