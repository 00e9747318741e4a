"""Makes the list of a job's processes on one machine from manifest and plan. The operator makes the list of pods in the
same way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.plan import Plan, Rollout, TrainerRank
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.inheritance import inherited
from dovetail.protocol.process.process_names import (
    COORDINATOR,
    COORDINATOR_MODULE,
    SCORER_MODULE,
    SERVER_MODULE,
    TRAINER_MODULE,
    scorer_name,
)

HOST = "127.0.0.1"
# The port at which the processes of one vLLM server meet. Without it vLLM chooses a free port and opens it only seconds
# later, when another process may have taken it.
VLLM_PORT = "VLLM_PORT"


@dataclass(frozen=True)
class ProcessSpec:
    """One process: `python -m <module>` with exactly this environment. Its output is appended to `log` (a pod sets both
    when it starts).

    `shares_imports`: it needs torch, so it may be forked from a process that has imported torch. `finishes`: it ends
    with 0 when its work is done. `arguments`: of the command line; no process of a job has any."""

    name: str
    module: str
    env: dict[str, str] = field(repr=False)
    log: Path = Path(os.devnull)
    shares_imports: bool = True
    finishes: bool = False
    arguments: Sequence[str] = ()


def process_names(plan: Plan) -> list[str]:
    """The names of all processes, the coordinator first."""
    names = [COORDINATOR, *(trainer.name for trainer in plan.trainers)]
    for rollout in plan.rollouts:
        names += [rollout.name, scorer_name(rollout.name)]
    return names


def port_names(plan: Plan) -> list[str]:
    """The names for which ports are needed: all processes, and one more for the inside of each server."""
    return [*process_names(plan), *(_inside(rollout) for rollout in plan.rollouts)]


def _inside(rollout: Rollout) -> str:
    return f"{rollout.name}/inside"


def gpu_slots(job: RLHFJob, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The GPUs of each trainer and rollout. Their numbers go on from group to group. Groups on CPUs are left out. In a
    group with both roles, trainers and rollouts have the same GPUs."""
    slots: dict[str, tuple[int, ...]] = {}
    used = 0
    for group in job.spec.groups:
        if group.on_cpu:
            continue
        width = group.gpu.per_pod
        ranks = [t.name for t in plan.trainers if t.group == group.name]
        servers = [r.name for r in plan.rollouts if r.group == group.name]
        slots |= {name: (used + i,) for i, name in enumerate(ranks)}
        slots |= {name: tuple(range(used + i * width, used + (i + 1) * width)) for i, name in enumerate(servers)}
        used += max(len(ranks), len(servers) * width)
    return slots


def render(
    job: RLHFJob,
    plan: Plan,
    run_dir: Path,
    ports: Mapping[str, int],
    token: str,
    *,
    base_env: Mapping[str, str] | None = None,
    devices: Sequence[str] = (),
    threads: int = 1,
) -> list[ProcessSpec]:
    """The processes to start, the coordinator first.

    `ports` has one free port for each name of `port_names`. A process serves HTTP there, a trainer only its metrics.
    Every process has what it inherits of `base_env`. `devices` are the machine's GPUs. Each GPU of a group takes the
    next one; if there are too few, several share one. Processes of CPU groups see none. `threads`: OMP_NUM_THREADS,
    unless `base_env` sets it."""
    slots = gpu_slots(job, plan)
    coordinator = f"http://{HOST}:{ports[COORDINATOR]}"
    base = inherited(base_env or {}, threads) | {"PYTHONUNBUFFERED": "1"}

    def spec(
        name: str,
        module: str,
        place: TrainerRank | Rollout | None = None,
        metrics: bool = False,
        shares_imports: bool = True,
    ) -> ProcessSpec:
        env = ProcessEnv(
            job=job.metadata.name,
            name=name,
            run_dir=run_dir,
            coordinator=coordinator,
            token=token,
            host=HOST,
            port=0 if metrics else ports[name],
            metrics_port=ports[name] if metrics else 0,
            group=place.group if place else "",
            rank=place.rank if isinstance(place, TrainerRank) else 0,
            world_size=plan.world_size if isinstance(place, TrainerRank) else 1,
        ).write()
        if devices:
            mine = slots.get(place.name, ()) if place else ()
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(devices[s % len(devices)] for s in mine))
        if module == SERVER_MODULE and isinstance(place, Rollout):
            env[VLLM_PORT] = str(ports[_inside(place)])
        log = run_dir / "logs" / f"{name}.log"
        return ProcessSpec(name, module, base | env, log, shares_imports, finishes=isinstance(place, TrainerRank))

    specs = [spec(COORDINATOR, COORDINATOR_MODULE, shares_imports=False)]
    for trainer in plan.trainers:
        specs.append(spec(trainer.name, TRAINER_MODULE, trainer, metrics=True))
    for rollout in plan.rollouts:
        specs.append(spec(rollout.name, SERVER_MODULE, rollout))
        specs.append(spec(scorer_name(rollout.name), SCORER_MODULE, rollout))
    return specs
