"""What the search asks of the models of time and memory, about a task alone and about a whole candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.planner.iteration.costs import Step, inference_seconds, servers
from dovetail.planner.iteration.estimate import Estimate, estimate, steps_of
from dovetail.planner.iteration.generation import generate, mean
from dovetail.planner.iteration.memory import Footprint, footprint, memory, rooms_for
from dovetail.planner.iteration.system import DOVETAIL, System
from dovetail.planner.iteration.transfer import swap_seconds
from dovetail.planner.placement.candidate import TRAINING, Candidate, Placement, Share, Task
from dovetail.planner.placement.inventory import Inventory, Pool
from dovetail.planner.placement.workload import Workload
from dovetail.planner.timing import DEFAULT, Constants, TimingError

NOTHING = Footprint()


@dataclass(frozen=True)
class Option:
    """A share of a task, if nothing else ran on its GPUs. `seconds`: of an iteration's part of it; `floor`: below which
    no schedule brings it beside other tasks; `need`: bytes of one GPU, `footprint`: what they are. `problem`: why it
    cannot run even so."""

    share: Share
    seconds: float
    floor: float
    need: float
    problem: str | None = None
    footprint: Footprint = NOTHING


class Estimator(Protocol):
    """Of one workload on one inventory."""

    def option(self, task: Task, share: Share) -> Option: ...

    def estimate(self, candidate: Candidate) -> Estimate: ...

    def rooms(self, tasks: Iterable[Task], pool: Pool) -> tuple[float, float]:
        """Bytes of a GPU of the pool for the footprints of these tasks, and for them where one serves."""
        ...


class Costs:
    """By `dovetail.planner.iteration`."""

    def __init__(
        self, work: Workload, inventory: Inventory, system: System = DOVETAIL, constants: Constants = DEFAULT
    ) -> None:
        self._work, self._inventory = work, inventory
        self._system, self._constants = system, constants

    def estimate(self, candidate: Candidate) -> Estimate:
        """Of a whole iteration."""
        return estimate(candidate, self._work, self._inventory, self._system, self._constants)

    def option(self, task: Task, share: Share) -> Option:
        """The task on these GPUs alone, one share doing all of it."""
        used, rooms = memory(_alone(task, share), self._work, self._inventory, self._system)
        worst = max(used, key=lambda m: m.device_bytes)
        need = worst.device_bytes
        if not worst.fits:
            return Option(share, 0.0, 0.0, need, f"{task} on {worst.explanation}")
        pool = self._inventory[share.pool]
        mine = footprint(task, share, self._work, pool, self._system)
        try:
            if task == "generation":
                seconds = self._generation(share, rooms[share])
                problem = None
                if rooms[share] < self._work.longest:
                    problem = (
                        f"generation on {share} has room for {max(0, rooms[share])} tokens of KV cache, but a sample "
                        f"may have {self._work.longest}"
                    )
                # A tail that gathers may end a little sooner.
                return Option(share, seconds + self._swap(task, share), 0.9 * seconds, need, problem, mine)
            if task in TRAINING:
                step = self._step(task, share)
                steps = self._work.steps
                return Option(share, steps * step.alone, steps * (step.work + step.fixed), need, None, mine)
            return Option(share, self._inference(task, share) + self._swap(task, share), 0.0, need, None, mine)
        except TimingError as error:
            return Option(share, 0.0, 0.0, need, str(error))

    def rooms(self, tasks: Iterable[Task], pool: Pool) -> tuple[float, float]:
        return rooms_for(tasks, pool, self._system)

    def _swap(self, task: Task, share: Share) -> float:
        if not share.offload:
            return 0.0
        return swap_seconds(_alone(task, share), self._work, self._inventory, self._system, self._constants)

    def _generation(self, share: Share, room: int) -> float:
        work, cluster = self._work, self._inventory[share.pool].cluster
        each = servers(share, cluster, work, max(room, work.longest), self._system, self._constants)
        return generate([each], work.batch, work.prompt, work.response, None, self._system.continuous).seconds

    def _step(self, task: Task, share: Share) -> Step:
        actor, critic = steps_of(_alone(task, share), self._work, self._inventory, self._system, self._constants)
        step = actor or critic
        assert step is not None
        return step

    def _inference(self, task: Task, share: Share) -> float:
        work, model = self._work, self._work.model(task)
        assert model is not None
        shape, head = model
        tokens = mean(work.prompt) + mean(work.response)
        return inference_seconds(
            shape, head, share, self._inventory[share.pool].cluster, tokens, work.batch, self._constants
        )


def _alone(task: Task, share: Share) -> Candidate:
    shares: dict[str, tuple[Share, ...]] = {"generation": (), "actor_training": (), task: (share,)}
    return Candidate(Placement.SEPARATION, **shares)  # type: ignore[arg-type]
