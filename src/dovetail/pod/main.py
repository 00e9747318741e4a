"""Runs the processes of one pod: `python -m dovetail.pod.main`. The operator starts this program in every pod of a
group.

A pod of a trainer group runs one rank for each GPU. A pod of a rollout group runs a vLLM server and its scorer. They
share the GPUs of one container, because Kubernetes gives a GPU to a single container.

A server or scorer that dies after it has worked for a while is restarted while the other one works on. If any other
process dies, all processes are ended and the container exits with its code. Then the pod's Job replaces the pod, and
the job's status quotes the last line. A process that hangs (`liveness`) is killed.

`--drain` is the pod's preStop hook. It tells the coordinator to give this pod's instances no more work. It returns when
their samples have moved."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.launch.devices import cuda_devices
from dovetail.launch.liveness import Liveness, LivenessLimits, Pulses
from dovetail.launch.proctree import descendants, kill_until_gone, snapshot
from dovetail.launch.supervisor import RestartBudget, cpu_threads, how_it_ended
from dovetail.manifest import fixed_names
from dovetail.manifest.types import Group, RLHFJob, Role
from dovetail.protocol.http import direct
from dovetail.protocol.plan import Plan
from dovetail.protocol.process import env
from dovetail.protocol.process.env import ProcessEnv, started_with
from dovetail.protocol.process.exit_codes import BAD_CONFIGURATION
from dovetail.protocol.process.process_names import (
    SCORER_MODULE,
    SERVER_MODULE,
    TRAINER_MODULE,
    rollout_name,
    scorer_name,
)
from dovetail.protocol.process.pulse import PULSE

GRACE_SECONDS = 30.0
# The hook's time is a part of the pod's grace period, which is 25 s on spot nodes.
DRAIN_SECONDS, RETIRE_SECONDS = 15, 5.0
# A server or scorer that worked this long was not broken from the start.
STEADY_SECONDS = 60.0
STOPPED = 128 + signal.SIGTERM
# The time between two looks whether a process has ended.
EXIT_SECONDS = 0.05
TERMINATION_LOG = Path(fixed_names.TERMINATION_LOG)
LONGEST_LINE = 2000


@dataclass(frozen=True)
class PodProcess:
    """`python -m <module>`, with `env` added to the container's environment. `finishes`: it may end with 0 when its
    work is done."""

    name: str
    module: str
    env: dict[str, str] = field(repr=False)
    finishes: bool = False


def pod_processes(
    job: RLHFJob, plan: Plan, group: Group, index: int, base: ProcessEnv, devices: Sequence[str], threads: int
) -> list[PodProcess]:
    """The processes of pod `index` of `group`. Raises ValueError if the plan has no ranks for the pod."""
    found = []
    if Role.TRAINER in group.roles:
        width = max(1, group.gpu.per_pod)
        ranks = [t for t in plan.trainers if t.group == group.name][index * width : (index + 1) * width]
        if len(ranks) < width:
            raise ValueError(f"the plan has no trainer ranks for pod {index} of group {group.name}")
        for number, trainer in enumerate(ranks):
            mine = devices[number : number + 1]
            port = env.TRAINER_METRICS_PORT + number
            variables = _variables(base, trainer.name, group.name, trainer.rank, plan.world_size, metrics_port=port)
            found.append(PodProcess(trainer.name, TRAINER_MODULE, _with(variables, mine, threads), True))
    if Role.ROLLOUT in group.roles:
        name = rollout_name(group.name, index)
        server = _variables(base, name, group.name, port=env.SERVER_PORT)
        scorer = _variables(base, scorer_name(name), group.name, port=env.SCORER_PORT)
        found.append(PodProcess(name, SERVER_MODULE, _with(server, devices, threads)))
        found.append(PodProcess(scorer_name(name), SCORER_MODULE, _with(scorer, devices, threads)))
    return found


def _variables(
    base: ProcessEnv, name: str, group: str, rank: int = 0, world: int = 1, port: int = 0, metrics_port: int = 0
) -> dict[str, str]:
    return ProcessEnv(
        job=base.job,
        name=name,
        run_dir=base.run_dir,
        coordinator=base.coordinator,
        token=base.token,
        host=base.host,
        port=port,
        metrics_port=metrics_port,
        group=group,
        rank=rank,
        world_size=world,
        config_dir=base.config_dir,
    ).write()


def _with(variables: dict[str, str], devices: Sequence[str], threads: int) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    if devices:
        more["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return variables | more


class Pod:
    """Runs the processes side by side until all have finished, one has failed, or `stop` is called. `limits`: when a
    process counts as hanging. `restarts`: the maximum number of restarts within an hour. A process is restarted only if
    it has lived for `steady` seconds and does not finish by itself."""

    def __init__(
        self,
        processes: Sequence[PodProcess],
        environ: Mapping[str, str],
        grace: float = GRACE_SECONDS,
        limits: LivenessLimits | None = None,
        restarts: int = 0,
        steady: float = STEADY_SECONDS,
    ) -> None:
        self._processes = processes
        self._restarts, self._steady = RestartBudget(restarts), steady
        self._environ = dict(environ)
        self._grace = grace
        self._stop = asyncio.Event()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._last: dict[str, str] = {}
        self._pulses = Pulses()
        self._liveness = Liveness(limits, self._pulses.mark) if limits is not None else None
        self._killed_as: dict[str, str] = {}
        self.message = ""

    def stop(self) -> None:
        """End all processes. `run` then returns."""
        self._stop.set()

    async def run(self) -> int:
        """Run the processes. Returns the container's exit code: 0 if all finished, 143 if it was stopped, else the code
        of the first process that failed."""
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._end_hung())
        tasks = {asyncio.create_task(self._kept(process)): process for process in self._processes}
        waiting: set[asyncio.Task[int]] = set(tasks)
        finishing = {task for task, process in tasks.items() if process.finishes}
        code = 0
        try:
            while not finishing or not finishing.isdisjoint(waiting):
                done, _ = await asyncio.wait([*waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    code = STOPPED
                    break
                for task in done & waiting:
                    waiting.remove(task)
                    code = code or self._judge(tasks[task], task.result())
                if code:
                    break
        finally:
            stopping.cancel()
            self._stop.set()  # nothing is started again
            await self._end()
            await asyncio.gather(*tasks, return_exceptions=True)
            watching.cancel()
            self._pulses.close()
        return code

    async def _end_hung(self) -> None:
        while self._liveness is not None:
            for name, why in self._liveness.look().items():
                self._killed_as[name] = f"killed, as it hung: {why}"
                started = self._running[name]
                tree = descendants(started.pid, snapshot())
                for pid in (started.pid, *tree):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(self._liveness.period / 2)

    def _judge(self, process: PodProcess, code: int) -> int:
        """Return 0 for an expected end, else the exit code. `message` then has the reason."""
        if code == 0 and process.finishes:
            return 0
        last = message_of(self._last.get(process.name, ""))
        how = self._killed_as.get(process.name) or how_it_ended(code)
        self.message = f"{process.name} ended ({how})" + (f": {last}" if last else "")
        return 128 - code if code < 0 else code or 1

    async def _kept(self, process: PodProcess) -> int:
        """Run a process until it ends for good. Returns its exit code."""
        while True:
            began = time.monotonic()
            code = await self._one(process)
            if self._stop.is_set() or not self._may_restart(process, code, time.monotonic() - began):
                return code
            how = self._killed_as.pop(process.name, None) or how_it_ended(code)
            last = message_of(self._last.get(process.name, ""))
            text = f"{process.name} ended ({how}), and is started again" + (f": {last}" if last else "")
            print(json.dumps({"event": "process.restarted", "process": process.name, "message": text}), flush=True)

    def _may_restart(self, process: PodProcess, code: int, seconds: float) -> bool:
        """Whether a process that has ended after so many seconds is restarted in this pod. Counts the restart."""
        if process.finishes or code == BAD_CONFIGURATION or seconds < self._steady:
            return False
        return self._restarts.take()

    async def _one(self, process: PodProcess) -> int:
        pulse = str(self._pulses.path(process.name))
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", process.module),
            env=self._environ | process.env | {PULSE: pulse},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._running[process.name] = started
        if self._liveness is not None:
            self._liveness.begin(process.name, started.pid)
        if self._stop.is_set():
            started.terminate()
        assert started.stdout is not None
        copying = asyncio.create_task(self._copy(process.name, started.stdout))
        # `wait` would also wait for the pipe, which a process that it started may hold open.
        while (code := started.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(EXIT_SECONDS)
        if self._liveness is not None:
            self._liveness.end(process.name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        # Processes that it started may have sessions of their own.
        await asyncio.to_thread(kill_until_gone, lambda _: started_with([f"{PULSE}={pulse}"]))
        await asyncio.wait({copying}, timeout=2.0)
        copying.cancel()
        return code

    async def _copy(self, name: str, stream: asyncio.StreamReader) -> None:
        """Copy a process's output to our own, so that `kubectl logs` shows it. The last line is kept."""
        rest = b""
        while chunk := await stream.read(1 << 16):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            lines = (rest + chunk).split(b"\n")
            rest = lines[-1][-LONGEST_LINE:]
            full = [line for line in [*lines[:-1], rest] if line.strip()]
            if full:
                self._last[name] = full[-1][-LONGEST_LINE:].decode(errors="replace").strip()

    async def _end(self) -> None:
        running = [p for p in self._running.values() if p.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(p.wait() for p in running)), self._grace)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def message_of(line: str) -> str:
    """The sentence in a log line. Our programs log JSON."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict):
            return next((str(event[key]) for key in ("message", "reason", "error") if event.get(key)), line)
    return line


@dataclass(frozen=True)
class PodSettings:
    """What a pod runs. `restarts`: see `Pod`."""

    processes: list[PodProcess]
    base: ProcessEnv
    limits: LivenessLimits
    restarts: int


def read_pod(environ: Mapping[str, str]) -> PodSettings:
    """Read the processes of this pod and the limits for hanging. Raises OSError, and ValueError if
    the files are no job or plan, or if they do not fit the pod."""
    base = ProcessEnv.read({env.NAME: "pod", **environ})
    job = RLHFJob.model_validate_json(base.job_file.read_text(encoding="utf-8"))
    plan = Plan.model_validate_json(base.plan_file.read_text(encoding="utf-8"))
    group = next((g for g in job.spec.groups if g.name == base.group), None)
    if group is None:
        raise ValueError(f"{env.GROUP} is {base.group!r}; the job has no such group")
    index = int(environ.get(env.INDEX, "0"))
    devices = [] if group.on_cpu else cuda_devices(environ)
    count = 2 if Role.ROLLOUT in group.roles else max(1, group.gpu.per_pod)
    policy = job.spec.failure_policy
    processes = pod_processes(job, plan, group, index, base, devices, cpu_threads(count))
    # In a pod with trainers, the memory that a new server needs may be in use.
    restarts = 0 if Role.TRAINER in group.roles else policy.max_restarts
    return PodSettings(processes, base, LivenessLimits.of(policy.peer_timeout_seconds), restarts)


def drain(processes: Sequence[PodProcess], base: ProcessEnv) -> None:
    """Tell the coordinator to drain this pod's instances. Wait until no sample needs them. A KV cache is moved where
    that is cheaper than computing it again.

    A coordinator that does not answer will find out by itself. It may read a request late. The pod that comes next has
    the same names, so each request has this pod's address."""
    instances = [process.name for process in processes if not process.finishes]
    for wait in (0, DRAIN_SECONDS):
        for name in instances:
            url = f"{base.coordinator}/v1/instances/{name}?wait={wait}&host={urllib.parse.quote(base.host)}"
            if direct.ask(url, wait + RETIRE_SECONDS, base.token, "DELETE") is None:
                return


async def _run(settings: PodSettings, environ: Mapping[str, str]) -> tuple[int, str]:
    pod = Pod(settings.processes, environ, limits=settings.limits, restarts=settings.restarts)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, pod.stop)
    return await pod.run(), pod.message


def main(argv: list[str] | None = None, log: Path = TERMINATION_LOG) -> int:
    parser = argparse.ArgumentParser(prog="python -m dovetail.pod.main", description=__doc__)
    parser.add_argument("--drain", action="store_true", help="retire this pod's instances, and exit")
    options = parser.parse_args(argv)
    try:
        settings = read_pod(os.environ)
    except (OSError, ValueError) as error:
        print(f"dovetail pod: {error}", file=sys.stderr)
        return BAD_CONFIGURATION
    if options.drain:
        drain(settings.processes, settings.base)
        return 0
    code, message = asyncio.run(_run(settings, os.environ))
    if code == STOPPED and os.environ.get(env.SURPLUS) == "1":
        return 0  # the pod was drained, so its Job is done; the operator makes another one
    if message and log.exists():
        with contextlib.suppress(OSError):
            log.write_text(message[-4000:], encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
