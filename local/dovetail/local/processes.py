"""The processes of a job on one machine: a pure function from manifest and plan, as the operator renders pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.api.env import ProcessEnv
from dovetail.api.types import Group, RLHFJob, Role

if TYPE_CHECKING:
    from dovetail.api.plan import Plan

COORDINATOR = "coordinator"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class ProcessSpec:
    """One process: `python -m <module>` with exactly this environment, its output appended to `log`.

    `shares_imports`: it needs torch, so it may be forked from a process that has imported it."""

    name: str
    module: str
    env: dict[str, str] = field(repr=False)
    log: Path
    shares_imports: bool = True


def pods_of(group: Group) -> int:
    """How many pods of a group a local run starts: its fixed size, or its least one."""
    return group.replicas or group.min_replicas or 1


def on_cpu(group: Group) -> bool:
    return group.gpu.product is None or group.gpu.per_pod == 0


@dataclass(frozen=True)
class _Place:
    """A trainer rank or a rollout: its name, group and the slots (GPUs, counted over all groups) it runs on."""

    name: str
    group: Group
    slots: tuple[int, ...]


def _places(job: RLHFJob) -> tuple[list[_Place], list[_Place]]:
    """Trainer ranks and rollouts. A group with both roles has its trainers and rollouts on the same GPUs."""
    trainers: list[_Place] = []
    rollouts: list[_Place] = []
    used = 0
    for group in job.spec.groups:
        width = 0 if on_cpu(group) else group.gpu.per_pod
        for pod in range(pods_of(group)):
            slots = tuple(range(used, used + width))
            used += width
            if Role.TRAINER in group.roles:
                for rank in range(max(1, width)):
                    trainers.append(_Place(f"trainer-{len(trainers)}", group, slots[rank : rank + 1]))
            if Role.ROLLOUT in group.roles:
                rollouts.append(_Place(f"{group.name}-{pod}", group, slots))
    return trainers, rollouts


def process_names(job: RLHFJob, plan: Plan) -> list[str]:
    """Names of all processes, the coordinator first; each needs one port."""
    trainers, rollouts = _places(job)
    names = [COORDINATOR, *(t.name for t in trainers)]
    for rollout in rollouts:
        names += [rollout.name, f"{rollout.name}-scorer"]
    return names


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

    `ports` has one free port per name of `process_names`: what the process serves HTTP on, or its metrics (trainers).
    `base_env` is what every process inherits. `devices` are the machine's GPUs: each GPU of a group takes the next
    one, beginning again where they run out; processes of CPU groups see none. `threads`: OMP_NUM_THREADS, unless
    `base_env` sets it. Raises ValueError if the plan asks for another number of trainer ranks than the groups have."""
    trainers, rollouts = _places(job)
    coordinator = f"http://{HOST}:{ports[COORDINATOR]}"
    inherited = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | dict(base_env or {})
    inherited["PYTHONUNBUFFERED"] = "1"

    def spec(
        name: str,
        module: str,
        place: _Place | None = None,
        rank: int = 0,
        world: int = 1,
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
            group=place.group.name if place else "",
            rank=rank,
            world_size=world,
        ).write()
        if devices:
            slots = place.slots if place else ()
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(devices[s % len(devices)] for s in slots))
        log = run_dir / "logs" / f"{name}.log"
        return ProcessSpec(name, module, inherited | env, log, shares_imports)

    specs = [spec(COORDINATOR, "dovetail.coordinator.main", shares_imports=False)]
    for rank, place in enumerate(trainers):
        specs.append(spec(place.name, "dovetail.trainer.main", place, rank=rank, world=len(trainers), metrics=True))
    for place in rollouts:
        specs.append(spec(place.name, "dovetail.rollout.server", place))
        specs.append(spec(f"{place.name}-scorer", "dovetail.rollout.scorer", place))
    return specs
