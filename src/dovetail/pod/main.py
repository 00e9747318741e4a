"""Runs the processes of one pod: `python -m dovetail.pod.main`. The operator starts this program in every pod of a
group.

A pod of a trainer group runs one rank for each GPU. A pod of a rollout group runs a vLLM server and its scorer. They
share the GPUs of one container, because Kubernetes gives a GPU to a single container.

A server or scorer that dies after it has worked for a while is restarted while the other one works on. If any other
process dies, all processes are ended and the container exits with its code. Then the pod's Job replaces the pod, and
the job's status quotes the last line. A process that hangs (`liveness`) is killed.

`--drain` is the pod's preStop hook. It tells the coordinator that this pod will end. It returns when the samples of its
instances have moved, and when the steps of its trainers are in a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch.liveness import Liveness, LivenessLimits, Pulses
from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import ExecSpawner, Spawner
from dovetail.launch.supervisor import Ended, LogFiles, Outcome, RestartBudget, Supervisor, cpu_threads
from dovetail.manifest import fixed_names
from dovetail.manifest.types import Group, RLHFJob, Role
from dovetail.protocol.files.durable import read_object
from dovetail.protocol.http import direct
from dovetail.protocol.plan import Plan
from dovetail.protocol.process import env
from dovetail.protocol.process.endings import BAD_CONFIGURATION
from dovetail.protocol.process.env import ProcessEnv
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
# The time for a checkpoint. It is the pod's grace period that limits it.
SAVE_SECONDS = 900
# A server or scorer that worked this long was not broken from the start.
STEADY_SECONDS = 60.0
SPAWNER = "spawner"
STOPPED = 128 + signal.SIGTERM
TERMINATION_LOG = Path(fixed_names.TERMINATION_LOG)
LONGEST_LINE = 2000


def pod_processes(
    job: RLHFJob, plan: Plan, group: Group, index: int, base: ProcessEnv, devices: Sequence[str], threads: int
) -> list[ProcessSpec]:
    """The processes of pod `index` of `group`. Raises ValueError if the plan has no ranks for the pod."""
    specs = []

    def add(module: str, mine: Sequence[str], **more: Any) -> None:
        this = replace(base, group=group.name, **more)
        variables = this.write() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        if mine:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        specs.append(ProcessSpec(this.name, module, variables, finishes=module == TRAINER_MODULE))

    if Role.TRAINER in group.roles:
        width = max(1, group.gpu.per_pod)
        ranks = [t for t in plan.trainers if t.group == group.name][index * width : (index + 1) * width]
        if len(ranks) < width:
            raise ValueError(f"the plan has no trainer ranks for pod {index} of group {group.name}")
        for number, trainer in enumerate(ranks):
            place = {"rank": trainer.rank, "world_size": plan.world_size}
            port = env.TRAINER_METRICS_PORT + number
            add(TRAINER_MODULE, devices[number : number + 1], name=trainer.name, metrics_port=port, **place)
    if Role.ROLLOUT in group.roles:
        name = rollout_name(group.name, index)
        add(SERVER_MODULE, devices, name=name, port=env.SERVER_PORT)
        add(SCORER_MODULE, devices, name=scorer_name(name), port=env.SCORER_PORT)
    return specs


class PodOutput(LogFiles):
    """Copies the processes' output to our own, so that `kubectl logs` shows it. Each process writes into a named pipe
    in `folder`. The last lines are kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._pipes: dict[str, int] = {}
        self._last: dict[str, bytes] = {}

    def pipe(self, name: str) -> Path:
        """Make a pipe for the output of one process."""
        path = self._folder / f"{name}.output"
        os.mkfifo(path, 0o600)
        # Open for writing too, so that it does not end with its process.
        self._pipes[name] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return path

    def began(self, spec: ProcessSpec) -> None:
        self._last.pop(spec.name, None)

    def last(self, spec: ProcessSpec) -> str | None:
        return self._said(spec.name)

    def last_of(self, spawner: Spawner) -> str | None:
        return self._said(SPAWNER)

    def _said(self, name: str) -> str | None:
        self.copy()
        lines = [line for line in self._last.get(name, b"").split(b"\n") if line.strip()]
        return message_of(lines[-1].decode(errors="replace").strip()) if lines else None

    def files(self) -> list[int]:
        return list(self._pipes.values())

    def copy(self) -> None:
        for name, pipe in self._pipes.items():
            with contextlib.suppress(BlockingIOError):  # a pipe holds 64 KiB
                chunk = os.read(pipe, 1 << 16)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                self._last[name] = (self._last.get(name, b"") + chunk)[-LONGEST_LINE:]

    def close(self) -> None:
        """Copy what is left, and close the pipes."""
        self.copy()
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()


class PodRestarts:
    """A pod succeeds when all processes that finish have exited with 0. It fails when any other process ends, unless
    this one has lived for `steady` seconds and does not finish by itself. Then it is restarted, at most `restarts`
    times within an hour."""

    def __init__(self, processes: Sequence[ProcessSpec], restarts: int, steady: float) -> None:
        self.budget = RestartBudget(restarts)
        self._steady = steady
        self._finishing = {process.name for process in processes if process.finishes}

    def judge(self, ended: Ended) -> Outcome | float | None:
        name, code = ended.spec.name, ended.code
        if code == 0 and ended.spec.finishes:
            self._finishing.discard(name)
            return None if self._finishing else Outcome(True)
        worked = not ended.spec.finishes and code != BAD_CONFIGURATION and ended.seconds >= self._steady
        if worked and (not ended.counts or self.budget.take(ended.at)):
            return 0.0
        reason = f"{name} ended ({ended.how})" + (f": {ended.last}" if ended.last else "")
        return Outcome(False, reason, code=128 - code if code < 0 else code or 1)


class Pod:
    """Runs the processes side by side until all have finished, one has failed, or `stop` is called. `environ`: the
    container's environment. `limits`: when a process counts as hanging. `restarts`, `steady`: see PodRestarts."""

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        environ: Mapping[str, str],
        grace: float = GRACE_SECONDS,
        limits: LivenessLimits | None = None,
        restarts: int = 0,
        steady: float = STEADY_SECONDS,
    ) -> None:
        self._grace = grace
        self._stopped = False
        self._pulses = pulses = Pulses()
        self.output = PodOutput(pulses.folder)

        def environment(name: str, more: Mapping[str, str]) -> dict[str, str]:
            return {**environ, **more, PULSE: str(pulses.path(name))}

        spawner = ExecSpawner(environment(SPAWNER, {}), self.output.pipe(SPAWNER))
        specs = [replace(p, env=environment(p.name, p.env), log=self.output.pipe(p.name)) for p in processes]
        self._supervisor = Supervisor(
            [(spec, spawner) for spec in specs],
            PodRestarts(processes, restarts, steady),
            tell=_tell,
            liveness=Liveness(limits, pulses.mark) if limits is not None else None,
            output=self.output,
        )
        self.message = ""

    def stop(self, *_: object) -> None:
        """End all processes. `run` then returns."""
        self._stopped = True

    def run(self) -> int:
        """Run the processes. Returns the container's exit code: 0 if all finished, 143 if it was stopped, else the code
        of the first process that failed."""
        outcome = None
        try:
            self._supervisor.start()
            while outcome is None and not self._stopped:
                outcome = self._supervisor.step(0.2)
        finally:
            self._supervisor.stop(self._grace)
            self.output.close()
            self._pulses.close()
        if outcome is None:
            return STOPPED
        self.message = outcome.reason
        return outcome.code


def _tell(line: str) -> None:
    print(json.dumps({"event": "process.restarted", "message": line}), flush=True)


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

    processes: list[ProcessSpec]
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


def drain(processes: Sequence[ProcessSpec], base: ProcessEnv) -> None:
    """Tell the coordinator to drain this pod's instances, and to have a checkpoint written if the pod trains. Wait
    until no sample needs the instances and the checkpoint is there. A KV cache is moved where that is cheaper than
    computing it again.

    A coordinator that does not answer will find out by itself. It may read a request late. The pod that comes next has
    the same names, so each request has this pod's address."""
    waits = {process.name: DRAIN_SECONDS for process in processes if not process.finishes}
    # One rank asks for the checkpoint of all.
    waits |= {process.name: SAVE_SECONDS for process in [p for p in processes if p.finishes][:1]}
    for name, wait in [*dict.fromkeys(waits, 0).items(), *waits.items()]:
        url = f"{base.coordinator}/v1/instances/{name}?wait={wait}&host={urllib.parse.quote(base.host)}"
        if direct.ask(url, wait + RETIRE_SECONDS, base.token, "DELETE") is None:
            return


class JobEnd:
    """Tells whether the job has succeeded since this object was made. A run that is resumed has the summary of its
    earlier end."""

    def __init__(self, run_dir: Path) -> None:
        self._summary = run_dir / "summary.json"
        self._before = self._written()

    def _written(self) -> int | None:
        try:
            return self._summary.stat().st_mtime_ns
        except OSError:
            return None

    def came(self) -> bool:
        return self._written() != self._before and read_object(self._summary).get("state") == "succeeded"


def _run(settings: PodSettings, environ: Mapping[str, str]) -> tuple[int, str]:
    pod = Pod(settings.processes, environ, limits=settings.limits, restarts=settings.restarts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pod.stop)
    return pod.run(), pod.message


def main(argv: list[str] | None = None, log: Path = TERMINATION_LOG) -> int:
    parser = argparse.ArgumentParser(prog="python -m dovetail.pod.main", description=__doc__)
    parser.add_argument("--drain", action="store_true", help="prepare the end of this pod, and exit")
    options = parser.parse_args(argv)
    try:
        settings = read_pod(os.environ)
    except (OSError, ValueError) as error:
        print(f"dovetail pod: {error}", file=sys.stderr)
        return BAD_CONFIGURATION
    if options.drain:
        drain(settings.processes, settings.base)
        return 0
    end = JobEnd(settings.base.run_dir)
    code, message = _run(settings, os.environ)
    if end.came():
        return 0  # the JobSet ends the pods that are left, or they missed the coordinator
    if code == STOPPED and os.environ.get(env.SURPLUS) == "1":
        return 0  # the pod was drained, so its Job is done; the operator makes another one
    if message and log.exists():
        with contextlib.suppress(OSError):
            log.write_text(message[-4000:], encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
