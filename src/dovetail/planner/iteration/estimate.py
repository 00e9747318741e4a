"""Seconds and memory of one iteration of a candidate, in closed form: what the search asks thousands of times.

`dovetail.planner.iteration.simulate` plays the same iteration event by event; the tests hold the two together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.planner.iteration.costs import Step, inference_seconds, origin, servers, together, training_step
from dovetail.planner.iteration.generation import Generated, generate
from dovetail.planner.iteration.memory import GPUMemory, memory
from dovetail.planner.iteration.system import DOVETAIL, System
from dovetail.planner.iteration.transfer import swap_seconds, transfer_seconds
from dovetail.planner.memory.training import Training, stage_parameters
from dovetail.planner.placement.candidate import INFERENCE, Candidate, Share, Task
from dovetail.planner.placement.inventory import Inventory
from dovetail.planner.placement.workload import Workload
from dovetail.planner.shape import Head, ModelShape
from dovetail.planner.timing import DEFAULT, Constants

PHASES = ("generation", "inference", "training", "transfer", "swap")


@dataclass(frozen=True)
class Estimate:
    """`phases`: seconds by name of PHASES, one after the other; what fusion hides is not in `inference`. `memory`: of
    every GPU with a task. `problem`: why it cannot run, one sentence; None if it can."""

    phases: Mapping[str, float]
    memory: tuple[GPUMemory, ...]
    problem: str | None = None

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.problem is None

    def samples_per_second(self, work: Workload) -> float:
        return work.batch / self.seconds


def estimate(
    candidate: Candidate,
    work: Workload,
    inventory: Inventory,
    system: System = DOVETAIL,
    constants: Constants = DEFAULT,
) -> Estimate:
    """Times are also given for a candidate that does not fit, as if it did. Raises TimingError for a dtype that a GPU
    lacks, KeyError for a pool that the inventory lacks."""
    used, rooms = memory(candidate, work, inventory, system)
    problem = next((m.explanation for m in used if not m.fits), None)
    for task, share in candidate.placed:
        if share.tp > inventory[share.pool].per_node:
            problem = f"{task} on {share} has tensor parallel ranks on several nodes of {share.pool}; lower tp"
    for share, room in rooms.items():
        # An engine that cannot let samples join holds all of them at once.
        samples = 1 if system.continuous else -(-work.batch // sum(s.dp for s in candidate.generation))
        if problem is None and room < samples * work.longest:
            problem = (
                f"generation on {share} has room for {max(0, room)} tokens of KV cache, but {samples} sample"
                f"{'s' if samples > 1 else ''} may have {samples * work.longest}"
            )
    generated = _generation(candidate, work, inventory, rooms, system, constants)
    scored = scoring(candidate, work, inventory, constants)
    return Estimate(
        {
            "generation": generated.seconds,
            "inference": _inference(candidate, work, generated, scored),
            "training": _training(candidate, work, inventory, system, constants),
            "transfer": transfer_seconds(candidate, work, inventory, system, constants),
            "swap": swap_seconds(candidate, work, inventory, system, constants),
        },
        used,
        problem,
    )


def _generation(
    candidate: Candidate,
    work: Workload,
    inventory: Inventory,
    rooms: Mapping[Share, int],
    system: System,
    c: Constants,
) -> Generated:
    each = [
        servers(share, inventory[share.pool].cluster, work, max(rooms[share], work.longest), system, c)
        for share in candidate.generation
    ]
    return generate(each, work.batch, work.prompt, work.response, candidate.migration, system.continuous)


def scoring(
    candidate: Candidate, work: Workload, inventory: Inventory, c: Constants
) -> list[tuple[Task, Share, float]]:
    """Every inference task's shares with the seconds of their part of the batch, shared out by speed; the actor's old
    log-probabilities, where they are not folded, as the training share's."""
    found: list[tuple[Task, Share, float]] = []
    tasks: list[tuple[Task, tuple[Share, ...]]] = [(task, candidate.shares(task)) for task in INFERENCE]
    if not candidate.folded:
        tasks.append(("actor_training", candidate.actor_training))
    for task, shares in tasks:
        if not shares:
            continue
        shape, head = work.model(task) or (work.actor, "lm")
        scorer = task in INFERENCE
        alone = [inference_seconds(shape, head, s, inventory[s.pool].cluster, work, c, scorer) for s in shares]
        if len(shares) == 1:
            found.append((task, shares[0], alone[0]))
        else:
            together = 1 / sum(1 / seconds for seconds in alone)
            found += [(task, share, together) for share in shares]
    return found


def busiest(work: Iterable[tuple[Share, float]]) -> float:
    """Most seconds of any GPU, tasks that share it taking turns."""
    tasks = list(work)
    most = 0.0
    for share, _ in tasks:
        # Where any share begins is where sums change.
        total = sum(s for other, s in tasks if other.pool == share.pool and share.first in other.range)
        most = max(most, total)
    return most


def _inference(
    candidate: Candidate, work: Workload, generated: Generated, scored: Sequence[tuple[Task, Share, float]]
) -> float:
    """Seconds after generation. Fused: shares beside the servers score while samples still come, all but the last;
    shares on their GPUs from the gathering on, on the part of them that is free by then."""
    if candidate.migration is None or not scored:
        return busiest((share, seconds) for _, share, seconds in scored)
    most = 0.0
    for _, corner, _ in scored:
        here = [each for each in scored if each[1].pool == corner.pool and corner.first in each[1].range]
        total = sum(seconds for _, _, seconds in here)
        early = [(share, seconds) for task, share, seconds in here if task != "actor_training"]
        # The last samples come last: a pass over them remains.
        rest = sum(seconds * min(1.0, share.dp * share.micro_batch / work.batch) for share, seconds in early)
        most = max(most, rest, total - _hidden(candidate, generated, early))
    return most


def _hidden(candidate: Candidate, generated: Generated, tasks: Sequence[tuple[Share, float]]) -> float:
    """Seconds of tasks on one GPU that are done by the end of generation. A copy of a model that is split over GPUs
    works when all of these are free, whichever servers the tail gathers on."""
    beside, after = [], []
    for share, seconds in tasks:
        on = next((other for other in candidate.generation if share.overlaps(other)), None)
        if on is not None:
            busy, servers = generated.destinations, generated.servers
            spread = Counter({1: share.dp}) if candidate.beside else _spread(share, on)
            free = sum(n * _all_free(k, busy, servers) for k, n in spread.items())
            after.append((free / share.dp, seconds))
        else:
            beside.append(seconds)
    hidden = min(generated.seconds, sum(beside))
    left = min(generated.seconds - generated.gathered, generated.seconds - hidden)
    for speed, seconds in sorted(after, reverse=True):
        if speed > 0:
            done = min(seconds, left * speed)
            hidden += done
            left -= done / speed
    return hidden


@lru_cache(maxsize=8192)
def _spread(share: Share, serving: Share) -> Counter[int]:
    """Number of the share's copies by the number of servers that have GPUs of the copy."""
    if share.pp == share.tp == 1:
        return Counter({1: share.dp})
    starts = share.first + share.tp * np.arange(share.pp * share.dp).reshape(share.pp, share.dp)
    gpus = np.concatenate([starts + t for t in {*range(0, share.tp, serving.tp), share.tp - 1}])
    at = (gpus - serving.first) // serving.tp % serving.dp
    at[(gpus < serving.first) | (gpus >= serving.first + serving.gpus)] = -1
    at.sort(axis=0)
    return Counter((np.diff(at, axis=0, prepend=-1) > 0).sum(axis=0).tolist())


def _all_free(some: int, busy: int, servers: int) -> float:
    """Chance that none of `some` of the servers is one of the `busy` ones."""
    return math.comb(servers - some, busy) / math.comb(servers, busy) if some <= servers else 0.0


def steps_of(
    candidate: Candidate, work: Workload, inventory: Inventory, system: System, c: Constants
) -> tuple[Step | None, Step | None]:
    """An optimizer step of the actor and of the critic."""
    actor, critic = candidate.actor_training, candidate.critic_training
    return (
        step_of("actor_training", actor[0], work, inventory, system, c) if actor else None,
        step_of("critic_training", critic[0], work, inventory, system, c) if critic and work.critic else None,
    )


def step_of(task: Task, share: Share, work: Workload, inventory: Inventory, system: System, c: Constants) -> Step:
    """An optimizer step of the model that a training task trains."""
    shape, head = work.model(task) or (work.actor, "lm")
    lora = work.actor_lora if task == "actor_training" else work.critic_lora
    part = 1.0 if lora is None else _trained(shape, head, lora.rank, tuple(lora.target_modules))
    return training_step(shape, head, origin(share), inventory[share.pool].cluster, work, part, system, c)


def _training(candidate: Candidate, work: Workload, inventory: Inventory, system: System, c: Constants) -> float:
    actor, critic = steps_of(candidate, work, inventory, system, c)
    if actor is None:
        return 0.0
    if critic is None:
        return work.steps * actor.alone
    mine, other = candidate.actor_training[0], candidate.critic_training[0]
    if not mine.overlaps(other):
        return work.steps * max(actor.alone, critic.alone)
    same = mine.pool == other.pool and mine.range == other.range and mine.tp == other.tp
    return work.steps * together(actor, critic, candidate.schedule if same else "Serial")


@lru_cache(maxsize=256)
def _trained(shape: ModelShape, head: Head, rank: int, modules: tuple[str, ...]) -> float:
    lora = LoRA(rank=rank, target_modules=list(modules))
    total, trained = stage_parameters(Training(shape, head, Parallelism(), Dtype.BFLOAT16, 1, lora=lora), 0)
    return trained / total
