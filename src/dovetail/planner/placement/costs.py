"""What the search asks of the models of time and memory, about a task alone and about a whole candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.planner.iteration.costs import inference_seconds, servers
from dovetail.planner.iteration.estimate import Estimate, estimate, step_of
from dovetail.planner.iteration.generation import generate
from dovetail.planner.iteration.memory import Footprint, alone, explanation, rooms_for
from dovetail.planner.iteration.system import DOVETAIL, System
from dovetail.planner.iteration.transfer import swap_of
from dovetail.planner.placement.candidate import TRAINING, Candidate, Share, Task
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
        pool = self._inventory[share.pool]
        found = alone(task, share, self._work, pool, self._system)
        need, mine = found.need, found.footprint
        if need > pool.gpu.memory:
            return Option(
                share, 0.0, 0.0, need, f"{task} on {explanation(task, share, self._work, pool, self._system)}"
            )
        try:
            if task == "generation":
                seconds = self._generation(share, found.room)
                problem = None
                if found.room < self._work.longest:
                    problem = (
                        f"generation on {share} has room for {max(0, found.room)} tokens of KV cache, but a sample "
                        f"may have {self._work.longest}"
                    )
                # A tail that gathers may end a little sooner.
                return Option(share, seconds + self._swap(task, share), 0.9 * seconds, need, problem, mine)
            if task in TRAINING:
                step = step_of(task, share, self._work, self._inventory, self._system, self._constants)
                steps = self._work.steps
                return Option(share, steps * step.alone, steps * (step.work + step.fixed), need, None, mine)
            return Option(share, self._inference(task, share) + self._swap(task, share), 0.0, need, None, mine)
        except TimingError as error:
            return Option(share, 0.0, 0.0, need, str(error))

    def rooms(self, tasks: Iterable[Task], pool: Pool) -> tuple[float, float]:
        return rooms_for(tasks, pool, self._system)

    def _swap(self, task: Task, share: Share) -> float:
        if not share.offload or self._system.hidden_swaps:
            return 0.0
        return swap_of(task, share, self._work, self._inventory, self._constants)

    def _generation(self, share: Share, room: int) -> float:
        work, cluster = self._work, self._inventory[share.pool].cluster
        each = servers(share, cluster, work, max(room, work.longest), self._system, self._constants)
        return generate([each], work.batch, work.prompt, work.response, None, self._system.continuous).seconds

    def _inference(self, task: Task, share: Share) -> float:
        work, model = self._work, self._work.model(task)
        assert model is not None
        shape, head = model
        return inference_seconds(shape, head, share, self._inventory[share.pool].cluster, work, self._constants)
