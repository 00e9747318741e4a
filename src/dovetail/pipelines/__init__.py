"""Pipeline schedules that train two models at once on the same ranks: a library that imports nothing else of Dovetail.

A `ScheduleProblem` goes in: two models, their stages, times and memory. A `Schedule` comes out: a list of passes for
each rank.

    problem = fused_problem(8, 4, 16, actor_forward=5, critic_forward=2)
    found = find(problem, FAMILIES["fused"], SearchEffort(seconds=5, clock=time.monotonic))
    check_steps(problem, steps(found))
    print(found.makespan, found.bound, found.peak)
    Path("schedule.json").write_text(json.dumps(document(found)))

`choose` compares families. docs/schedules.md explains the problem, the families and
the search. `simulate` describes the simulator's arrays, which hold stages in any placement on the ranks."""

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.check import RankPass, ScheduleError, check_steps, steps
from dovetail.pipelines.compat import COMPILED
from dovetail.pipelines.families import (
    ALONE,
    CHUNKED,
    DEDICATED,
    FAMILIES,
    Family,
    dedicated,
    dedicated_schedule,
    family_instance,
    family_names,
    family_of,
    fixed_orders,
    interleaved_family,
)
from dovetail.pipelines.instance import Coupling, SearchInstance, Shape, StagePlacement
from dovetail.pipelines.problem import ModelPipelines, ProblemError, ScheduleProblem, fused_problem, serial_memory
from dovetail.pipelines.schedule import DeadlockError, Pass, Schedule, document, evaluate
from dovetail.pipelines.search.find import Choice, choose, find
from dovetail.pipelines.search.rounds import SearchEffort
from dovetail.pipelines.simulate import Floats, Ints, one_f_one_b

__all__ = [
    "ALONE",
    "CHUNKED",
    "COMPILED",
    "DEDICATED",
    "FAMILIES",
    "Choice",
    "Coupling",
    "DeadlockError",
    "Family",
    "Floats",
    "Ints",
    "ModelPipelines",
    "Pass",
    "ProblemError",
    "RankPass",
    "Schedule",
    "ScheduleError",
    "ScheduleProblem",
    "SearchEffort",
    "SearchInstance",
    "Shape",
    "StagePlacement",
    "check_steps",
    "choose",
    "dedicated",
    "dedicated_schedule",
    "document",
    "evaluate",
    "family_instance",
    "family_names",
    "family_of",
    "find",
    "fixed_orders",
    "fused_problem",
    "interleaved_family",
    "lower_bound",
    "one_f_one_b",
    "serial_memory",
    "steps",
]
